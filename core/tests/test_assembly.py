"""Building of selected backends, and failures of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug import (
    AttentionKind,
    BackendContext,
    Claims,
    DType,
    ExtendPath,
    ForwardBatch,
    ForwardMode,
    Geometry,
    GraphLevel,
    PageSizes,
    Problem,
    Refusal,
    Role,
    UsageError,
)
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.ranking import Ranked
from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.errors import PluginWarning, WorkspaceError
from attnplug.declare.spec import Registered, Source
from attnplug.host import (
    BackendRequest,
    ForwardingBackend,
    HostContext,
    KVPools,
    Limits,
    Registry,
    Selection,
    SelectionError,
    WorkspaceOwner,
    build_selection,
    choose_importable,
    select,
)
from attnplug.registry.assembly import BuildError, build_chosen
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import GDN, MHA, MLA, claiming, model
from support.recorder import Recorder

PROBLEM = Problem(model(MHA), "cpu")


@dataclass(frozen=True)
class Options:
    split: int = 1


def backend(name: str, **fields: Any) -> Registered:
    spec = replace(claiming(), name=name, **fields)
    return Registered(spec, Source(name, "nowhere", f"{name}-dist", "1.2"))


CONTEXT = HostContext(
    model=PROBLEM.model,
    device=torch.device("cpu"),
    dtype=torch.float32,
    kv_dtype=DType.FLOAT32,
    page_size=64,
    limits=Limits(1, 1, 1),
    pools=KVPools(),
    workspace=WorkspaceOwner(),
)
BEST, GOOD = backend("best", preference=100, options=Options), backend("good", preference=50)
INSTALLED = Registry({"best": BEST, "good": GOOD})


def failing(*names: str) -> Callable[[Selection], str]:
    """Build function that returns the name of the backend chosen for prefill. Backends in ``names`` cannot be built."""

    def build(selection: Selection) -> str:
        chosen = selection.chosen(Role.PREFILL)
        if chosen.spec.name in names:
            raise BuildError(chosen, WorkspaceError("no kernel image"))
        return chosen.spec.name

    return build


def test_what_can_be_built_is_built_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selection, built = build_chosen(INSTALLED, BackendRequest(), PROBLEM, failing())
    assert built == "best"
    assert selection.chosen(Role.DECODE) is BEST


def test_auto_takes_the_next_with_a_warning_that_names_the_culprit() -> None:
    """D2: a plugin that cannot be built costs its own backend only, and never silently."""
    with pytest.warns(PluginWarning, match=r"best \(best-dist 1\.2\): no kernel image; auto continues without it"):
        selection, built = build_chosen(INSTALLED, BackendRequest(), PROBLEM, failing("best"))
    assert built == "good"
    assert selection.choices[Role.PREFILL].why() == "auto: the only usable one; 1 refused"
    (refusal,) = selection.choices[Role.PREFILL].candidates[0].refusals
    assert refusal.code == "factory" and "no kernel image" in refusal.message


def test_another_backend_may_have_another_page_size() -> None:
    """Pools are built after the choice, so the whole choice is made again instead of exchanging the backend."""
    can = claiming().capabilities
    best = backend("best", capabilities=replace(can, page_sizes=PageSizes.of(128)), preference=100)
    good = backend("good", capabilities=replace(can, page_sizes=PageSizes.of(48)))
    installed = Registry({"best": best, "good": good})
    with pytest.warns(PluginWarning):
        selection, _ = build_chosen(installed, BackendRequest(), PROBLEM, failing("best"))
    assert selection.page_size == 48


def test_where_none_can_be_built_the_error_holds_every_reason() -> None:
    """D3"""
    with pytest.warns(PluginWarning), pytest.raises(SelectionError) as caught:
        build_chosen(INSTALLED, BackendRequest(), PROBLEM, failing("best", "good"))
    assert str(caught.value).count("no kernel image") >= 2


@pytest.mark.parametrize(
    ("registry", "request_"),
    [
        (INSTALLED, BackendRequest("best")),
        (INSTALLED, BackendRequest(roles={Role.DECODE: "best"})),
        (INSTALLED, BackendRequest(options={"best": {"split": "2"}})),
        (replace(INSTALLED, strict=True), BackendRequest()),
    ],
    ids=["asked for", "asked for in one role", "given options", "strict mode"],
)
def test_it_is_never_replaced(registry: Registry, request_: BackendRequest) -> None:
    """D3: a backend that the user requested is not replaced by another one if it fails to build."""
    with raises_naming(BuildError, "best-dist 1.2", "no kernel image") as caught:
        build_chosen(registry, request_, PROBLEM, failing("best"))
    assert caught.value.backend is BEST


def test_a_mistake_in_what_was_asked_is_no_reason_to_go_on() -> None:
    def build(selection: Selection) -> None:
        raise UsageError("--context-length is too long")

    with pytest.raises(UsageError):
        build_chosen(INSTALLED, BackendRequest(), PROBLEM, build)


def test_a_factory_that_refuses_its_options_is_wrong_usage_of_that_backend(monkeypatch: Any) -> None:
    """D2, D3: if the user gave options, this is a usage error. If not, auto warns and takes the next backend."""

    def factory(context: Any) -> None:
        raise UsageError("split must be even")

    monkeypatch.setitem(sys.modules, "refuses_options", SimpleNamespace(build=factory))
    best = backend("best", preference=100, options=Options, factory="refuses_options:build")
    installed = Registry({"best": best, "good": GOOD})

    def build(selection: Selection) -> None:
        if selection.chosen(Role.PREFILL) is best:
            build_selection(selection, CONTEXT)

    with raises_naming(BuildError, "best (best-dist 1.2)", "split must be even") as caught:
        build_chosen(installed, BackendRequest(options={"best": {"split": "3"}}), PROBLEM, build)
    assert caught.value.exit_code == UsageError.exit_code
    with pytest.warns(PluginWarning, match="split must be even"):
        assert build_chosen(installed, BackendRequest(), PROBLEM, build)[0].chosen(Role.PREFILL) is GOOD


def test_what_cannot_be_imported_is_left_out_before_anything_is_built(tmp_path: Path, monkeypatch: Any) -> None:
    """D2, D3: a host loads its weights afterwards. The warning is shown once, not again when the rest is built."""
    (tmp_path / "half_a_library.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    best, good = (
        backend("best", preference=100, factory="half_a_library:Backend"),
        backend("good", factory="attnplug:Plan"),
    )
    installed = Registry({"best": best, "good": good})
    with pytest.warns(PluginWarning, match=r"best-dist 1\.2.*libcudart"):
        selection = choose_importable(installed, BackendRequest(), PROBLEM)
    assert selection.chosen(Role.PREFILL) is good
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = build_chosen(installed, BackendRequest(), PROBLEM, failing(), selection.failed)
    assert again.chosen(Role.PREFILL) is good
    with raises_naming(BuildError, "libcudart"):
        choose_importable(installed, BackendRequest("best"), PROBLEM)


@pytest.mark.parametrize("verify", [Role.PREFILL, Role.DECODE])
def test_verify_goes_where_the_selection_says(monkeypatch: Any, verify: Role) -> None:
    """A9: if the choice for verify were lost on the way, a wrong backend would run it."""
    built: dict[str, Recorder] = {}

    def factory(context: BackendContext) -> Recorder:
        return built.setdefault(context.name, Recorder(context.name, context.declared.claims))

    monkeypatch.setitem(sys.modules, "recorders", SimpleNamespace(build=factory))
    both = {name: backend(name, factory="recorders:build") for name in ("a", "b")}
    request = BackendRequest(roles={Role.PREFILL: "a", Role.DECODE: "b"}, verify=verify)
    selection = select(Registry(both), request, PROBLEM)
    split = build_selection(selection, CONTEXT)
    table = torch.zeros(1, 1, dtype=torch.int32)
    batch = ForwardBatch(Geometry.of_lengths(ForwardMode.TARGET_VERIFY, table, [1], [1], 64))
    assert split.init_forward_metadata(batch).planner_names() == ["a" if verify is Role.PREFILL else "b"]
    with pytest.raises(UsageError) as refused:
        BackendRequest(verify=Role.LINEAR)
    assert refused.value.settings == ("speculative_attention_mode",)


def test_a_draft_has_one_backend_that_knows_its_role(monkeypatch: Any) -> None:
    roles: list[frozenset[Role]] = []

    def factory(context: BackendContext) -> Recorder:
        roles.append(context.roles)
        return Recorder(context.name, context.declared.claims)

    monkeypatch.setitem(sys.modules, "recorders", SimpleNamespace(build=factory))
    kinds = frozenset({AttentionKind.MHA})
    can = replace(claiming().capabilities, kinds=kinds, roles=frozenset({Role.DRAFT}), max_speculative_tokens=4)
    drafts = backend("drafts", factory="recorders:build", capabilities=can)
    problem = replace(PROBLEM, speculative_tokens=4, is_draft=True)
    selection = select(Registry({"drafts": drafts}), BackendRequest(), problem)
    assert build_selection(selection, CONTEXT).backend_id.name == "drafts"
    assert roles == [frozenset({Role.DRAFT})]


def test_a_backend_knows_the_requested_levels_and_may_not_claim_less(monkeypatch: Any) -> None:
    """E3: kernels choose their schedules by the levels."""
    requested: list[frozenset[str]] = []
    claims = Claims(invariant={"run", "batch"})

    def factory(context: BackendContext) -> Recorder:
        requested.append(context.invariant)
        return Recorder(context.name, claims)

    monkeypatch.setitem(sys.modules, "recorders", SimpleNamespace(build=factory))
    can = replace(claiming().capabilities, invariant={"run", "batch", "chunks"}, needs_cpu_seq_lens=True)
    only = Registry({"a": backend("a", factory="recorders:build", capabilities=can)})
    problem = replace(PROBLEM, invariant=frozenset({"batch"}))
    build_selection(select(only, BackendRequest(), problem), CONTEXT)
    assert requested == [{"batch"}]
    with raises_naming(BuildError, "chunks"):
        build_selection(select(only, BackendRequest(), replace(problem, invariant={"batch", "chunks"})), CONTEXT)


def test_no_ranking_dispatches_by_batch_if_levels_are_requested() -> None:
    """E3"""
    can = replace(claiming().capabilities, invariant={"run"})
    both = Registry({name: backend(name, capabilities=can) for name in "ab"})
    for levels, serving in ((frozenset(), 2), (frozenset({"run"}), 1)):
        selection = select(both, BackendRequest(), replace(PROBLEM, invariant=levels), ranking=Turns())
        assert len(selection.serving(Role.DECODE)) == serving


class Turns:
    """Ranking that lets all usable backends, or those in ``only``, share a role in turn."""

    def __init__(self, only: dict[Role, tuple[str, ...]] | None = None) -> None:
        self.only = only or {}

    def rank(self, usable: Sequence[Registered], role: Role, problem: Problem) -> Ranked:
        names = [each.spec.name for each in usable if each.spec.name in self.only.get(role, (each.spec.name,))]
        times = {name: {(1, 8 * place + 8, 1): 1.0, (1, 64, 1): 2.0} for place, name in enumerate(sorted(names))}
        return Ranked(tuple(usable), "by turns", BackendSchedule(times) if len(times) > 1 else None)

    def failures(self, usable: Sequence[Registered], role: Role, problem: Problem) -> dict[str, Refusal]:
        return {}


class TestShared:
    """Backends that share a role by batch."""

    @pytest.fixture
    def built(self, monkeypatch: Any) -> dict[str, list[BackendContext]]:
        """Contexts of the built backends by name. ``claims`` overrides the claims that a backend declares."""
        made: dict[str, list[BackendContext]] = {}

        def factory(context: BackendContext) -> Recorder:
            made.setdefault(context.name, []).append(context)
            return Recorder(context.name, self.claims.get(context.name, context.declared.claims))

        self.claims: dict[str, Claims] = {}
        monkeypatch.setitem(sys.modules, "recorders", SimpleNamespace(build=factory))
        return made

    def choose(self, problem: Problem, *names: str, ranking: Turns | None = None, **can: Any) -> Selection:
        able = replace(claiming().capabilities, max_speculative_tokens=8, **can)
        installed = {name: backend(name, factory="recorders:build", capabilities=able) for name in names}
        return select(Registry(installed), BackendRequest(), problem, ranking=ranking or Turns())

    def test_each_is_built_once_with_all_its_roles(self, built: dict[str, list[BackendContext]]) -> None:
        only = {Role.PREFILL: ("a", "b"), Role.DECODE: ("b", "c")}
        whole = build_selection(self.choose(PROBLEM, "a", "b", "c", ranking=Turns(only)), CONTEXT)
        assert isinstance(whole, FastestBackend) and list(whole.children) == ["a", "b", "c"]
        prefill, decode = frozenset({Role.PREFILL}), frozenset({Role.DECODE})
        assert {name: [context.roles for context in contexts] for name, contexts in built.items()} == {
            "a": [prefill],
            "b": [prefill | decode],
            "c": [decode],
        }

    def test_a_role_with_one_backend_stays_with_it(self, built: dict[str, list[BackendContext]]) -> None:
        whole = build_selection(self.choose(PROBLEM, "a", "b", "c", ranking=Turns({Role.PREFILL: ("c",)})), CONTEXT)
        table = torch.zeros(1, 1, dtype=torch.int32)
        for length in (1, 8, 64):
            extend = ForwardBatch(Geometry.of_lengths(ForwardMode.EXTEND, table, [1], [length], 64))
            assert whole.init_forward_metadata(extend).planner_names() == ["a"], "the first of all that are usable"

    @pytest.mark.parametrize(
        ("changes", "prefill", "who"),
        [
            ({}, "auto", "b"),
            ({}, "a", None),
            ({"wants_prefill_graphs": False}, "auto", None),
            ({"device": "cpu"}, "auto", None),
            ({"mla_extend": ExtendPath.CHUNKED}, "auto", None),
        ],
    )
    def test_extends_in_graphs_are_left_to_the_one_that_can_unless_another_was_asked_for(
        self, built: dict[str, list[BackendContext]], changes: dict[str, Any], prefill: str, who: str | None
    ) -> None:
        """This also holds without a schedule, where ``a`` prefills and ``b`` decodes."""
        problem = replace(Problem(model(MLA), "cuda", wants_graphs=True, wants_prefill_graphs=True), **changes)
        able = replace(claiming().capabilities, max_speculative_tokens=8, mla_extend=frozenset(ExtendPath))
        levels = {"a": GraphLevel.UNIFORM, "b": GraphLevel.ALWAYS}
        installed = {
            name: backend(name, factory="recorders:build", capabilities=replace(able, cuda_graph=level), preference=by)
            for (name, level), by in zip(levels.items(), (100, 50), strict=True)
        }
        roles = {Role.DECODE: "b"} | ({} if prefill == "auto" else {Role.PREFILL: prefill})
        whole = build_selection(select(Registry(installed), BackendRequest(roles=roles), problem), CONTEXT)
        assert isinstance(whole, ForwardingBackend) and "a" in [
            each.backend_id.name for each in whole.children.values()
        ]
        assert whole.captured_extends == who and isinstance(whole, FastestBackend) is (who is not None)
        assert whole.claims.cuda_graph is GraphLevel.UNIFORM, "A9: the weakest claim"

    @pytest.mark.parametrize(("level", "who"), [(GraphLevel.ALWAYS, "b"), (GraphLevel.UNIFORM, None)])
    def test_extends_of_a_hybrid_are_captured_if_linear_layers_are(
        self, built: dict[str, list[BackendContext]], level: GraphLevel, who: str | None
    ) -> None:
        problem = Problem(model(MLA, GDN), "cuda", wants_graphs=True, wants_prefill_graphs=True)
        full = claiming(kinds=frozenset({AttentionKind.MLA}), roles=frozenset({Role.PREFILL, Role.DECODE}))
        able = replace(full.capabilities, mla_extend=frozenset(ExtendPath))
        linear = claiming(kinds=frozenset({AttentionKind.GDN}), roles=frozenset({Role.LINEAR})).capabilities
        claims = {
            "a": (replace(able, cuda_graph=GraphLevel.UNIFORM), 100),
            "b": (replace(able, cuda_graph=GraphLevel.ALWAYS), 50),
            "c": (replace(linear, cuda_graph=level), 50),
        }
        installed = {
            name: backend(name, factory="recorders:build", capabilities=own, preference=by)
            for name, (own, by) in claims.items()
        }
        request = BackendRequest(roles={Role.DECODE: "b"})
        context = replace(CONTEXT, model=problem.model)
        whole = build_selection(select(Registry(installed), request, problem), context)
        assert isinstance(whole, HybridLinearBackend) and whole.children["full"].captured_extends == who

    def test_one_that_cannot_be_built_is_left_out_and_the_choice_made_again(
        self, built: dict[str, list[BackendContext]], tmp_path: Path, monkeypatch: Any
    ) -> None:
        """D2: this includes a backend that is not the best overall."""
        (tmp_path / "half_of_b.py").write_text("raise OSError('no kernel image')")
        monkeypatch.syspath_prepend(tmp_path)
        bad = backend("b", factory="half_of_b:build")
        installed = Registry({"a": backend("a", factory="recorders:build"), "b": bad})
        with pytest.warns(PluginWarning, match=r"b \(b-dist 1\.2\).*no kernel image"):
            selection, whole = build_chosen(
                installed, BackendRequest(), PROBLEM, lambda chosen: build_selection(chosen, CONTEXT), ranking=Turns()
            )
        assert whole.backend_id.name == "a" and selection.choices[Role.DECODE].schedule is None
        with pytest.warns(PluginWarning, match="no kernel image"):
            assert set(choose_importable(installed, BackendRequest(), PROBLEM, Turns()).failed) == {"b"}

    @pytest.mark.parametrize(
        ("problem", "weaker", "fragment"),
        [
            (replace(PROBLEM, device="cuda", wants_graphs=True), {"cuda_graph": GraphLevel.NEVER}, "level NEVER"),
            (replace(PROBLEM, speculative_tokens=4), {"needs_cpu_seq_lens": True}, "every round would wait"),
            (
                Problem(model(MLA), "cpu"),
                {"mla_extend": frozenset({ExtendPath.ABSORBED})},
                "cannot extend MLA by chunked or one_shot, so it does not share prefill with a",
            ),
        ],
        ids=["graphs", "lengths", "paths of an extend"],
    )
    def test_one_that_would_take_something_from_the_chosen_one_is_left_out_with_the_reason(
        self, built: dict[str, list[BackendContext]], problem: Problem, weaker: dict[str, Any], fragment: str
    ) -> None:
        can = Claims(cuda_graph=GraphLevel.UNIFORM, needs_cpu_seq_lens=False, mla_extend=frozenset(ExtendPath))
        declared = {name: getattr(can, name) for name in ("cuda_graph", "needs_cpu_seq_lens", "mla_extend")}
        chosen = self.choose(problem, "a", "b", "c", **declared)
        self.claims = {"a": can, "b": replace(can, **weaker), "c": can}
        whole = build_selection(chosen, CONTEXT)
        assert isinstance(whole, FastestBackend) and list(whole.left_out) == ["b"] and fragment in whole.left_out["b"]
        assert ("b" in whole.children) is ("needs_cpu_seq_lens" not in weaker), "it may have its other role"
        self.claims = {"a": replace(can, **weaker), "b": can, "c": can}
        assert build_selection(chosen, CONTEXT).left_out == {}, "the chosen one has nothing to lose"
