"""What every backend that captures refuses, and what it keeps of a captured shape (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, BackendId, Captures, ForwardBatch, ForwardMode, GraphLevel, GraphLimits, PlanError

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND


def batch(mode: ForwardMode = DECODE, requests: int = 2, rows: int = 2, pages: int = 4) -> ForwardBatch:
    return ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(rows, dtype=torch.int64),
        page_table=torch.zeros(requests, pages, dtype=torch.int32),
        seq_lens=torch.ones(requests, dtype=torch.int32),
    )


def shape(given: ForwardBatch) -> list[int]:
    return [given.batch_size, given.num_tokens]


def captures(*limits: int) -> Captures[list[int]]:
    made: Captures[list[int]] = Captures(BackendId("tested"))
    made.reserve(GraphLimits(*(limits or (4, 8, 8))))
    return made


def test_a_shape_is_captured_once_and_found_at_every_replay() -> None:
    """B2: whatever else was captured since."""
    kept = captures()
    first = kept.find(batch(), True, shape)
    other = kept.find(batch(VERIFY, 2, 6), True, shape)
    assert first == [2, 2] and other == [2, 6]
    assert kept.find(batch(), False, shape) is first
    assert kept.find(batch(), True, shape) is first


class TestAlways:
    """Level ``ALWAYS``: an extend, whose rows are divided anew at each replay."""

    LIMITS = GraphLimits(4, 8, level=GraphLevel.ALWAYS)

    @pytest.mark.parametrize("mode", [EXTEND, ForwardMode.MIXED])
    def test_an_extend_of_any_rows(self, mode) -> None:
        self.LIMITS.check(replace(batch(mode, 2, 5), extend_seq_lens=torch.ones(2, dtype=torch.int32)))

    def test_what_it_needs_and_what_stays_refused(self) -> None:
        given = batch(EXTEND, 2, 5)
        with pytest.raises(PlanError, match="a captured extend needs extend_seq_lens"):
            self.LIMITS.check(given)
        with pytest.raises(PlanError, match="has extend_seq_lens in int32 and without gaps"):
            self.LIMITS.check(replace(given, extend_seq_lens=torch.ones(2, dtype=torch.int64)))
        with pytest.raises(PlanError, match="has requests and rows, not 2 and 0"):
            self.LIMITS.check(replace(batch(EXTEND, 2, 0), extend_seq_lens=torch.ones(2, dtype=torch.int32)))
        with pytest.raises(PlanError, match="not 5 rows for 2 requests"):
            self.LIMITS.check(batch(VERIFY, 2, 5))
        with pytest.raises(PlanError, match="mode idle cannot be captured"):
            self.LIMITS.check(batch(ForwardMode.IDLE))


class TestRefusals:
    def test_without_memory_it_says_what_to_call(self) -> None:
        with pytest.raises(BackendError, match=r"backend tested has no memory .* call init_cuda_graph_state first"):
            Captures(BackendId("tested")).find(batch(), True, shape)

    def test_memory_is_made_once(self) -> None:
        """Captured graphs hold its addresses."""
        with pytest.raises(BackendError, match="call init_cuda_graph_state once"):
            captures().reserve(GraphLimits(8, 8))

    def test_a_shape_that_was_never_captured(self) -> None:
        with pytest.raises(PlanError, match=r"a decode batch of 2 requests, 2 rows and 4 pages .* was never captured"):
            captures().find(batch(), False, shape)

    def test_a_table_of_another_width_is_another_shape(self) -> None:
        """The graph reads the one that it was captured with."""
        kept = captures()
        kept.find(batch(), True, shape)
        with pytest.raises(PlanError, match="5 pages a request was never captured"):
            kept.find(batch(pages=5), False, shape)

    @pytest.mark.parametrize(
        ("limits", "most"),
        [((1, 8, 8), "of 1 requests"), ((4, 1, 8), "1 rows"), ((4, 8, 3), "and 3 pages"), ((1, 8), "8 rows$")],
    )
    def test_more_than_there_is_memory_for(self, limits, most) -> None:
        with pytest.raises(PlanError, match=rf"a batch of 2 requests, 2 rows.* does not fit .*{most}"):
            captures(*limits).find(batch(), True, shape)

    @pytest.mark.parametrize("mode", [EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
    def test_a_mode_without_equally_many_rows(self, mode) -> None:
        with pytest.raises(PlanError, match=rf"in mode {mode} cannot be captured, only decode, target_verify, draft_"):
            captures().find(batch(mode), True, shape)

    @pytest.mark.parametrize(("mode", "requests", "rows"), [(VERIFY, 2, 5), (DECODE, 2, 4), (DECODE, 0, 0)])
    def test_unequal_rows(self, mode, requests, rows) -> None:
        with pytest.raises(PlanError, match=f"not {rows} rows for {requests} requests"):
            captures().find(batch(mode, requests, rows), True, shape)

    @pytest.mark.parametrize("name", ["seq_lens", "page_table"])
    def test_what_kernels_read_where_it_lies_is_int32_without_gaps(self, name) -> None:
        good = batch(pages=8)
        for bad in (getattr(good, name).long(), getattr(good, name).repeat_interleave(2, -1)[..., ::2]):
            with pytest.raises(PlanError, match=f"has {name} in int32 and without gaps"):
                captures().find(replace(good, **{name: bad}), True, shape)
