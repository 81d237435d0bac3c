"""A batch that is divided inside a request, for two-batch overlap: both halves give float64's result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import ForwardBatch, ForwardExtras, ForwardMode
from attnplug.host import MLADims, plan_forward
from support.stage import Stage, error, small

LATENT = MLADims(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4)
CASES = {
    "mha": small(((5, 7), (0, 4), (17, 6)), kv_heads=2),
    "pages of one": small(((5, 7), (0, 4), (17, 6)), page_size=1),
    "window": small(((5, 7), (0, 4), (17, 6)), window=5, page_size=4),
    "mla": small(((5, 7), (0, 4), (17, 6)), mla=LATENT, v_head_dim=8),
    "mixed": small(((5, 1), (0, 9), (3, 1)), mode=ForwardMode.MIXED),
    "draft": small(((5, 4), (9, 4), (3, 4)), mode=ForwardMode.DRAFT_EXTEND),
    "one request": small(((3, 12),), page_size=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_halves_give_float64s_result_wherever_a_request_is_cut(case):
    """B4: the cache is NaN where nobody wrote, so the first half reads no row of the second."""
    for request, (_, new) in enumerate(case.lengths):
        for cut in range(1, new):
            stage = Stage(case, "cpu")
            assert_float64(stage, *run_halves(stage, stage.batch().split(request, cut=cut)))


@pytest.mark.parametrize("name", ["draft", "one request"])
def test_halves_of_a_batch_with_lengths_on_the_device_alone(name):
    """B4: where all requests have as many new tokens."""
    stage = Stage(CASES[name], "cpu")
    batch = stage.batch()
    batch.geometry = replace(batch.geometry, host=None)
    halves = batch.split(0, cut=3)
    for half in halves:
        assert half.geometry.host is None
        half.geometry = half.geometry.with_host_lengths()
    assert_float64(stage, *run_halves(stage, halves))


def assert_float64(stage: Stage, out: torch.Tensor, lse: torch.Tensor) -> None:
    wanted, wanted_lse = stage.wanted()
    assert error(out, wanted) < 1e-5 and error(lse, wanted_lse) < 1e-5


def run_halves(stage: Stage, halves: tuple[ForwardBatch, ForwardBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer: both are planned first, then run in order, each by its own rows."""
    for half in halves:
        plan_forward(stage.backend, half)
    counts, outs = [half.num_tokens for half in halves], []
    k, v = stage.new_rows(stage.keys).split(counts), stage.new_rows(stage.values).split(counts)
    lse = torch.full(stage.q.shape[:2], float("nan"))
    for half, q, rows, values, sums in zip(halves, stage.q.split(counts), k, v, lse.split(counts), strict=True):
        given = None if stage.case.mla is not None else values
        extras = ForwardExtras(lse=sums)
        outs.append(stage.backend.forward_extend(q, rows, given, stage.layer, half, extras=extras))
    return torch.cat(outs), lse
