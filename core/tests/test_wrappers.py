"""Wrappers forward everything, by construction (A9), and hooks by their own signatures (A8)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendError,
    Claims,
    ExtendPath,
    ForwardBatch,
    ForwardMode,
    GraphLevel,
    LayerSpec,
    ModelSpec,
    PageSizes,
    Plan,
    PlanError,
    Role,
)
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.backend import (
    GraphPlanning,
    hook_signatures,
    methods,
)
from attnplug.declare.capabilities import weakest
from attnplug.host import ForwardingBackend
from attnplug.linear import LinearHooks
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import GDN
from support.recorder import MEMBERS, PLANNERS, Hookless, Recorder, batch_in

LINEAR, FULL = GDN, LayerSpec(1, AttentionKind.MHA, 1, 1, 8, 8, 1.0)
MODEL = ModelSpec("half", "test", (LINEAR, FULL), 64)
FIRST = BackendSchedule({"first": {(1, 64, 1): 1.0}, "second": {(1, 64, 1): 2.0}})
BUILD: dict[type, Any] = {
    SplitBackend: SplitBackend,
    HybridLinearBackend: lambda first, second: HybridLinearBackend(first, second, MODEL),
    FastestBackend: lambda first, second: FastestBackend({"first": first, "second": second}, {Role.PREFILL: FIRST}),
}
"""How each wrapper is made of two children."""
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def child(name: str, claims: Claims | None = None) -> Recorder:
    return Recorder(name, claims or Claims())


def concrete_wrappers() -> list[type[ForwardingBackend]]:
    """All wrapper classes defined in attnplug, found by their base class so that new ones are tested, too."""
    found, waiting = [], list(ForwardingBackend.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        if cls.__module__.startswith("attnplug."):
            found.append(cls)
    assert found
    return found


every_wrapper = pytest.mark.parametrize("wrapper", concrete_wrappers())
each_planner = pytest.mark.parametrize("member", ["init_forward_metadata", "init_forward_metadata_out_graph"])


def arguments_for(member: str, signature: inspect.Signature) -> dict[str, Any]:
    """One value for each parameter of the protocol, compared by identity. Values that wrappers read are real ones."""
    batch = batch_in(ForwardMode.DECODE if member == "forward_decode" else ForwardMode.EXTEND)
    layer = LINEAR if member in ("forward_conv", "forward_linear", "forward_delta") else FULL
    real = {"batch": batch, "forward_batch": batch, "layer": layer}
    return {name: real.get(name, object()) for name in signature.parameters}


def call(target: object, member: str, signature: inspect.Signature, arguments: dict[str, Any]) -> Any:
    """Call a member as the protocol declares it: keyword-only arguments by name, all others by position."""
    by_name = {name for name, parameter in signature.parameters.items() if parameter.kind is KEYWORD_ONLY}
    by_position = [value for name, value in arguments.items() if name not in by_name]
    return getattr(target, member)(*by_position, **{name: arguments[name] for name in by_name})


class TestEveryMember:
    @every_wrapper
    @pytest.mark.parametrize("member", MEMBERS)
    def test_every_argument_of_every_member_reaches_a_child_and_its_answer_comes_back(
        self, wrapper, member, monkeypatch
    ):
        """A9: save_kv_cache, extras, lse, in_capture, silu and later arguments are forwarded. A8: signatures are
        inspected when the wrapper is built, not at a call."""
        children = [Recorder("a"), Recorder("b")]
        built = BUILD[wrapper](*children)
        signature, arguments = MEMBERS[member], arguments_for(member, MEMBERS[member])
        with monkeypatch.context() as patch:
            patch.setattr(inspect, "signature", lambda *a, **k: pytest.fail("inspected again"))
            answer = call(built, member, signature, arguments)
        asked = [child for child in children if child.calls]
        assert asked
        for child in asked:
            assert [called for called, _ in child.calls] == [member]
            (given,) = child.given(member)
            assert given.keys() == arguments.keys()
            assert [name for name in given if given[name] is not arguments[name]] == []
        if member in PLANNERS:
            assert [answer.part_of(child.backend_id) for child in asked].count(None) == 0
        elif signature.return_annotation not in ("None", "int"):
            assert [child.result for child in asked] == [answer]

    @every_wrapper
    @pytest.mark.parametrize("hook", hook_signatures())
    def test_a_hook_that_no_child_has_is_none_on_the_wrapper(self, wrapper, hook):
        """A6, A8: callers that bind the hook then find it absent, as they would on the children."""
        built = BUILD[wrapper](Hookless("a"), Hookless("b"))
        assert getattr(built, hook) is None
        one_has_it = type("OneHook", (Hookless,), {hook: getattr(Recorder, hook)})
        assert all(
            getattr(BUILD[wrapper](*pair), hook) is not None
            for pair in ((one_has_it(), Hookless()), (Hookless(), one_has_it()))
        )

    def test_the_protocol_is_enumerated_from_itself(self):
        """A9: members of the protocol are enumerated, not listed by hand."""
        assert set(methods(AttentionBackend)) >= {"init_forward_metadata", "forward_extend", "forward_decode"}
        assert tuple(hook_signatures()["init_mha_chunk_metadata"].parameters) == (
            "forward_batch",
            "disable_flashinfer_ragged",
        )

    def test_a_wrapper_is_a_backend(self):
        """A9"""
        assert isinstance(SplitBackend(child("a"), child("b")), AttentionBackend)

    @each_planner
    @every_wrapper
    def test_a_childs_plan_that_is_none_of_its_own_is_the_childs_fault(self, wrapper, member):
        """B5: the error names the child, not the caller of the wrapper."""
        careless = Recorder("careless")
        setattr(careless, member, lambda forward_batch, in_capture=False: {"planned": True})
        built = BUILD[wrapper](careless, Recorder("b"))
        with raises_naming(PlanError, member, "careless", "Plan"):
            getattr(built, member)(batch_in(ForwardMode.EXTEND))

    @each_planner
    @every_wrapper
    def test_its_plan_counts_the_rows_that_a_child_planned(self, wrapper, member):
        """B5: of a padded batch fewer than it has."""
        first = Recorder("a")
        plan = Plan(first.backend_id, ForwardMode.EXTEND, 1, 5)
        setattr(first, member, lambda forward_batch, in_capture=False: plan)
        made = getattr(BUILD[wrapper](first, Recorder("b")), member)(batch_in(ForwardMode.EXTEND))
        assert (made.query_rows, made.kv_rows) == (1, 5)


class TestLaterHooks:
    """A9: a wrapper forwards members that the contract gains after the wrapper was written."""

    @pytest.fixture(autouse=True)
    def later_contract(self, monkeypatch) -> Iterator[None]:
        """The protocols gain a hook that runs a layer, one about a batch and one about neither, and a method that is
        not optional. Classes that are made from here on are made by that version of the contract."""
        for protocol, *members in (
            (AttentionBackend, survey),
            (LinearHooks, forward_gated),
            (GraphPlanning, review, warm_up),
        ):
            for member in members:
                monkeypatch.setattr(protocol, member.__name__, member, raising=False)
        hook_signatures.cache_clear()
        yield
        monkeypatch.undo()
        hook_signatures.cache_clear()

    def wrappers(self, *children: Any) -> Iterator[ForwardingBackend]:
        """Wrapper classes of these two children whose source does not mention the later hooks."""

        class Pair(ForwardingBackend):
            def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
                return ("left", "right") if layer is None else ("left",)

        yield Pair("pair", dict(zip(("left", "right"), children, strict=True)))
        yield type("NewSplit", (SplitBackend,), {})(*children)
        yield type("NewHybrid", (HybridLinearBackend,), {})(*children, MODEL)
        both = dict(zip(("first", "second"), children, strict=True))
        yield type("NewFastest", (FastestBackend,), {})(both, {Role.DECODE: FIRST})

    @pytest.mark.parametrize("hook", ["survey", "forward_gated", "review", "warm_up"])
    def test_they_reach_the_children_with_every_argument_and_the_answer_comes_back(self, hook):
        signature = {**methods(AttentionBackend), **hook_signatures()}[hook]
        for number in range(4):
            children = [Later("a"), Later("b")]
            built = list(self.wrappers(*children))[number]
            arguments = arguments_for(hook, signature)
            answer = call(built, hook, signature, arguments)
            one = hook == "forward_gated" or (hook != "warm_up" and isinstance(built, SplitBackend | FastestBackend))
            assert [len(child.calls) for child in children] == [1, 0 if one else 1]
            for child in children[: 1 if one else 2]:
                assert child.calls == [(hook, *arguments.values())]
            assert answer is arguments[next(iter(arguments))]

    def test_what_is_left_out_arrives_as_the_protocols_default(self):
        for built in self.wrappers(first := Later("a"), Later("b")):
            batch = batch_in(ForwardMode.EXTEND)
            built.forward_gated("q", FULL, batch)
            built.review(batch)
            built.warm_up(2)
            assert first.calls == [
                ("forward_gated", "q", FULL, batch, 1.5),
                ("review", batch, 3, False),
                ("warm_up", 2, True),
            ]
            first.calls.clear()

    def test_plans_of_several_children_are_parts_of_one(self):
        """B5: this includes plans of a hook that may plan nothing."""
        children = Recorder("a"), Recorder("b")
        pair = next(self.wrappers(*children))
        plan = pair.init_mha_chunk_metadata(batch_in(ForwardMode.EXTEND))
        assert plan.planner is pair.backend_id
        assert [part.planner for part in plan.parts] == [child.backend_id for child in children]

    def test_they_are_none_where_no_child_has_them(self):
        for built in self.wrappers(Hookless(), Hookless()):
            assert built.forward_gated is built.review is built.warm_up is None

    def test_a_child_without_the_hook_that_is_asked_is_named(self):
        for built in self.wrappers(Hookless(), Later("b")):
            with raises_naming(BackendError, "warm_up", "hookless"):
                built.warm_up(2)

    def test_children_that_answer_differently_are_an_error(self):
        second = Later("b")
        second.warm_up = lambda rounds, *, quietly: "something else"
        for built in self.wrappers(Later("a"), second):
            with raises_naming(BackendError, "warm_up", "something else"):
                built.warm_up(2)


def survey(self, batch, *, wide=False):
    """A method of every backend, about a batch."""


def forward_gated(self, q, layer, batch, *, strength=1.5):
    """Runs a layer."""


def review(self, forward_batch, depth=3, *, strict=False):
    """About a batch."""


def warm_up(self, rounds, *, quietly=True):
    """About neither."""


class Later(Hookless):
    """A child with all later members. It returns its first argument."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []

    def survey(self, batch, *, wide):
        self.calls.append(("survey", batch, wide))
        return batch

    def forward_gated(self, q, layer, batch, *, strength):
        self.calls.append(("forward_gated", q, layer, batch, strength))
        return q

    def review(self, forward_batch, depth, *, strict):
        self.calls.append(("review", forward_batch, depth, strict))
        return forward_batch

    def warm_up(self, rounds, *, quietly):
        self.calls.append(("warm_up", rounds, quietly))
        return rounds


class TestDefinitions:
    @pytest.mark.parametrize("change", [{"extras": "dropped"}, {"save_kv_cache": False}])
    def test_one_that_differs_from_the_protocols_parameters_cannot_be_created(self, change):
        """A9: another default, or a parameter that is not there."""
        right = MEMBERS["forward_extend"]
        type("Right", (ForwardingBackend,), {"forward_extend": _stub(right)})
        wrong = [
            parameter.replace(default=change.get(parameter.name, parameter.default))
            for parameter in right.parameters.values()
            if change.get(parameter.name) != "dropped"
        ]
        with pytest.raises(TypeError, match=r"Wrong has forward_extend\(.*but the protocol has forward_extend\("):
            type("Wrong", (ForwardingBackend,), {"forward_extend": _stub(right.replace(parameters=wrong))})

    def test_the_protocols_empty_bodies_are_no_definitions(self):
        """A9: a wrapper that inherits from the protocols still forwards."""

        class Hollow(SplitBackend, AttentionBackend, GraphPlanning):
            pass

        class Direct(AttentionBackend, GraphPlanning, ForwardingBackend):
            def __init__(self, only: Any) -> None:
                ForwardingBackend.__init__(self, "direct", {"only": only})

            def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
                return ("only",)

        for built in (Hollow(Recorder("a"), Recorder("b")), Direct(Recorder("a"))):
            batch = batch_in(ForwardMode.EXTEND)
            assert built.init_forward_metadata(batch).planner is built.backend_id
            assert built.forward_extend("q", "k", "v", FULL, batch) is not None
            assert built.get_cuda_graph_seq_len_fill_value() == 0

    def test_a_route_to_an_unknown_child_names_the_children(self):
        class Lost(ForwardingBackend):
            def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
                return ("slow",)

        with raises_naming(BackendError, "lost", "forward_decode", "'slow'", "fast, exact"):
            Lost("lost", {"fast": child("a"), "exact": child("b")}).forward_decode(None, None, None, FULL, None)

    def test_a_wrapper_without_a_route_cannot_be_built(self):
        """A9"""
        with raises_naming(TypeError, "route"):
            type("Routeless", (ForwardingBackend,), {})("routeless", {"a": child("a")})


def _stub(signature: inspect.Signature) -> Any:
    """A method with the given signature."""

    def method(self, *args, **kwargs):
        return None

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


class TestClaims:
    def test_wrapper_takes_the_weaker_claim_and_says_which_child_limits_it(self):
        """A9: graph level the minimum, page sizes the intersection, CPU lengths either."""
        strong = Claims(cuda_graph=GraphLevel.ALWAYS, page_sizes=PageSizes.of(16, 32, 64), needs_cpu_seq_lens=False)
        weak = Claims(cuda_graph=GraphLevel.DECODE, page_sizes=PageSizes.of(32, 64), needs_cpu_seq_lens=True)
        split = SplitBackend(child("a", strong), child("b", weak))
        assert split.claims == Claims(
            cuda_graph=GraphLevel.DECODE, page_sizes=PageSizes.of(32, 64), needs_cpu_seq_lens=True
        )
        assert dict(split.limiting_children) == {
            "cuda_graph": ("decode",),
            "page_sizes": ("decode",),
            "needs_cpu_seq_lens": ("decode",),
        }

    def test_a_claim_that_one_child_decides_has_no_limiting_backend(self):
        """A9: how an extend runs is the prefill backend's affair; a decode backend that cannot weakens nothing."""
        every = Claims(mla_extend=frozenset(ExtendPath))
        split = SplitBackend(child("a", every), child("b", Claims(mla_extend=frozenset())))
        assert split.claims.mla_extend == frozenset(ExtendPath)
        assert not split.limiting_children

    @pytest.mark.parametrize(
        ("prefill", "decode", "level", "forced"),
        [
            (GraphLevel.NEVER, GraphLevel.NEVER, GraphLevel.NEVER, None),
            (GraphLevel.NEVER, GraphLevel.DECODE, GraphLevel.DECODE, None),
            (GraphLevel.NEVER, GraphLevel.ALWAYS, GraphLevel.DECODE, ("prefill",)),
            (GraphLevel.UNIFORM, GraphLevel.ALWAYS, GraphLevel.UNIFORM, ("prefill",)),
            (GraphLevel.ALWAYS, GraphLevel.NEVER, GraphLevel.NEVER, ("decode",)),
        ],
    )
    def test_a_split_captures_what_the_children_that_take_part_can(self, prefill, decode, level, forced):
        """A9: the minimum over the children that run a captured batch; a decode is the decode child's alone."""
        split = SplitBackend(child("a", Claims(cuda_graph=prefill)), child("b", Claims(cuda_graph=decode)))
        assert split.claims.cuda_graph is level
        assert split.limiting_children.get("cuda_graph") == forced

    def test_children_that_agree_force_nothing(self):
        """A9"""
        assert not SplitBackend(child("a"), child("b")).limiting_children

    def test_each_child_may_force_another_claim(self):
        """A9"""
        combined = weakest(
            {
                "prefill": Claims(cuda_graph=GraphLevel.NEVER, page_sizes=PageSizes.of(64), needs_cpu_seq_lens=False),
                "decode": Claims(cuda_graph=GraphLevel.UNIFORM, page_sizes=PageSizes(), needs_cpu_seq_lens=True),
            }
        )
        assert combined.claims == Claims(
            cuda_graph=GraphLevel.NEVER, page_sizes=PageSizes.of(64), needs_cpu_seq_lens=True
        )
        assert combined.limited_by["cuda_graph"] == ("prefill",)
        assert combined.limited_by["needs_cpu_seq_lens"] == ("decode",)

    def test_two_children_with_the_same_weak_claim_are_both_named(self):
        """A9"""
        combined = weakest({"a": Claims(), "b": Claims(), "c": Claims(cuda_graph=GraphLevel.ALWAYS)})
        assert combined.limited_by["cuda_graph"] == ("a", "b")

    def test_page_sizes_of_both_count_when_they_only_meet_in_a_multiple(self):
        """A9: 128 is two pages of 64 and four of 32."""
        common = PageSizes.of(32, 64).intersection(PageSizes.of(128))
        assert common.kernel_size(128) == 128
        assert common.kernel_size(64) is None

    def test_wrappers_nest(self):
        """A9"""
        inner = SplitBackend(
            child("a", Claims(cuda_graph=GraphLevel.DECODE)), child("b", Claims(cuda_graph=GraphLevel.ALWAYS))
        )
        assert (
            SplitBackend(inner, child("c", Claims(cuda_graph=GraphLevel.ALWAYS))).claims.cuda_graph is GraphLevel.DECODE
        )
