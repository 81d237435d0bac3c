"""Refusals of captured batches, and plans kept per captured shape (B2)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, ForwardMode, Geometry, GraphLevel, GraphLimits, Plan, PlanError
from attnplug.author.attention import Captures
from attnplug.contract.batch import BackendId
from attnplug_testing.errors import raises_naming

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
ME = BackendId("tested")


def batch(
    mode: ForwardMode = DECODE, requests: int = 2, rows: int = 2, pages: int = 4, lane: int = 0, ragged: bool = False
) -> Geometry:
    per_request = rows // max(requests, 1)
    uneven = ragged or per_request * requests != rows
    return Geometry(
        mode,
        torch.zeros(requests, pages, dtype=torch.int32),
        torch.ones(requests, dtype=torch.int32),
        1,
        rows=rows,
        max_seq_len=pages,
        max_new=rows if uneven else per_request,
        new_lens=torch.ones(requests, dtype=torch.int32) if uneven else None,
        lane=lane,
        captured=True,
    )


def capture(geometry: Geometry, memory: object) -> Plan:
    return Plan.of(ME, geometry, memory)


def captures(
    *limits: int, level: GraphLevel = GraphLevel.UNIFORM, lanes: tuple[str, ...] = ("zero", "one")
) -> Captures:
    made = Captures(ME)
    made.reserve(GraphLimits(*(limits or (4, 8, 8)), level=level), lambda: lanes)
    return made


def test_a_shape_is_captured_once_and_found_at_every_replay() -> None:
    """B2: a replay finds the plan of its shape, even if other shapes were captured since."""
    kept = captures()
    first, other = kept.plan(batch(), capture), kept.plan(batch(VERIFY, 2, 6), capture)
    assert (first.query_rows, other.query_rows) == (2, 6)
    assert kept.plan(batch(), None) is first
    assert kept.plan(batch(), capture) is first


def test_lanes_share_neither_plans_nor_memory() -> None:
    """Two batches of one shape may be alive at the same time, on two streams."""
    kept = captures()
    plans = [kept.plan(batch(lane=lane), capture) for lane in (0, 1)]
    assert [plan.metadata for plan in plans] == ["zero", "one"]
    assert [kept.plan(batch(lane=lane), None) for lane in (0, 1)] == plans


def test_a_shape_with_new_lens_is_another_one() -> None:
    """A ragged batch divides its rows by device lengths at each replay, a uniform one evenly. So they do not share a
    plan."""
    kept = captures()
    even, divided = kept.plan(batch(VERIFY, 2, 6), capture), kept.plan(batch(VERIFY, 2, 6, ragged=True), capture)
    assert even is not divided
    assert kept.plan(batch(VERIFY, 2, 6, ragged=True), None) is divided


def test_steps_of_one_shape_have_plans_of_their_own() -> None:
    """The steps of a draft differ in nothing else."""
    kept = captures()
    plans = [kept.plan(replace(batch(), step=step), capture) for step in range(3)]
    assert len({id(plan) for plan in plans}) == 3
    assert [kept.plan(replace(batch(), step=step), None) for step in range(3)] == plans
    with raises_naming(PlanError, "lane 0", "step 3"):
        kept.plan(replace(batch(), step=3), None)


def test_a_shape_with_trees_is_another_one() -> None:
    """A graph of chains reads no tree."""
    kept, chains = captures(), batch(VERIFY, 2, 6)
    trees = replace(chains, tree=torch.ones(2, 3, dtype=torch.int64))
    with raises_naming(PlanError, "lane 0", "trees"):
        kept.plan(trees, None)
    assert kept.plan(chains, capture) is not kept.plan(trees, capture)


class TestAlways:
    """Level ``ALWAYS``: an extend with another division of rows at each replay."""

    LIMITS = GraphLimits(4, 8, 8, level=GraphLevel.ALWAYS)

    @pytest.mark.parametrize("mode", [EXTEND, ForwardMode.MIXED])
    def test_an_extend_of_any_rows(self, mode) -> None:
        self.LIMITS.check(batch(mode, 2, 5))

    def test_what_it_needs_and_what_stays_refused(self) -> None:
        with raises_naming(PlanError, "new_lens"):
            self.LIMITS.check(batch(EXTEND, 2, 4))
        with raises_naming(PlanError, "new_lens"):
            self.LIMITS.check(replace(batch(EXTEND, 2, 5), new_lens=torch.ones(4, dtype=torch.int32)[::2]))
        with raises_naming(PlanError, "2 and 0"):
            self.LIMITS.check(batch(EXTEND, 2, 0, ragged=True))
        with raises_naming(PlanError, 5, 2):
            self.LIMITS.check(batch(VERIFY, 2, 5))
        with raises_naming(PlanError, "idle"):
            self.LIMITS.check(batch(ForwardMode.IDLE))


class TestRefusals:
    def test_without_memory_it_says_what_to_call(self) -> None:
        with pytest.raises(
            BackendError, match=r"backend tested has reserved no memory .* call init_cuda_graph_state first"
        ):
            Captures(ME).plan(batch(), capture)

    def test_memory_is_made_once(self) -> None:
        """Captured graphs hold its addresses."""
        with raises_naming(BackendError, "init_cuda_graph_state"):
            captures().reserve(GraphLimits(8, 8, 8), lambda: pytest.fail("made again"))

    def test_a_shape_that_was_never_captured(self) -> None:
        with raises_naming(PlanError, "decode", "2 requests", "2 rows", "4 pages", "lane 1"):
            captures().plan(batch(lane=1), None)

    def test_a_table_of_another_width_is_another_shape(self) -> None:
        """The graph reads the one that it was captured with."""
        kept = captures()
        kept.plan(batch(), capture)
        with raises_naming(PlanError, "5 pages"):
            kept.plan(batch(pages=5), None)

    @pytest.mark.parametrize(
        ("limits", "most"), [((1, 8, 8), "for 1 requests"), ((4, 1, 8), "1 rows"), ((4, 8, 3), "and 3 pages")]
    )
    def test_more_than_there_is_memory_for(self, limits, most) -> None:
        with raises_naming(PlanError, "2 requests", "2 rows", most):
            captures(*limits).plan(batch(), capture)

    def test_as_much_as_there_is_memory_for_is_captured(self) -> None:
        assert captures(2, 2, 4).plan(batch(), capture).query_rows == 2

    @pytest.mark.parametrize("mode", [EXTEND, ForwardMode.MIXED, ForwardMode.IDLE])
    def test_a_mode_without_equally_many_rows(self, mode) -> None:
        with raises_naming(PlanError, mode, "decode", "target_verify"):
            captures().plan(batch(mode), capture)

    def test_a_level_below_uniform_captures_decode_alone(self) -> None:
        kept = captures(level=GraphLevel.DECODE)
        assert kept.plan(batch(), capture).mode is DECODE
        with raises_naming(PlanError, "target_verify", "decode"):
            kept.plan(batch(VERIFY), capture)

    @pytest.mark.parametrize(("mode", "requests", "rows"), [(VERIFY, 2, 5), (DECODE, 2, 4), (DECODE, 0, 0)])
    def test_unequal_rows(self, mode, requests, rows) -> None:
        with raises_naming(PlanError, rows, requests):
            captures().plan(batch(mode, requests, rows), capture)

    @pytest.mark.parametrize("name", ["seq_lens", "page_table", "tree"])
    def test_what_kernels_read_where_it_lies_has_no_gaps(self, name) -> None:
        good = replace(batch(VERIFY, 2, 6, pages=8), tree=torch.ones(2, 3, dtype=torch.int64))
        bad = getattr(good, name).repeat_interleave(2, -1)[..., ::2]
        with raises_naming(PlanError, name):
            captures().plan(replace(good, **{name: bad}), capture)
