"""Queries in two parts joined as FlashMLA takes them: by the kernel, interpreted or on a GPU, and by torch on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnplug import ForwardExtras, ForwardMode
from attnplug_flashmla.backend import join_query
from attnplug_flashmla.triton_kernels import launch_join
from attnplug_testing.devices import DEVICES, INTERPRETED, nothing_waits
from attnplug_testing.kernel_scene import mla
from attnplug_testing.references.flashmla import scene
from attnplug_testing.triton_mode import compiled_by

RANK, ROPE = 512, 64


def parts(rows: int, heads: int, kind: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """``hosts``: as vLLM has them, with heads before rows, and columns of something wider. ``odd``: at addresses and in
    strides that are no multiples of 16 bytes."""
    latent, rope = (torch.randn(rows, heads, width, device=device).to(dtype) for width in (RANK, ROPE))
    if kind == "hosts":
        latent = latent.transpose(0, 1).contiguous().transpose(0, 1)
        rope = torch.cat((rope, rope.neg(), rope), -1)[..., 2 * ROPE :]
    if kind == "odd":
        latent, rope = (torch.cat((each[..., :3], each, each[..., :2]), -1)[..., 3:-2] for each in (latent, rope))
    return latent, rope


in_every_way = pytest.mark.parametrize(
    ("joined", "device"),
    [
        pytest.param(join_query, "cpu", id="cpu"),
        pytest.param(join_query, "cuda", id="cuda", marks=DEVICES[1].marks),
        pytest.param(launch_join, "cpu", id="interpreted", marks=INTERPRETED),
    ],
)


@in_every_way
@pytest.mark.parametrize(
    ("rows", "heads", "kind", "dtype"),
    [
        (1, 16, "contiguous", torch.bfloat16),
        (3, 16, "odd", torch.float16),
        (3, 126, "hosts", torch.float16),
        (3, 126, "odd", torch.bfloat16),
        (64, 16, "hosts", torch.bfloat16),
        (1, 128, "contiguous", torch.float16),
        (9, 128, "hosts", torch.bfloat16),
    ],
)
@pytest.mark.sample(7)
def test_both_parts_are_joined(rows, heads, kind, dtype, joined, device):
    given = parts(rows, heads, kind, dtype, device)
    found = joined(*given)
    assert found.is_contiguous() and torch.equal(found, torch.cat(given, -1))


@in_every_way
@pytest.mark.parametrize(("rows", "heads", "padded"), [(3, 16, 64), (1, 64, 64), (2, 65, 128)])
def test_heads_that_the_kernels_add_are_zeros(rows, heads, padded, joined, device):
    given = parts(rows, heads, "hosts", torch.bfloat16, device)
    found = joined(*given, padded)
    assert found.is_contiguous() and found.shape == (rows, padded, RANK + ROPE)
    assert torch.equal(found[:, :heads], torch.cat(given, -1)) and not found[:, heads:].any()


@in_every_way
def test_every_call_has_memory_of_its_own(joined, device):
    """Another batch may still need the first. Nothing waits for the GPU, so that it can be captured."""
    given = parts(3, 16, "hosts", torch.bfloat16, device)
    first = joined(*given)
    with nothing_waits(device):
        second = joined(*given)
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_columns_that_are_not_adjacent(device):
    given = [torch.randn(3, 16, 2 * width, device=device)[..., ::2] for width in (RANK, ROPE)]
    assert torch.equal(join_query(*given), torch.cat(given, -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)])
def test_queries_in_parts(mode, new, device):
    """The same numbers as joined, with padded rows and the log-sum-exp."""
    stage = scene(mla(((64, new), (9, new)), mode, padding=2), device)
    batch = stage.plan(stage.batch())
    q, k, _ = stage.inputs(batch.num_tokens)
    wanted, found = (torch.zeros(q.shape[:2], device=device) for _ in range(2))
    plain = stage.forward(batch, (q, k, None), extras=ForwardExtras(lse=wanted))
    out = stage.forward(batch, (q[..., :RANK], k, None), extras=ForwardExtras(lse=found, q_rope=q[..., RANK:]))
    assert torch.equal(out, plain) and torch.equal(found, wanted)


@pytest.mark.cross_compile
def test_the_kernel_compiles_for_sm_90():
    """Without such a GPU: the latent part moves by 16 bytes, the narrow one at once, and no register is spilled."""
    pytest.importorskip("triton")
    found = compiled_by(Path(__file__).with_name("cross_compile.py"))
    moved = [f"{way}.global.{kind}" for way in ("ld", "st") for kind in ("b32", "v4.b32", "v4.b32")]
    assert found == [["bf16", 0, moved], ["fp16", 0, moved]]
