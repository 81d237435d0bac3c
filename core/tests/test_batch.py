"""The batch and its plan state: the marker (B1), the old flag (B3), splitting (B4), row checks (B5)."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import permutations

import pytest
import torch

from attnplug import ForwardBatch, ForwardMode, Plan, PlanError
from attnplug.contract.batch import BackendId, BatchPlan, apply_skip_attn_backend_init
from attnplug.host import plan_forward
from attnplug_testing.batches import geometry, padded, with_plan
from attnplug_testing.errors import raises_naming
from attnplug_testing.full_batch import extend_batch


def make(requests: int = 2, tokens: int | None = None, mode: ForwardMode = ForwardMode.DECODE) -> ForwardBatch:
    """A batch of one new token a request, and padding rows up to ``tokens``."""
    table = torch.arange(requests * 4, dtype=torch.int32).view(requests, 4)
    made = ForwardBatch(geometry(mode, table, [1] * requests, [5] * requests, 8))
    return made if tokens is None else padded(made, tokens - requests)


def reshape(batch: ForwardBatch, requests: int, tokens: int) -> None:
    """Change a batch's shape as data-parallel padding does."""
    other = make(requests, tokens, batch.forward_mode)
    batch.geometry, batch.input_ids = other.geometry, other.input_ids


class TestMarker:
    def test_fresh_batch_needs_planning(self):
        """B1"""
        assert make().needs_forward_metadata_init()

    def test_mark_skips(self):
        """B1"""
        batch = make()
        batch.mark_forward_metadata_ready()
        assert not batch.needs_forward_metadata_init()

    def test_reshape_with_opt_in_plans_again(self):
        """B1: only if it was marked replan_equivalent=True."""
        batch = make(2)
        batch.mark_forward_metadata_ready(replan_equivalent=True)
        assert not batch.needs_forward_metadata_init()
        reshape(batch, 4, 4)
        assert batch.needs_forward_metadata_init()

    def test_reshape_without_opt_in_keeps_skipping(self):
        """B1"""
        batch = make(2)
        batch.mark_forward_metadata_ready()
        reshape(batch, 4, 4)
        assert not batch.needs_forward_metadata_init()

    def test_marking_again_records_the_new_shapes(self):
        """B1"""
        batch = make(2)
        batch.mark_forward_metadata_ready(replan_equivalent=True)
        reshape(batch, 4, 4)
        batch.mark_forward_metadata_ready(replan_equivalent=True)
        assert not batch.needs_forward_metadata_init()
        reshape(batch, 2, 2)
        assert batch.needs_forward_metadata_init()

    def test_marking_again_without_opt_in_withdraws_it(self):
        """B1"""
        batch = make(2)
        batch.mark_forward_metadata_ready(replan_equivalent=True)
        batch.mark_forward_metadata_ready()
        reshape(batch, 4, 4)
        assert not batch.needs_forward_metadata_init()

    @pytest.mark.parametrize("shape", [(2, 8), (3, 6)], ids=["tokens", "requests"])
    def test_either_number_may_change_while_the_other_does_not(self, shape):
        """B1: a mark records both the batch size and the number of input tokens."""
        batch = make(2, tokens=6, mode=ForwardMode.EXTEND)
        batch.mark_forward_metadata_ready(replan_equivalent=True)
        reshape(batch, *shape)
        assert batch.needs_forward_metadata_init()


class PlanningSpy:
    """Counts how often it plans."""

    def __init__(self) -> None:
        self.backend_id = BackendId("spy")
        self.planned = 0

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        self.planned += 1
        return Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None)


class TestForwardPath:
    def test_forward_path_plans_an_unplanned_batch(self):
        """B1: needs_forward_metadata_init() alone decides."""
        spy, batch = PlanningSpy(), make()
        assert plan_forward(spy, batch) is batch.plan
        assert spy.planned == 1 and batch.plan is not None

    def test_forward_path_does_not_mark_its_own_plan(self):
        """B1: a mark means that the batch was planned outside of the forward path. A batch that the forward path
        planned stays unmarked and is planned again."""
        spy, batch = PlanningSpy(), make()
        plan_forward(spy, batch)
        assert batch.needs_forward_metadata_init()
        reshape(batch, 4, 4)
        assert plan_forward(spy, batch).attention.query_rows == 4

    @pytest.mark.parametrize(
        ("returned", "named"),
        [
            ({"rows": 2}, ["{'rows': 2}", "Plan"]),
            ([7] * 99, ["list", "Plan"]),
            (None, ["None", "Plan"]),
            (Plan(BackendId("spy"), ForwardMode.DECODE, 2, None), ["backend_id"]),
            ("mode", ["<ForwardMode.EXTEND: 'extend'>", "<ForwardMode.DECODE: 'decode'>"]),
            ("text", ["'decode',", "<ForwardMode.DECODE: 'decode'>"]),
            ("rows", [3, 2]),
            ("negative", [-1, 2]),
        ],
        ids=["dict", "long", "none", "stranger", "mode", "text", "rows", "negative"],
    )
    def test_a_plan_that_is_none_of_this_batch_is_the_backends_fault(self, returned, named):
        """B5: this includes a plan that the backend itself stored in ``batch.plan``."""
        spy, batch = PlanningSpy(), make(2)
        own = {
            "mode": Plan(spy.backend_id, ForwardMode.EXTEND, 2, None),
            "text": Plan(spy.backend_id, "decode", 2, None),
            "rows": Plan(spy.backend_id, ForwardMode.DECODE, 3, None),
            "negative": Plan(spy.backend_id, ForwardMode.DECODE, -1, None),
        }
        with_plan(batch, Plan(spy.backend_id, ForwardMode.DECODE, 2, None))
        spy.init_forward_metadata = lambda batch: own.get(returned, returned) if isinstance(returned, str) else returned
        with raises_naming(PlanError, "spy", "init_forward_metadata", *named):
            plan_forward(spy, batch)

    def test_forward_path_leaves_a_marked_batch_alone(self):
        """B1"""
        spy, batch = PlanningSpy(), make()
        mine = with_plan(batch, spy.init_forward_metadata(batch)).plan
        batch.mark_forward_metadata_ready()
        assert plan_forward(spy, batch) is mine
        assert spy.planned == 1


@pytest.fixture
def fresh_process(monkeypatch):
    monkeypatch.setattr("attnplug.declare.version._warned", set())


@pytest.mark.usefixtures("fresh_process")
class TestOldFlag:
    def test_true_maps_onto_the_marker_and_warns(self):
        """B3"""
        batch = make()
        with pytest.warns(DeprecationWarning, match="mark_forward_metadata_ready"):
            apply_skip_attn_backend_init(batch, True)
        assert not batch.needs_forward_metadata_init()
        reshape(batch, 4, 4)
        assert not batch.needs_forward_metadata_init(), "nobody said that planning again is equivalent"

    def test_warns_once_per_process_and_not_once_per_call(self):
        """B3"""
        with pytest.warns(DeprecationWarning, match="skip_attn_backend_init"):
            apply_skip_attn_backend_init(make(), True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            apply_skip_attn_backend_init(make(), True)
            apply_skip_attn_backend_init(make(), False)

    def test_false_warns_and_decides_nothing(self):
        """B3: neither does it mark, nor does it take a mark away."""
        batch = make()
        with pytest.warns(DeprecationWarning, match="skip_attn_backend_init"):
            apply_skip_attn_backend_init(batch, False)
        assert batch.needs_forward_metadata_init()
        batch.mark_forward_metadata_ready()
        apply_skip_attn_backend_init(batch, False)
        assert not batch.needs_forward_metadata_init()

    def test_not_given_is_silent(self):
        """B3"""
        batch = make()
        apply_skip_attn_backend_init(batch, None)
        assert batch.needs_forward_metadata_init()

    def test_public_entry_accepts_it(self):
        """B3: accepted at the public entry points."""
        spy, batch = PlanningSpy(), make()
        with pytest.warns(DeprecationWarning, match="skip_attn_backend_init"):
            plan_forward(spy, batch, skip_attn_backend_init=True)
        assert spy.planned == 0

    def test_warning_points_at_the_caller_of_the_entry(self):
        """B3: the deprecation warning points at the line that still passes the flag."""
        with pytest.warns(DeprecationWarning, match="skip_attn_backend_init") as caught:
            plan_forward(PlanningSpy(), make(), skip_attn_backend_init=False)
        assert caught[0].filename == __file__


class TestPlanForForward:
    def setup_method(self):
        self.me = BackendId("mine")
        self.batch = make(3)
        self.plan = Plan(self.me, ForwardMode.DECODE, query_rows=3, kv_rows=15)
        with_plan(self.batch, self.plan)

    def test_as_many_rows_as_planned(self):
        """B5"""
        assert self.batch.plan_for(self.me, 3, decode=True) is self.plan

    def test_more_rows_than_planned_are_padding(self):
        """B5: the tail is padding."""
        assert self.batch.plan_for(self.me, 5, decode=True).query_rows == 3

    def test_fewer_rows_are_an_error_with_both_numbers(self):
        """B5"""
        with raises_naming(PlanError, 2, 3):
            self.batch.plan_for(self.me, 2, decode=True)

    def test_plan_of_another_backend_is_never_used(self):
        """B5"""
        with raises_naming(PlanError, "other", "mine"):
            self.batch.plan_for(BackendId("other"), 3, decode=True)

    def test_plan_of_another_instance_of_the_same_backend_is_never_used(self):
        """B5"""
        with raises_naming(PlanError, "instance"):
            self.batch.plan_for(BackendId("mine"), 3, decode=True)

    @pytest.mark.parametrize(("planned", "mode"), list(permutations(ForwardMode, 2)))
    def test_plan_for_another_mode_is_never_used(self, planned, mode):
        """B5: however alike the two are."""
        with_plan(self.batch, Plan(self.me, planned, 3, 15))
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=mode)
        with raises_naming(PlanError, planned, mode):
            self.batch.plan_for(self.me, 3)

    def test_no_plan_says_what_to_do(self):
        """B5"""
        self.batch.plan = None
        with pytest.raises(PlanError, match="a batch without a plan; plan the batch first"):
            self.batch.plan_for(self.me, 3, decode=True)

    @pytest.mark.parametrize(("mode", "decode"), [(ForwardMode.DECODE, False), (ForwardMode.EXTEND, True)])
    def test_wrong_entry_for_the_mode(self, mode, decode):
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=mode)
        with raises_naming(PlanError, f"forward_{'extend' if decode else 'decode'}"):
            self.batch.plan_for(self.me, 3, decode=decode)

    @pytest.mark.parametrize("decode", [False, True])
    def test_an_idle_batch_runs_by_either_entry(self, decode):
        with_plan(self.batch, Plan(self.me, ForwardMode.IDLE, 0, 0))
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=ForwardMode.IDLE)
        assert self.batch.plan_for(self.me, 3, decode=decode).query_rows == 0

    def test_part_of_another_instance_is_never_used(self):
        """B5: this holds for parts of a wrapper's plan, too."""
        with_plan(self.batch, Plan(BackendId("wrapper"), ForwardMode.DECODE, 3, 15, parts=(self.plan,)))
        with raises_naming(PlanError, "instance"):
            self.batch.plan_for(BackendId("mine"), 3, decode=True)

    def test_a_wrappers_plan_for_another_mode_is_never_used(self):
        """B5: nor are its parts."""
        with_plan(self.batch, Plan(BackendId("wrapper"), ForwardMode.EXTEND, 3, 15, parts=(self.plan,)))
        with raises_naming(PlanError, "extend", "decode"):
            self.batch.plan_for(self.me, 3, decode=True)

    def test_a_plan_counts_the_rows_of_its_batch(self):
        """Queries, and the cache rows that they attend to."""
        made = Plan.of(self.me, extend_batch().geometry)
        assert (made.query_rows, made.kv_rows, made.mode) == (6, 7 + 8 + 9, ForwardMode.EXTEND)

    def test_part_of_a_wrappers_plan_is_found_at_any_depth(self):
        """B5, A9: nested wrappers keep each child's plan."""
        inner = Plan(self.me, ForwardMode.DECODE, 3, 15)
        outer = Plan(
            BackendId("a"),
            ForwardMode.DECODE,
            3,
            None,
            parts=(Plan(BackendId("b"), ForwardMode.DECODE, 3, None, parts=(inner,)),),
        )
        with_plan(self.batch, outer)
        assert self.batch.plan_for(self.me, 3, decode=True) is inner

    def test_plan_cannot_be_changed(self):
        """B5: the plan is a value."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            self.plan.query_rows = 4


class TestRepeatedChecks:
    """A plan that was checked for one layer is used for the next ones, until anything about it changes."""

    def setup_method(self):
        self.me, self.other = BackendId("mine"), BackendId("other")
        self.batch = make(3)
        self.mine = Plan(self.me, ForwardMode.DECODE, 3, 15)
        plans = (self.mine, Plan(self.other, ForwardMode.DECODE, 2, 15))
        self.publish(Plan(BackendId("wrapper"), ForwardMode.DECODE, 3, 15, parts=plans))
        assert self.batch.plan_for(self.me, 3, decode=True) is self.mine
        assert self.batch.plan_for(self.other, 2, decode=True) is plans[1]

    def publish(self, plan: Plan) -> None:
        self.batch.plan = BatchPlan(plan, geometry=self.batch.geometry)

    def refused(self, planner: BackendId, rows: int, *, decode: bool | None = None) -> bool:
        try:
            self.batch.plan_for(planner, rows, decode=decode)
        except PlanError:
            return True
        return False

    def test_layers_share_one_check(self, monkeypatch):
        """B5: for every planner of the batch, whether its entry is known or not."""
        checked = []
        check = ForwardBatch.check_plan
        monkeypatch.setattr(ForwardBatch, "check_plan", lambda *given: checked.append(given) or check(*given))
        self.publish(self.batch.plan.attention)
        for _layer in range(3):
            assert self.batch.plan_for(self.me, 3).planner is self.me
            assert self.batch.plan_for(self.other, 2).planner is self.other
            assert self.batch.plan_for(self.me, 3, decode=True).planner is self.me
        assert [planner for _, _, planner, _ in checked] == [self.me, self.other]

    def test_a_replaced_plan_is_checked_again(self):
        """B5: one of another backend, one for more rows, none."""
        self.publish(Plan(self.other, ForwardMode.DECODE, 3, 15))
        assert self.refused(self.me, 3, decode=True)
        self.publish(Plan(self.me, ForwardMode.DECODE, 4, 20))
        assert self.refused(self.me, 3, decode=True)
        self.batch.plan = None
        assert self.refused(self.me, 3, decode=True)

    def test_a_new_plan_is_the_one_that_is_used(self):
        """B5"""
        new = Plan(self.me, ForwardMode.DECODE, 3, 15)
        self.publish(new)
        assert self.batch.plan_for(self.me, 3, decode=True) is new

    @pytest.mark.parametrize("change", [{}, {"mode": ForwardMode.EXTEND}])
    def test_a_replaced_geometry_is_checked_again(self, change):
        """B5: the plan is stale, whether the mode changed or not."""
        self.batch.geometry = dataclasses.replace(self.batch.geometry, **change)
        assert self.refused(self.me, 3)

    def test_other_rows_are_checked_again(self):
        """B5: fewer are refused; more are padding."""
        assert self.refused(self.me, 2, decode=True)
        assert self.batch.plan_for(self.me, 5, decode=True) is self.mine
        assert self.refused(self.me, 2, decode=True)

    def test_another_planner_is_checked(self):
        """B5: another instance of the same name too."""
        assert self.refused(BackendId("mine"), 3, decode=True)

    def test_the_wrong_entry_is_refused(self):
        """B5"""
        assert self.refused(self.me, 3, decode=False)
        assert self.batch.plan_for(self.me, 3, decode=True) is self.mine

    def test_halves_of_a_split_batch_start_unchecked(self):
        """B4, B5"""
        first, second = self.batch.split(1)
        for half in (first, second):
            with pytest.raises(PlanError):
                half.plan_for(self.me, half.num_tokens)

    def test_a_check_is_no_part_of_the_representation(self):
        """The representation shows values only, or it would show the plan twice."""
        assert "checked" not in repr(self.batch)
