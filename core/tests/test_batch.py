"""The batch and its plan state: the marker (B1), the old flag (B3), splitting (B4), row checks (B5)."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import permutations

import pytest
import torch

from attnplug import BackendId, ForwardBatch, ForwardMode, Geometry, Plan, PlanError, RaggedCall, SelectedPositions
from attnplug.contract import batch as batch_module
from attnplug.contract.batch import apply_skip_attn_backend_init
from attnplug.contract.sparse import LayerChoice
from attnplug.contract.splitting import split_by
from attnplug.host import BatchPlan, HostLengths, PlanRecord, plan_forward
from support.batches import geometry, padded, with_plan


def make(requests: int = 2, tokens: int | None = None, mode: ForwardMode = ForwardMode.DECODE) -> ForwardBatch:
    """A batch of one new token a request, and padding rows up to ``tokens``."""
    table = torch.arange(requests * 4, dtype=torch.int32).view(requests, 4)
    made = ForwardBatch(geometry(mode, table, [1] * requests, [5] * requests, 8))
    return made if tokens is None else padded(made, tokens - requests)


def reshape(batch: ForwardBatch, requests: int, tokens: int) -> None:
    """What data-parallel padding does."""
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
        """B1: it records batch_size and the number of input tokens."""
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
    def test_forward_path_plans_what_nobody_planned(self):
        """B1: needs_forward_metadata_init() is the only judge."""
        spy, batch = PlanningSpy(), make()
        assert plan_forward(spy, batch) is batch.plan
        assert spy.planned == 1 and batch.plan is not None

    def test_forward_path_does_not_mark_its_own_plan(self):
        """B1: a mark says that planning happened outside of it; what it planned itself it plans again."""
        spy, batch = PlanningSpy(), make()
        plan_forward(spy, batch)
        assert batch.needs_forward_metadata_init()
        reshape(batch, 4, 4)
        assert plan_forward(spy, batch).attention.query_rows == 4

    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            ({"rows": 2}, "returned {'rows': 2}, not a Plan"),
            ([7] * 99, "returned a list, not a Plan"),
            (None, "returned None, not a Plan; it returns its plan, and the caller gives it to the batch"),
            (Plan(BackendId("spy"), ForwardMode.DECODE, 2, None), "stamped by <backend spy at 0x"),
            ("mode", "a plan for mode <ForwardMode.EXTEND: 'extend'>, and the batch is in mode <ForwardMode.DECODE"),
            ("text", "a plan for mode 'decode', and the batch is in mode <ForwardMode.DECODE: 'decode'>"),
            ("rows", "returned a plan for 3 query rows, and the batch has 2"),
            ("negative", "returned a plan for -1 query rows, and the batch has 2"),
        ],
        ids=["dict", "long", "none", "stranger", "mode", "text", "rows", "negative"],
    )
    def test_a_plan_that_is_none_of_this_batch_is_the_backends_fault(self, returned, said):
        """B5: also where it set batch.plan itself."""
        spy, batch = PlanningSpy(), make(2)
        own = {
            "mode": Plan(spy.backend_id, ForwardMode.EXTEND, 2, None),
            "text": Plan(spy.backend_id, "decode", 2, None),
            "rows": Plan(spy.backend_id, ForwardMode.DECODE, 3, None),
            "negative": Plan(spy.backend_id, ForwardMode.DECODE, -1, None),
        }
        with_plan(batch, Plan(spy.backend_id, ForwardMode.DECODE, 2, None))
        spy.init_forward_metadata = lambda batch: own.get(returned, returned) if isinstance(returned, str) else returned
        with pytest.raises(PlanError, match="init_forward_metadata of backend spy") as refused:
            plan_forward(spy, batch)
        assert said in str(refused.value)

    def test_forward_path_leaves_a_marked_batch_alone(self):
        """B1"""
        spy, batch = PlanningSpy(), make()
        mine = with_plan(batch, spy.init_forward_metadata(batch)).plan
        batch.mark_forward_metadata_ready()
        assert plan_forward(spy, batch) is mine
        assert spy.planned == 1


@pytest.fixture
def fresh_process(monkeypatch):
    monkeypatch.setattr(batch_module, "_warned", False)


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
        """B3: whoever still passes the flag learns where."""
        with pytest.warns(DeprecationWarning, match="skip_attn_backend_init") as caught:
            plan_forward(PlanningSpy(), make(), skip_attn_backend_init=False)
        assert caught[0].filename == __file__


def value_of(field: dataclasses.Field) -> object:
    """A value that tells where it came from; by the field's type, so that a field that is added has one too."""
    requests, tokens = 3, 6
    known: dict[str, object] = {
        "page_table": torch.arange(12, dtype=torch.int32).view(requests, 4),
        "new_lens": torch.tensor([2, 1, 3], dtype=torch.int32),
        "host": HostLengths([2, 1, 3], [7, 8, 9]),
        "rows": tokens,
        "max_new": 3,
        "calls": (RaggedCall.of(0, [6], [6], causal=True, device=torch.device("cpu")),),
        "mode": ForwardMode.EXTEND,
    }
    if field.name in known:
        return known[field.name]
    if "Tensor" in field.type:
        rows = tokens if field.metadata["split"] == "token" else requests
        return torch.arange(100, 100 + rows, dtype=torch.int32)
    if field.name == "geometry":
        return Geometry(**{each.name: value_of(each) for each in dataclasses.fields(Geometry)})
    if field.name == "plan":
        return BatchPlan(Plan(BackendId("whole"), ForwardMode.EXTEND, tokens, None))
    if field.name == "choice":
        return LayerChoice(0, SelectedPositions(torch.zeros(tokens, 2, dtype=torch.int32)))
    return {"int": 9, "int | None": 9, "bool": True, "PlanRecord | None": PlanRecord(3, 6, False)}[field.type]


GEOMETRY, FIELDS = dataclasses.fields(Geometry), dataclasses.fields(ForwardBatch)


def extend_batch() -> ForwardBatch:
    """Three requests with 2, 1 and 3 new tokens; really every field has a value, and none its default."""
    return ForwardBatch(**{field.name: value_of(field) for field in FIELDS})


DIVIDED = {
    **dict.fromkeys(("mode", "page_size", "max_seq_len", "max_new", "captured", "step", "typical_len"), "shared"),
    **dict.fromkeys(("input_ids", "positions", "slots"), "token"),
    **dict.fromkeys(("page_table", "seq_lens", "new_lens", "state_slots", "host", "tree", "table_rows"), "request"),
    **dict.fromkeys(("plan", "plan_record", "choice"), "reset"),
}


class TestSplit:
    @pytest.mark.parametrize(
        "field",
        [f for f in (*FIELDS, *GEOMETRY) if f.name not in ("geometry", "rows", "calls", "lane")],
        ids=lambda f: f.name,
    )
    def test_every_field_goes_where_it_says(self, field):
        """B4: tokens and requests to their half, what is shared to both, plans and marks to neither."""
        batch = extend_batch()
        first, second = batch.split(2)
        if field in GEOMETRY:
            batch, first, second = batch.geometry, first.geometry, second.geometry
        value, halves = getattr(batch, field.name), (getattr(first, field.name), getattr(second, field.name))
        how = DIVIDED.get(field.name)
        assert how is not None, f"say here how {field.name} is divided"
        if field.name == "host":
            assert halves == (HostLengths([2, 1], [7, 8]), HostLengths([3], [9]))
        elif how in ("token", "request"):
            at = 3 if how == "token" else 2
            assert torch.equal(halves[0], value[:at]) and torch.equal(halves[1], value[at:])
        else:
            assert halves == ((value, value) if how == "shared" else (None, None))

    def test_rows_are_counted_calls_are_planned_anew_and_lanes_are_the_callers(self):
        """B4"""
        halves = [half.geometry for half in extend_batch().split(2)]
        assert [(half.rows, half.calls, half.lane) for half in halves] == [(3, (), 9), (3, (), 9)]
        assert [half.geometry.lane for half in extend_batch().split(1, lanes=(0, 1))] == [0, 1]

    def test_without_exact_lengths_only_a_uniform_batch_can_be_split(self):
        """The host does not know after which row."""
        uniform = make(3)
        uniform.geometry = dataclasses.replace(uniform.geometry, host=None)
        assert [half.num_tokens for half in uniform.split(1)] == [1, 2]
        two_each = dataclasses.replace(uniform.geometry, rows=6, max_new=2)
        assert [half.rows for half in two_each.split(1)] == [2, 4]
        ragged = extend_batch()
        ragged.geometry = dataclasses.replace(ragged.geometry, host=None)
        with pytest.raises(PlanError, match="is split by exact lengths on the host"):
            ragged.split(1)

    def test_both_children_start_unplanned(self):
        """B4"""
        batch = extend_batch()
        assert all(child.needs_forward_metadata_init() for child in batch.split(1))
        assert not batch.needs_forward_metadata_init(), "the parent keeps its own plan"

    def test_field_that_nobody_can_divide_is_refused_by_name(self):
        """B4: … or refuses by name."""

        @dataclasses.dataclass(slots=True, eq=False)
        class Extended(ForwardBatch):
            mrope_positions: torch.Tensor | None = None

        fields = {field.name: getattr(extend_batch(), field.name) for field in dataclasses.fields(ForwardBatch)}
        first, _ = Extended(**fields).split(1)
        assert isinstance(first, Extended)
        with pytest.raises(PlanError, match="mrope_positions"):
            Extended(**fields, mrope_positions=torch.zeros(6)).split(1)

    def test_undeclared_field_cannot_be_smuggled_in(self):
        """B4, B6: what is not a field of the batch cannot become one; pools and coordinators least of all."""
        with pytest.raises(AttributeError):
            extend_batch().hisparse_coordinator = object()
        names = {field.name for field in (*FIELDS, *GEOMETRY)}
        assert not {name for name in names if "pool" in name or "coordinator" in name or "backend" in name}

    @pytest.mark.parametrize("requests", [0, 3])
    def test_one_half_may_be_empty(self, requests):
        first, second = extend_batch().split(requests)
        assert (first.batch_size, second.batch_size) == (requests, 3 - requests)
        assert first.num_tokens + second.num_tokens == 6

    def test_decode_batch_splits_by_request(self):
        first, second = make(3).split(1)
        assert (first.num_tokens, second.num_tokens) == (1, 2)

    def test_padding_stays_at_the_end(self):
        """It is the second half's: rows keep their order when both are put together again."""
        batch = make(2, tokens=5)
        batch.input_ids = torch.arange(5)
        first, second = batch.split(1)
        assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([0], [1, 2, 3, 4])
        assert [half.geometry.rows for half in (first, second)] == [1, 1]

    def test_split_point_outside_is_refused(self):
        with pytest.raises(PlanError, match=r"3 requests .* after 4"):
            extend_batch().split(4)


LENGTHS = {"seq_lens", "new_lens", "host"}
"""What a cut request has less of in the first half."""


class TestCut:
    """Requests of 2, 1 and 3 new tokens, of which the last is cut after its first: 4 rows and 2."""

    @pytest.mark.parametrize(
        "field",
        [f for f in (*FIELDS, *GEOMETRY) if f.name not in LENGTHS | {"geometry", "rows", "calls", "lane", "max_new"}],
        ids=lambda f: f.name,
    )
    def test_every_field_goes_where_it_says(self, field):
        """B4: tokens to their half, the cut request to both, what is shared to both, plans and marks to neither."""
        batch = uncaptured()
        first, second = batch.split(2, cut=1)
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
        """The second half's request has a prefix that is longer by what the first half runs of it."""
        batch = uncaptured()
        first, second = (half.geometry for half in batch.split(2, lanes=(0, 1), cut=1))
        assert first.host == HostLengths([2, 1, 1], [7, 8, 7]) and second.host == HostLengths([2], [9])
        assert first.new_lens.tolist() == [2, 1, 1] and second.new_lens is None
        assert first.seq_lens.tolist() == [100, 101, 100] and second.seq_lens.tolist() == [102]
        assert [(half.rows, half.max_new, half.lane, half.calls) for half in (first, second)] == [
            (4, 2, 0, ()),
            (2, 2, 1, ()),
        ]
        assert batch.geometry.seq_lens.tolist() == [100, 101, 102], "the whole batch keeps its own"

    def test_every_length_of_a_geometry_is_one_that_a_cut_changes(self):
        """B4: a length that is added without saying what a cut request has of it gives no geometry."""
        assert {field.name for field in GEOMETRY if field.metadata["split"] == "length"} == LENGTHS

        @dataclasses.dataclass(slots=True, eq=False)
        class Longer(ForwardBatch):
            encoder_lens: torch.Tensor = split_by("length", default=None)

        fields = {field.name: getattr(uncaptured(), field.name) for field in FIELDS}
        first, _ = Longer(**fields, encoder_lens=torch.arange(3)).split(2)
        assert first.encoder_lens.tolist() == [0, 1]
        first, _ = Longer(**fields, encoder_lens=torch.arange(3)).split(2, cut=1)
        assert first.encoder_lens is None, "never that of the whole request"

    def test_lengths_on_the_host_are_not_needed_where_all_are_alike(self):
        alike = dataclasses.replace(two_requests(), host=None)
        first, second = alike.split(1, cut=1)
        assert first.new_lens.tolist() == [3, 1] and second.new_lens is None and second.max_new == 2
        assert first.seq_lens.tolist() == [5, 3] and second.seq_lens.tolist() == [5]
        assert first.host is None and second.host is None

    def test_a_padded_request_stays_without_length(self):
        alike = dataclasses.replace(two_requests(), host=None, seq_lens=torch.tensor([5, 0], dtype=torch.int32))
        first, second = alike.split(1, cut=2)
        assert first.seq_lens.tolist() == [5, 0] and second.seq_lens.tolist() == [0]

    @pytest.mark.parametrize(
        ("first", "cut", "said"),
        [
            (1, 3, "request 1 has 3 new rows and cannot be cut after 3 of them"),
            (0, -1, "request 0 has 3 new rows and cannot be cut after -1 of them"),
            (2, 1, "request 2 has 0 new rows and cannot be cut after 1 of them"),
        ],
    )
    def test_a_cut_outside_a_request_is_refused(self, first, cut, said):
        with pytest.raises(PlanError, match=said):
            two_requests().split(first, cut=cut)

    @pytest.mark.parametrize(
        ("changes", "what"),
        [({"captured": True}, "captured batch"), ({"mode": ForwardMode.TARGET_VERIFY}, "batch in mode target_verify")],
    )
    def test_what_a_graph_reads_and_what_leaves_no_state_is_split_between_requests(self, changes, what):
        """Static memory holds one length a request, and a verify leaves every state as it was."""
        with pytest.raises(PlanError, match=f"a {what} is split between requests, and not after 2 rows of request 1"):
            dataclasses.replace(two_requests(), **changes).split(1, cut=2)

    def test_without_exact_lengths_requests_that_differ_are_refused(self):
        ragged = uncaptured(host=None)
        with pytest.raises(PlanError, match="is split by exact lengths on the host"):
            ragged.split(2, cut=1)


def uncaptured(**changes: object) -> ForwardBatch:
    batch = extend_batch()
    batch.geometry = dataclasses.replace(batch.geometry, captured=False, **changes)
    return batch


def two_requests() -> Geometry:
    """Of 3 new tokens each, after 2."""
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    return Geometry.of_lengths(ForwardMode.EXTEND, table, [3, 3], [5, 5], 4)


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
        with pytest.raises(PlanError, match=r"2 query rows.*3"):
            self.batch.plan_for(self.me, 2, decode=True)

    def test_plan_of_another_backend_is_never_used(self):
        """B5"""
        with pytest.raises(PlanError, match=r"other.*mine"):
            self.batch.plan_for(BackendId("other"), 3, decode=True)

    def test_plan_of_another_instance_of_the_same_backend_is_never_used(self):
        """B5"""
        with pytest.raises(PlanError, match="another instance"):
            self.batch.plan_for(BackendId("mine"), 3, decode=True)

    @pytest.mark.parametrize(("planned", "mode"), list(permutations(ForwardMode, 2)))
    def test_plan_for_another_mode_is_never_used(self, planned, mode):
        """B5: however alike the two are."""
        with_plan(self.batch, Plan(self.me, planned, 3, 15))
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=mode)
        with pytest.raises(PlanError, match=f"a plan for mode {planned} and a batch in mode {mode}"):
            self.batch.plan_for(self.me, 3)

    def test_no_plan_says_what_to_do(self):
        """B5"""
        self.batch.plan = None
        with pytest.raises(PlanError, match="a batch that has no plan; plan the batch first"):
            self.batch.plan_for(self.me, 3, decode=True)

    @pytest.mark.parametrize(("mode", "decode"), [(ForwardMode.DECODE, False), (ForwardMode.EXTEND, True)])
    def test_wrong_entry_for_the_mode(self, mode, decode):
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=mode)
        with pytest.raises(PlanError, match=f"call forward_{'extend' if decode else 'decode'}"):
            self.batch.plan_for(self.me, 3, decode=decode)

    @pytest.mark.parametrize("decode", [False, True])
    def test_an_idle_batch_runs_by_either_entry(self, decode):
        with_plan(self.batch, Plan(self.me, ForwardMode.IDLE, 0, 0))
        self.batch.geometry = dataclasses.replace(self.batch.geometry, mode=ForwardMode.IDLE)
        assert self.batch.plan_for(self.me, 3, decode=decode).query_rows == 0

    def test_part_of_another_instance_is_never_used(self):
        """B5: of a wrapper's plan neither."""
        with_plan(self.batch, Plan(BackendId("wrapper"), ForwardMode.DECODE, 3, 15, parts=(self.plan,)))
        with pytest.raises(PlanError, match="another instance"):
            self.batch.plan_for(BackendId("mine"), 3, decode=True)

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
