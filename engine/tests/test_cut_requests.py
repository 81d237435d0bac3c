"""A batch that is divided inside a request, for two-batch overlap: both halves give float64's result."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from attnplug import ForwardBatch, ForwardExtras, ForwardMode, Geometry, PlanError
from attnplug.contract.geometry import split_by
from attnplug.host import HostLengths, MLADims, plan_forward
from attnplug_engine.execution.two_batch import BatchSplit, split_batch, split_request
from attnplug_testing.errors import raises_naming
from attnplug_testing.full_batch import DIVIDED, FIELDS, GEOMETRY, extend_batch
from attnplug_testing.stage import Stage, error, small

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
@pytest.mark.sample(4)
def test_halves_give_float64s_result_wherever_a_request_is_cut(case):
    """B4: unwritten cache rows are NaN, which proves that the first half reads no row of the second."""
    for request, (_, new) in enumerate(case.lengths):
        for cut in range(1, new):
            stage = Stage(case, "cpu")
            assert_float64(stage, *run_halves(stage, split_batch(stage.batch(), BatchSplit(request, cut), (0, 0))))


@pytest.mark.parametrize("name", ["draft", "one request"])
def test_halves_of_a_batch_with_lengths_on_the_device_alone(name):
    """B4: if all requests have the same number of new tokens."""
    stage = Stage(CASES[name], "cpu")
    batch = stage.batch()
    batch.geometry = replace(batch.geometry, host=None)
    halves = split_batch(batch, BatchSplit(0, 3), (0, 0))
    for half in halves:
        assert half.geometry.host is None
        half.geometry = half.geometry.with_host_lengths()
    assert_float64(stage, *run_halves(stage, halves))


def assert_float64(stage: Stage, out: torch.Tensor, lse: torch.Tensor) -> None:
    wanted, wanted_lse = stage.wanted()
    assert error(out, wanted) < 1e-5 and error(lse, wanted_lse) < 1e-5


def run_halves(stage: Stage, halves: tuple[ForwardBatch, ForwardBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer: both halves are planned first, then run in order, each with its own rows."""
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


def uncaptured(**changes: object) -> ForwardBatch:
    batch = extend_batch()
    batch.geometry = dataclasses.replace(batch.geometry, captured=False, **changes)
    return batch


def two_requests() -> Geometry:
    """Two requests with 3 new tokens each behind 2 cached rows."""
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    return Geometry.of_lengths(ForwardMode.EXTEND, table, [3, 3], [5, 5], 4)


LENGTHS = {"seq_lens", "new_lens", "host"}
"""Fields of a geometry that differ in the first half of a divided request."""


class TestCut:
    """Cut of a batch with 2, 1 and 3 new tokens after the first token of its last request: 4 rows and 2."""

    @pytest.mark.parametrize(
        "field",
        [f for f in (*FIELDS, *GEOMETRY) if f.name not in LENGTHS | {"geometry", "rows", "calls", "lane", "max_new"}],
        ids=lambda f: f.name,
    )
    def test_every_field_goes_where_it_says(self, field):
        """B4: token fields are divided, fields of the divided request and shared fields go to both halves, plans and
        marks to neither."""
        batch = uncaptured()
        first, second = split_batch(batch, BatchSplit(2, 1))
        if field in GEOMETRY:
            batch, first, second = batch.geometry, first.geometry, second.geometry
        value, halves = getattr(batch, field.name), (getattr(first, field.name), getattr(second, field.name))
        how = DIVIDED[field.name]
        if value is None or how == "reset":
            assert halves == (None, None)
        elif how == "token":
            assert torch.equal(halves[0], value[:4]) and torch.equal(halves[1], value[4:])
        elif how == "request":
            assert torch.equal(halves[0], value) and torch.equal(halves[1], value[2:])
        else:
            assert halves == (value, value)

    def test_lengths_are_those_of_each_half(self):
        """In the second half, the prefix of the divided request includes the tokens that the first half runs."""
        batch = uncaptured()
        first, second = (half.geometry for half in split_batch(batch, BatchSplit(2, 1)))
        assert first.host == HostLengths([2, 1, 1], [7, 8, 7]) and second.host == HostLengths([2], [9])
        assert first.new_lens.tolist() == [2, 1, 1] and second.new_lens is None
        assert first.seq_lens.tolist() == [100, 101, 100] and second.seq_lens.tolist() == [102]
        assert [(half.rows, half.max_new, half.lane, half.calls) for half in (first, second)] == [
            (4, 2, 0, ()),
            (2, 2, 1, ()),
        ]
        assert batch.geometry.seq_lens.tolist() == [100, 101, 102], "the whole batch keeps its own"

    def test_every_length_of_a_geometry_is_one_that_a_cut_changes(self):
        """B4: a new length field without a rule for divided requests is reset to None, not copied from the whole
        request."""
        assert {field.name for field in GEOMETRY if field.metadata["split"] == "length"} == LENGTHS

        @dataclasses.dataclass(slots=True, eq=False)
        class Longer(ForwardBatch):
            encoder_lens: torch.Tensor = split_by("length", default=None)

        fields = {field.name: getattr(uncaptured(), field.name) for field in FIELDS}
        first, _ = Longer(**fields, encoder_lens=torch.arange(3)).split(2)
        assert first.encoder_lens.tolist() == [0, 1]
        first, _ = split_batch(Longer(**fields, encoder_lens=torch.arange(3)), BatchSplit(2, 1))
        assert first.encoder_lens is None, "never that of the whole request"

    def test_lengths_on_the_host_are_not_needed_where_all_are_alike(self):
        alike = dataclasses.replace(two_requests(), host=None)
        first, second = split_request(alike, BatchSplit(1, 1), (0, 1))
        assert first.new_lens.tolist() == [3, 1] and second.new_lens is None and second.max_new == 2
        assert first.seq_lens.tolist() == [5, 3] and second.seq_lens.tolist() == [5]
        assert first.host is None and second.host is None

    def test_a_padded_request_stays_without_length(self):
        alike = dataclasses.replace(two_requests(), host=None, seq_lens=torch.tensor([5, 0], dtype=torch.int32))
        first, second = split_request(alike, BatchSplit(1, 2), (0, 1))
        assert first.seq_lens.tolist() == [5, 0] and second.seq_lens.tolist() == [0]

    @pytest.mark.parametrize(
        ("first", "cut", "new_rows"),
        [
            (1, 3, 3),
            (0, -1, 3),
            (2, 1, 0),
        ],
    )
    def test_a_cut_outside_a_request_is_refused(self, first, cut, new_rows):
        with raises_naming(PlanError, f"request {first}", cut, new_rows):
            split_request(two_requests(), BatchSplit(first, cut), (0, 1))

    @pytest.mark.parametrize(
        ("changes", "named"),
        [({"captured": True}, "captured"), ({"mode": ForwardMode.TARGET_VERIFY}, "target_verify")],
    )
    def test_what_a_graph_reads_and_what_leaves_no_state_is_split_between_requests(self, changes, named):
        """Static memory holds one length per request, and a verify changes no state."""
        with raises_naming(PlanError, named, 2, "request 1"):
            split_request(dataclasses.replace(two_requests(), **changes), BatchSplit(1, 2), (0, 1))

    def test_without_exact_lengths_requests_that_differ_are_refused(self):
        ragged = uncaptured(host=None)
        with raises_naming(PlanError, "exact"):
            split_batch(ragged, BatchSplit(2, 1))
