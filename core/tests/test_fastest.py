"""Several backends that share roles: which child plans and runs a batch, and their combined claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    Claims,
    DType,
    ExtendPath,
    ForwardBatch,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    Plan,
    PlanError,
    Role,
)
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule, ExtendSchedule
from attnplug.contract.batch import BatchPlan
from attnplug.host import (
    HostContext,
    KVPools,
    Limits,
    MLADims,
    TypicalLens,
    WorkspaceOwner,
    plan_forward,
    planner_claims,
)
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.batches import capabilities, with_plan
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import GDN as LINEAR
from support.recorder import Hookless, Recorder

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
FULL = LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)
PAGES = 64


def by_length(first: str, second: str, upto: int = 100) -> BackendSchedule:
    """The first is the fastest up to a length, and the second from there on, at any number of requests."""
    points = ((requests, length) for requests in (1, 8) for length in (1, upto, upto + 1, 1000))
    at = {(requests, length, 1): length <= upto for requests, length in points}
    return BackendSchedule(
        {
            first: {point: 1.0 if early else 3.0 for point, early in at.items()},
            second: {point: 3.0 if early else 1.0 for point, early in at.items()},
        }
    )


def batch(lengths: Sequence[int], mode: ForwardMode = DECODE, new: int = 1, **changes: Any) -> ForwardBatch:
    table = torch.zeros(len(lengths), PAGES, dtype=torch.int32)
    known = Geometry.of_lengths(mode, table, [new] * len(lengths), list(lengths), 64)
    return ForwardBatch(replace(known, **changes))


def test_an_extend_is_planned_by_the_backend_that_is_the_fastest_for_all_of_its_requests() -> None:
    """Uneven prompts and mixed batches are timed by their totals, or by the mean request without exact lengths."""
    points = [(1, 256, 256), (1, 4096, 256), (32, 2049, 1)]
    times = {"few": dict(zip(points, (1.0, 9.0, 9.0), strict=True)), "many": dict.fromkeys(points, 3.0)}
    children = {name: Recorder(name) for name in times}
    both = FastestBackend(children, {Role.PREFILL: ExtendSchedule(times), Role.DECODE: "few"})
    table = torch.zeros(33, PAGES, dtype=torch.int32)

    def planner(query_lens: list[int], kv_lens: list[int], mode: ForwardMode = EXTEND, **changes: Any) -> str:
        known = Geometry.of_lengths(mode, table[: len(kv_lens)], query_lens, kv_lens, 64)
        return both.fastest(replace(known, **changes))

    assert planner([256], [256]) == planner([250, 30], [250, 60]) == "few"
    few = [200, 1, 1], [200, 3900, 3900]
    assert planner(*few, ForwardMode.MIXED) == "few"
    assert planner(*few, ForwardMode.MIXED, host=None, typical=TypicalLens(2666, 3900)) == "many"
    mixed = [200, *[1] * 32], [200, *[2048] * 32]
    assert planner(*mixed, ForwardMode.MIXED) == "many"
    assert planner(*mixed, ForwardMode.MIXED, host=None, typical=TypicalLens(1992, 2048)) == "many"
    assert planner([256], [256], host=None) == "few"


class TestWhoPlans:
    def setup_method(self) -> None:
        self.short, self.long = Recorder("short"), Recorder("long")
        self.both = FastestBackend({"short": self.short, "long": self.long}, {Role.DECODE: by_length("short", "long")})

    @pytest.mark.parametrize(
        ("given", "who"),
        [
            (batch([100]), "short"),
            (batch([101]), "long"),
            (batch([10, 400, 10]), "long"),  # 140 each
            (batch([10, 200, 10]), "short"),
            (batch([500], host=None, typical=TypicalLens(90, 500)), "short"),
            (batch([90], host=None, typical=TypicalLens(500, 500)), "long"),
            (batch([90], host=None, max_seq_len=500), "long"),
            (batch([90], typical=TypicalLens(500, 500)), "long"),
            (batch([], ForwardMode.IDLE), "short"),
        ],
    )
    def test_a_batch_is_planned_by_the_fastest_for_its_mean_length(self, given: ForwardBatch, who: str) -> None:
        """The length is taken from the host's typical lengths, else from exact host lengths, else from the upper
        bound."""
        plan = self.both.init_forward_metadata(given)
        assert plan.planner is self.both.backend_id and plan.planner_names() == [who]
        captured = self.both.init_forward_metadata_out_graph(given, in_capture=True)
        assert captured.planner_names() == [who]

    def test_a_graph_whose_lengths_nobody_knows_is_planned_by_the_best_over_all(self) -> None:
        """The child is the best over all lengths up to the bound, and the same at every replay, for any lengths on the
        device."""
        times = {(1, 64, 1): (1, 9), (1, 900, 1): (3, 2), (8, 64, 1): (3, 2), (8, 900, 1): (1, 9)}
        times |= {(8, 64, 1, True): (9, 1), (8, 900, 1, True): (1, 3)}
        schedule = BackendSchedule(
            {name: {point: float(each[n]) for point, each in times.items()} for n, name in enumerate(("short", "long"))}
        )
        both = FastestBackend(self.both.children, {Role.DECODE: schedule})
        for requests, bound, who in ((1, 1000, "short"), (8, 1000, "short"), (8, 500, "long")):
            given = batch([1] * requests, host=None, max_seq_len=bound, captured=True)
            found = []
            for length, in_capture in ((1, True), (bound, False), (70, False)):
                given.geometry.seq_lens.fill_(length)
                found.append(both.init_forward_metadata_out_graph(given, in_capture=in_capture).planner_names())
            assert found == [[who]] * 3
        eager = batch([1], host=None, max_seq_len=1000)
        assert both.fastest(eager.geometry) == "long", "without a graph, by the bound"
        typical = batch([1], host=None, max_seq_len=1000, captured=True, typical=TypicalLens(900, 900))
        assert both.fastest(typical.geometry) == "long", "a graph that is meant for some lengths, by these"

    @pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
    @pytest.mark.parametrize("level", [GraphLevel.DECODE, GraphLevel.UNIFORM])
    def test_extends_in_graphs_go_to_the_child_that_takes_them(self, level: GraphLevel, mode: ForwardMode) -> None:
        """A9: claims remain the weakest of all, and all other batches go by role."""
        prefill, decode = (
            Recorder("prefill", Claims(cuda_graph=level)),
            Recorder("decode", Claims(cuda_graph=GraphLevel.ALWAYS)),
        )
        children, serving = {"prefill": prefill, "decode": decode}, {Role.PREFILL: "prefill", Role.DECODE: "decode"}
        both = FastestBackend(children, serving, captured_extends="decode")
        assert both.claims.cuda_graph is level
        eager, new = batch([9], mode, 3), torch.tensor([3], dtype=torch.int32)
        captured = batch([9], mode, 3, host=None, captured=True, new_lens=new)
        plan = both.init_forward_metadata_out_graph(captured, in_capture=True)
        captured.plan = BatchPlan(plan)
        assert plan.planner_names() == ["decode"] and both.route(captured, None) == ("decode",)
        assert both.init_forward_metadata(eager).planner_names() == ["prefill"]
        both.init_cuda_graph_state(1, 9)
        assert len(decode.given("init_cuda_graph_state")) == 1

    @pytest.mark.parametrize("able", [True, False])
    def test_that_child_decides_whether_graphs_hold_ragged_calls(self, able: bool) -> None:
        """A9: no other child runs a captured extend."""
        children = {
            "prefill": Recorder("prefill", Claims(cuda_graph=GraphLevel.UNIFORM, ragged_graphs=not able)),
            "decode": Recorder("decode", Claims(cuda_graph=GraphLevel.ALWAYS, ragged_graphs=able)),
        }
        serving = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
        assert FastestBackend(children, serving, captured_extends="decode").claims.ragged_graphs is able
        assert not FastestBackend(children, serving).claims.ragged_graphs

    def test_many_requests_are_estimated_from_a_sample(self) -> None:
        """Choosing costs the same for all."""
        assert self.both.fastest(batch([60] * 500 + [900] * 40).geometry) == "long"
        assert self.both.fastest(batch([60] * 500 + [300] * 40).geometry) == "short"

    def test_the_plan_of_a_graph_is_made_once_if_its_child_makes_it_once(self) -> None:
        """If the child returns the same plan again, a replay reuses the wrapper's plan. Another plan of the child gets
        another one."""
        given = batch([50], host=None, typical=TypicalLens(50, 50))
        one, other = (Plan(self.short.backend_id, DECODE, 1, None) for _ in range(2))
        made = iter([one, one, other, one])
        self.short.init_forward_metadata_out_graph = lambda forward_batch, in_capture: next(made)
        both = FastestBackend(self.both.children, {Role.DECODE: by_length("short", "long")})
        found = [both.init_forward_metadata_out_graph(given, in_capture=capture) for capture in (True, *[False] * 3)]
        assert [plan.parts for plan in found] == [(one,), (one,), (other,), (one,)]
        assert found[0] is found[1] is found[3]

    def test_requests_that_differ_have_a_fastest_backend_of_their_own(self) -> None:
        """Batches of unequal lengths use the ragged times: with exact host lengths, with typical lengths, and in
        captured length ranges."""
        schedule = BackendSchedule(
            {"even": {(8, 64, 1): 1.0, (8, 64, 1, True): 3.0}, "ragged": {(8, 64, 1): 2.0, (8, 64, 1, True): 2.0}}
        )
        both = FastestBackend({name: Recorder(name) for name in ("even", "ragged")}, {Role.DECODE: schedule})
        alike, differing = [64] * 8, [32, 40, 48, 60, 70, 80, 90, 96]
        for lengths, who in ((alike, "even"), (differing, "ragged")):
            assert both.fastest(batch(lengths).geometry) == who
            assert both.fastest(batch(alike, host=None, typical=TypicalLens.of(lengths)).geometry) == who

    def test_requests_and_new_tokens_count_too(self) -> None:
        """A verify of a few tokens may have another fastest backend than a decode of as many requests."""
        times = {(1, 64, 1): (1.0, 2.0), (8, 64, 1): (2.0, 1.0), (1, 64, 4): (2.0, 1.0), (8, 64, 4): (1.0, 2.0)}
        schedule = BackendSchedule(
            {name: {point: each[number] for point, each in times.items()} for number, name in enumerate("ab")}
        )
        both = FastestBackend({"a": Recorder("a"), "b": Recorder("b")}, {Role.DECODE: schedule})
        found = [
            both.init_forward_metadata(batch([64] * requests, mode, new)).planner_names()
            for mode, new in ((DECODE, 1), (VERIFY, 4))
            for requests in (1, 8)
        ]
        assert found == [["a"], ["b"], ["b"], ["a"]]

    def test_roles_have_schedules_of_their_own_or_one_backend(self) -> None:
        """A9: ``verify`` is the role of the verifying backend, as for a split."""
        one = FastestBackend(
            {"short": self.short, "long": self.long},
            {Role.PREFILL: "long", Role.DECODE: by_length("short", "long")},
            verify=Role.PREFILL,
        )
        found = [one.init_forward_metadata(batch([50], mode)).planner_names() for mode in (EXTEND, DECODE, VERIFY)]
        assert found == [["long"], ["short"], ["long"]]


class TestWhoRuns:
    def setup_method(self) -> None:
        self.short, self.long = Recorder("short"), Recorder("long")
        self.both = FastestBackend({"short": self.short, "long": self.long}, {Role.DECODE: by_length("short", "long")})

    @pytest.mark.parametrize("nested", ["alone", "split", "hybrid"])
    def test_every_layer_runs_on_the_child_that_planned(self, nested: str) -> None:
        """B5: layers run on the child that planned, even if the schedule would choose another one for the batch's new
        length."""
        model = ModelSpec("m", "test", (LINEAR, FULL), 64)
        outer: AttentionBackend = {
            "alone": lambda: self.both,
            "split": lambda: SplitBackend(Recorder("p"), self.both),
            "hybrid": lambda: HybridLinearBackend(self.both, Recorder("linear"), model),
        }[nested]()
        given = batch([500])
        with_plan(given, outer.init_forward_metadata(given))
        given.geometry = batch([50]).geometry
        self.long.calls.clear()
        outer.forward_decode("q", "k", "v", FULL, given)
        outer.select("index", FULL, given)
        outer.init_forward_metadata_in_graph(given)
        assert [member for member, _ in self.long.calls] == [
            "forward_decode",
            "select",
            "init_forward_metadata_in_graph",
        ]
        assert self.short.calls == []

    def test_without_its_plan_nothing_runs(self) -> None:
        """B5: no plan, a foreign plan, and that of another instance with the same children."""
        children = {"short": Hookless("short"), "long": Hookless("long")}
        serving = {Role.DECODE: by_length("short", "long")}
        one, other = FastestBackend(children, serving), FastestBackend(children, serving)
        q, given = torch.zeros(1, 1, 8), batch([500])
        with raises_naming(PlanError, "long", "plan"):
            one.forward_decode(q, None, None, FULL, given)
        with raises_naming(PlanError, "long", "stranger"):
            one.forward_decode(q, None, None, FULL, with_plan(given, Hookless("stranger").init_forward_metadata(given)))
        again = FastestBackend({"short": Hookless("short"), "long": Hookless("long")}, serving)
        with raises_naming(PlanError, "long", "instance"):
            one.forward_decode(q, None, None, FULL, with_plan(given, again.init_forward_metadata(given)))
        with_plan(given, other.init_forward_metadata(given))
        assert one.forward_decode(q, None, None, FULL, given) is q, "a child's own plan is a plan of the child"

    def test_a_plan_tells_what_its_maker_claims(self) -> None:
        """The planner of one batch may claim more than the wrapper, whose claims hold for all batches."""
        extras = {"short": {"lse", "q_rope"}, "long": {"lse"}}
        children = {name: Recorder(name, Claims(extras=frozenset(found))) for name, found in extras.items()}
        both = FastestBackend(children, {Role.DECODE: by_length("short", "long")})
        outer = SplitBackend(Recorder("p"), both)
        assert both.claims.extras == {"lse"}
        for length, who in ((50, "short"), (500, "long")):
            for backend in (both, outer, children[who]):
                claims = planner_claims(backend, backend.init_forward_metadata(batch([length])))
                assert claims == children[who].claims


class TestRagged:
    """C1, C2: the calls of an MLA prefill carry no batch, so their plan identifies the child that runs them."""

    def backend(self, *children: Any) -> FastestBackend:
        named = dict(zip(("short", "long"), children, strict=True))
        return FastestBackend(named, {Role.PREFILL: by_length("short", "long")})

    @pytest.mark.parametrize(("length", "who"), [(50, 0), (500, 1)])
    def test_calls_run_on_the_child_that_planned_them_by_its_own_plan(self, length: int, who: int) -> None:
        children = Recorder("short"), Recorder("long")
        both = self.backend(*children)
        given = batch([length], EXTEND)
        plan = both.init_mha_chunk_metadata(given, True)
        assert children[who].given("init_mha_chunk_metadata")[0]["disable_flashinfer_ragged"] is True
        assert both.forward_ragged("q", "k", "v", FULL, "call", plan, "lse") is children[who].result
        assert children[who].given("forward_ragged")[0]["plan"].planner is children[who].backend_id
        assert children[1 - who].calls == []

    def test_a_child_that_plans_no_calls_runs_them_without_a_plan(self) -> None:
        """A8: one child has the hook, or neither has."""

        class Planless(Hookless):
            forward_ragged = Recorder.forward_ragged

            def _answer(self, member: str, arguments: dict[str, Any]) -> Any:
                return self.backend_id.name, arguments["plan"]

        for short in (Recorder("short"), Planless("short")):
            both = self.backend(short, Planless("long"))
            plan = both.init_mha_chunk_metadata(batch([500], EXTEND))
            assert both.forward_ragged("q", "k", "v", FULL, "call", plan) == ("long", None)

    def test_without_any_plan_the_first_that_prefills_runs_a_call(self) -> None:
        """A host that makes calls by itself plans none."""
        children = Recorder("short"), Recorder("long")
        assert self.backend(*children).forward_ragged("q", "k", "v", FULL, "call") is children[0].result


class TestTogether:
    def test_it_claims_what_all_children_can_in_their_roles(self) -> None:
        """A9: one that only decodes does not count for an extend, and one that only prefills not for a captured
        decode."""
        able = Claims(cuda_graph=GraphLevel.UNIFORM, mla_extend=frozenset(ExtendPath), needs_cpu_seq_lens=False)
        children = {
            "a": Recorder("a", able),
            "b": Recorder("b", replace(able, cuda_graph=GraphLevel.NEVER)),
            "c": Recorder("c", replace(able, mla_extend=frozenset())),
        }
        serving = {Role.PREFILL: by_length("a", "b"), Role.DECODE: by_length("a", "c")}
        shared = FastestBackend(children, serving)
        assert shared.claims == replace(able, cuda_graph=GraphLevel.DECODE)
        assert shared.limiting_children["cuda_graph"] == ("b",)
        assert FastestBackend(children, {Role.DRAFT: by_length("b", "c")}).claims == replace(
            able, cuda_graph=GraphLevel.NEVER, mla_extend=frozenset()
        )

    @pytest.mark.parametrize(
        ("level", "reserving"), [(GraphLevel.DECODE, ["b", "c"]), (GraphLevel.UNIFORM, ["a", "b", "c"])]
    )
    def test_memory_for_graphs_is_asked_once_of_each_that_is_captured(
        self, level: GraphLevel, reserving: list[str]
    ) -> None:
        children = {
            name: Recorder(name, Claims(cuda_graph=level), fill=fill) for name, fill in (("a", 9), ("b", 1), ("c", 2))
        }
        shared = FastestBackend(children, {Role.PREFILL: by_length("a", "b"), Role.DECODE: by_length("b", "c")})
        shared.init_cuda_graph_state(8, 16)
        assert [name for name, child in children.items() if child.given("init_cuda_graph_state")] == reserving
        assert all(len(child.calls) <= 1 for child in children.values())
        assert shared.get_cuda_graph_seq_len_fill_value() == (2 if level is GraphLevel.DECODE else 9)

    def test_a_wrapper_tells_who_was_left_out_inside_of_it(self) -> None:
        both = FastestBackend({"a": Recorder("a")}, {Role.DECODE: "a"}, left_out={"b": "it is weak"})
        assert SplitBackend(Recorder("p"), both).left_out == {"b": "it is weak"}


MLA = LayerSpec(0, AttentionKind.MLA, 2, 1, 24, 16, 0.3, mla=MLADims(16, 16, 8))
MHA = LayerSpec(0, AttentionKind.MHA, 4, 2, 16, 16, 0.3)


@pytest.mark.parametrize("layer", [MHA, MLA], ids=["MHA", "MLA"])
def test_alternating_steps_over_one_cache_equal_float64(layer: LayerSpec) -> None:
    """A9, B5: another backend extends and decodes at every step, each over the rows that the others wrote."""
    page_size, counts = 4, [(5, 2, 9), *[(1, 1, 1)] * 6, (3, 3, 3), *[(1, 1, 1)] * 5]
    sizes: dict[str, Any] = {"num_pages": 32, "page_size": page_size, "dtype": DType.FLOAT32, "device": "cpu"}
    pool = MLAPool((layer,), **sizes) if layer.mla is not None else MHAPool((layer,), **sizes)
    pools = KVPools(mla=pool) if isinstance(pool, MLAPool) else KVPools(mha=pool)
    caches = [pool.rows(0)] if isinstance(pool, MLAPool) else [pool.keys(0), pool.values(0)]
    for cache in caches:
        cache.fill_(float("nan"))
    host = HostContext(
        model=ModelSpec("m", "test", (layer,), 128),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kv_dtype=DType.FLOAT32,
        page_size=page_size,
        limits=Limits(3, 32, 64),
        pools=pools,
        workspace=WorkspaceOwner(),
    )
    roles = frozenset({Role.PREFILL, Role.DECODE})
    names = ("one", "two", "three")
    children = {
        name: TorchNativeBackend(host.for_backend(name, capabilities("torch_native"), roles=roles)) for name in names
    }
    schedule = BackendSchedule(
        {
            name: {(1, length, 1): 1.0 + (length % 3 != number) for length in range(1, 40)}
            for number, name in enumerate(names)
        }
    )
    backend = FastestBackend(children, dict.fromkeys((Role.PREFILL, Role.DECODE), schedule))
    table = torch.randperm(30, generator=torch.Generator().manual_seed(1), dtype=torch.int32).view(3, 10)
    random = torch.Generator().manual_seed(2)
    width = layer.head_dim if layer.mla is None else layer.mla.row_dim
    kept: list[list[Tensor]] = [[], [], []]
    makers, lengths = list[str](), [0, 0, 0]
    for new in counts:
        lengths = [length + count for length, count in zip(lengths, new, strict=True)]
        rows, mode = sum(new), DECODE if set(new) == {1} else EXTEND
        q = torch.randn(rows, layer.num_heads, width, generator=random)
        k = torch.randn(rows, layer.num_kv_heads, width, generator=random)
        v = None if layer.mla is not None else torch.randn(rows, layer.num_kv_heads, layer.v_head_dim, generator=random)
        given = ForwardBatch(Geometry.of_lengths(mode, table, list(new), lengths, page_size))
        planned = plan_forward(backend, given)
        assert planned is not None
        makers += planned.attention.planner_names()
        run = backend.forward_decode if mode is DECODE else backend.forward_extend
        out = run(q, k, v, layer, given)
        values = k[..., : layer.mla.kv_lora_rank] if layer.mla is not None else v
        assert values is not None
        expected = []
        for mine, part_q, part_k, part_v in zip(kept, q.split(new), k.split(new), values.split(new), strict=True):
            mine.append(torch.cat([part_k, part_v], -1))
            expected.append(reference(part_q, torch.cat(mine), width, layer.scale))
        torch.testing.assert_close(out.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)
    assert set(makers) == set(names)
    assert sum(before != after for before, after in pairwise(makers)) > 9, "it hardly alternates"


def reference(q: Tensor, rows: Tensor, width: int, scale: float) -> Tensor:
    """Causal attention in float64 of q ``[new, heads, width]``, the last of rows ``[total, kv_heads, width + …]``."""
    q, rows = q.double(), rows.double().repeat_interleave(q.shape[1] // rows.shape[1], 1)
    keys, values, total = rows[..., :width], rows[..., width:], rows.shape[0]
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    late = torch.arange(total)[None] > torch.arange(total - q.shape[0], total)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, float("-inf")).softmax(-1), values)


@pytest.mark.parametrize("lens", [(-1, 4), (5, 4)])
def test_typical_lengths_that_cannot_be_are_refused(lens: tuple[int, int]) -> None:
    with raises_naming(PlanError, TypicalLens(*lens)):
        batch([4], typical=TypicalLens(*lens))
