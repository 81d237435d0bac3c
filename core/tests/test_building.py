"""Building of one backend: the result matches its declaration (A8, A9) and gets its own context (A10)."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from attnplug import (
    AttentionKind,
    BackendContext,
    BackendError,
    Capabilities,
    Claims,
    DType,
    ExtendPath,
    GraphLevel,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    PageSizes,
    Problem,
    Role,
)
from attnplug.contract.backend import MAY_IGNORE, hook_signatures
from attnplug.declare.errors import PluginError
from attnplug.declare.spec import Registered, Source
from attnplug.host import BackendRequest, KVPools, Limits, Registry, WorkspaceOwner, build_selection, select
from attnplug.registry.assembly import build_backend
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.specs import EVERYTHING, GDN, MLA, spec
from support.recorder import MEMBERS, Recorder

EVERY_PATH = replace(EVERYTHING, mla_extend=frozenset(ExtendPath))
SOURCE = Source("made_up", "made_up", "acme-attention", "1.2.3")
FULL = LayerSpec(0, AttentionKind.MHA, 8, 2, 64, 64, 0.125)
SINKS = ModelSpec("m", "test", (replace(FULL, sinks=True),), 4096)


@dataclass(frozen=True)
class Options:
    pieces: int = 1


@pytest.fixture
def registered(monkeypatch) -> Any:
    """Registers a factory under a name."""
    module = ModuleType("made_up")
    monkeypatch.setitem(sys.modules, "made_up", module)

    def register(factory: Any, name: str = "fast", capabilities: Capabilities = EVERY_PATH) -> Registered:
        setattr(module, name, factory)
        return Registered(spec(capabilities, name=name, factory=f"made_up:{name}", options=Options), SOURCE)

    return register


def context(**changes: Any) -> BackendContext:
    fields: dict[str, Any] = {
        "name": "fast",
        "roles": frozenset({Role.PREFILL, Role.DECODE}),
        "model": ModelSpec("m", "test", (MLA,), 4096),
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "kv_dtype": DType.FLOAT32,
        "page_size": 64,
        "limits": Limits(4, 64, 4096),
        "pools": KVPools(),
        "workspace": WorkspaceOwner(),
        "declared": Capabilities(frozenset(), frozenset(), frozenset()),
        "options": None,
    }
    return BackendContext(**{**fields, **changes})


def backend(claims: Claims | None = None, **members: Any) -> Any:
    """Factory of a backend with every hook. ``members`` replace some of its members; ``None`` removes one."""
    return lambda context: type("Made", (Recorder,), members)("fast", claims or Claims(cuda_graph=GraphLevel.ALWAYS))


def refused(built: Registered, page_size: int = 64) -> str:
    with pytest.raises(BackendError) as error:
        build_backend(built, context(page_size=page_size))
    text = str(error.value)
    assert text.startswith("backend fast (acme-attention 1.2.3): ")
    return text


class TestHooks:
    def test_what_a_hook_may_ignore_is_a_parameter_of_it(self):
        """A8: every argument that ``MAY_IGNORE`` lists for a hook is a parameter of that hook in the protocol."""
        assert all(names < set(hook_signatures()[hook].parameters) for hook, names in MAY_IGNORE.items())

    @pytest.mark.parametrize(
        ("hook", "parameter"),
        [(hook, parameter) for hook, signature in hook_signatures().items() for parameter in signature.parameters],
    )
    def test_a_hook_without_a_parameter_is_refused_unless_it_may_ignore_it(self, registered, hook, parameter):
        """A8: nothing that a caller needs honoured is dropped by a signature."""
        wanted = hook_signatures()[hook].parameters
        source = ", ".join(["self", *(name for name in wanted if name != parameter)])
        built = registered(backend(**{hook: eval(f"lambda {source}: None")}))
        if parameter in MAY_IGNORE.get(hook, ()):
            build_backend(built, context())
        else:
            assert f"{hook}(" in (text := refused(built)) and f"'{parameter}'" in text

    def test_a_method_that_does_not_take_what_is_given_by_name_is_refused(self, registered):
        """A8: it is refused when it is built, not at the first layer that runs."""
        text = refused(registered(backend(forward_decode=lambda self, q, k, v, layer, batch: q)))
        assert "its forward_decode(q, k, v, layer, batch) cannot be called as forward_decode(" in text

    def test_a_linear_backend_plans_too(self, registered):
        """A8: its role needs a planning method, but no forward_extend."""
        linear = context(roles=frozenset({Role.LINEAR}))
        build_backend(registered(backend(forward_extend=None, forward_decode=None)), linear)
        with raises_naming(BackendError, "init_forward_metadata"):
            build_backend(registered(backend(init_forward_metadata=None)), linear)

    def test_a_factory_may_be_an_attribute_of_a_class(self, registered):
        class Family:
            build = staticmethod(backend())

        made = registered(Family)
        made = replace(made, spec=replace(made.spec, factory="made_up:fast.build"))
        assert isinstance(build_backend(made, context()), Recorder)

    def test_a_factory_that_cannot_be_called_is_refused_with_what_it_is(self, registered):
        assert "made_up:fast is 7, which is not callable" in refused(registered(7))

    def test_an_interrupt_is_no_fault_of_the_backend(self, registered):
        def interrupted(context: BackendContext) -> Any:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            build_backend(registered(interrupted), context())

    def test_a_factory_that_ends_the_process_is_refused(self, registered):
        """D2: kernel libraries are imported here, not while the plugin is loaded."""
        assert "made_up:fast cannot be built: SystemExit: os._exit(4)" in refused(registered(lambda _: os._exit(4)))

    @pytest.mark.parametrize("hook", hook_signatures())
    def test_a_hook_with_an_unknown_required_parameter_is_refused_by_name(self, registered, hook):
        """A8"""
        source = ", ".join(["self", *hook_signatures()[hook].parameters, "cursor"])
        text = refused(registered(backend(**{hook: eval(f"lambda {source}: None")})))
        assert f"{hook}(" in text and "'cursor'" in text

    @pytest.mark.parametrize("member", ["claims", "forward_extend", "forward_ragged"])
    def test_a_property_that_fails_is_attributed_to_the_backend(self, registered, member):
        """D2: an exception from a backend's property is reported as a build error of that backend."""

        def fail(self: Any) -> Any:
            raise SystemExit("not yet")

        class Lazy(Recorder):
            pass

        made = Lazy("fast")
        setattr(Lazy, member, property(fail))
        assert "made_up:fast cannot be built: SystemExit: not yet" in refused(registered(lambda context: made))

    def test_a_backend_of_another_name_is_refused(self, registered):
        """D2: errors would name another backend."""
        assert "its backend_id is named 'torch_native'" in refused(registered(lambda context: Recorder("torch_native")))

    def test_every_problem_is_named_at_once(self, registered):
        """D2"""

        def factory(context: BackendContext) -> Any:
            made = backend(forward_decode=None, forward_ragged=lambda self, q, k, v, layer, call, plan: q)(context)
            made.backend_id, made.claims = "fast", {"cuda_graph": 3}
            return made

        text = refused(registered(factory))
        for said in (
            "its backend_id is 'fast', not a BackendId",
            "its claims is {'cuda_graph': 3}, not a Claims",
            "it has no method forward_decode(q: Tensor, k: Tensor | None, ",
            "does not accept 'lse'",
        ):
            assert said in text


class TestClaims:
    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"mla_extend": ["absorbed", "choped"]}, ["'choped'", "absorbed, one_shot, chunked"]),
            ({"mla_extend": "absorbed"}, ["mla_extend='absorbed'"]),
            ({"cuda_graph": "ALWAYS"}, ["cuda_graph='ALWAYS'", "GraphLevel"]),
            ({"cuda_graph": 3}, ["cuda_graph=3", "GraphLevel"]),
            ({"needs_cpu_seq_lens": None}, ["needs_cpu_seq_lens=None", "True or False"]),
            ({"page_sizes": {64}}, ["page_sizes={64}", "PageSizes()"]),
            ({"page_sizes": PageSizes.of("64")}, ["page_sizes='64'"]),
            ({"page_sizes": PageSizes.of(0)}, ["page_sizes", 1]),
        ],
    )
    def test_invalid_claims_are_refused_by_name_and_value(self, registered, wrong, named):
        """A9: the error names the backend if it makes its claims in the constructor."""
        with raises_naming(PluginError, *named):
            Claims(**wrong)
        with raises_naming(BackendError, "fast", *named):
            build_backend(registered(lambda context: backend(Claims(**wrong))(context)), context())

    def test_a_list_is_read_as_a_set(self):
        """Values are normalized like those of Capabilities, so that wrappers can combine claims."""
        assert Claims(mla_extend=["chunked", ExtendPath.ABSORBED]).mla_extend == {
            ExtendPath.CHUNKED,
            ExtendPath.ABSORBED,
        }

    @pytest.mark.parametrize(
        ("declared", "claims", "said"),
        [
            ({"cuda_graph": GraphLevel.DECODE}, {"cuda_graph": GraphLevel.ALWAYS},
             "cuda_graph ALWAYS, but its spec declares DECODE"),
            ({"mla_extend": ["absorbed"]}, {"mla_extend": ["absorbed", "chunked"]},
             "mla_extend absorbed, chunked, but its spec declares absorbed"),
            ({"extras": ["lse"]}, {"extras": ["lse", "sinks"]}, "extras lse, sinks, but its spec declares lse"),
            ({}, {"needs_cpu_seq_lens": False}, "needs_cpu_seq_lens False, but its spec declares True"),
            ({"page_sizes": PageSizes.of(64)}, {}, "page_sizes any, but its spec declares a multiple of 64"),
            ({"page_sizes": PageSizes.of(64)}, {"page_sizes": PageSizes.of(32, 64)}, "page_sizes a multiple of 32"),
            ({}, {"page_sizes": PageSizes.of(128)}, "it was built for page size 64, but claims only a multiple of 128"),
        ],
        ids=["graphs", "paths", "extras", "lengths", "any page", "pages", "page in use"],
    )  # fmt: skip
    def test_claims_wider_than_the_spec_are_refused(self, registered, declared, claims, said):
        """A9, D3: selection uses the spec."""
        capabilities = replace(EVERYTHING, **declared)
        assert said in refused(registered(backend(Claims(**claims)), capabilities=capabilities))

    @pytest.mark.parametrize(
        "claims",
        [
            {"cuda_graph": GraphLevel.NEVER},
            {"mla_extend": []},
            {"page_sizes": PageSizes.of(64)},
            {"page_sizes": PageSizes.of(128, 64)},
        ],
    )
    def test_claims_narrower_than_the_spec_are_fine(self, registered, claims):
        """A backend may learn, when it is built, that it can do less."""
        capabilities = replace(EVERY_PATH, page_sizes=PageSizes.of(32, 64), needs_cpu_seq_lens=False)
        narrow = {"page_sizes": PageSizes.of(64), "cuda_graph": GraphLevel.ALWAYS, **claims}
        built = build_backend(registered(backend(Claims(**narrow)), capabilities=capabilities), context())
        assert built.claims == Claims(**narrow)

    @pytest.mark.parametrize(
        ("claims", "hook"),
        [
            *(({"cuda_graph": GraphLevel.DECODE}, hook) for hook in MEMBERS if "graph" in hook),
            ({"mla_extend": ["one_shot"]}, "forward_ragged"),
        ],
    )
    def test_a_claim_without_its_hooks_is_refused(self, registered, claims, hook):
        """A9: a graph level above never takes all the graph hooks, an extend as MHA forward_ragged."""
        text = refused(registered(backend(Claims(**claims), **{hook: None})))
        assert f"it claims {next(iter(claims))} " in text and f"but has no {hook}(" in text
        build_backend(registered(backend(Claims(cuda_graph=GraphLevel.NEVER), **{hook: None})), context())

    def test_mla_extend_is_ignored_for_a_backend_without_mla(self, registered):
        mha = replace(EVERYTHING, kinds={"mha"}, roles={"prefill", "decode"}, mla_extend=["absorbed"])
        claims = Claims(mla_extend=frozenset(ExtendPath))
        assert build_backend(registered(backend(claims), capabilities=mha), context()).claims is claims

    @pytest.mark.parametrize(
        ("claims", "asked", "named"),
        [
            ({}, {"cuda_graph": GraphLevel.UNIFORM}, ["UNIFORM", "NEVER"]),
            ({}, {"exact_lengths": False}, ["upper bounds"]),
            ({}, {"speculative_topk": 2}, ["2 branches", "trees"]),
            ({"extras": ["lse"]}, {"model": SINKS}, ["sinks"]),
            ({"mla_extend": []}, {"model": ModelSpec("m", "test", (MLA,), 4096)}, ["mla_extend"]),
        ],
        ids=["graphs", "lengths", "trees", "extras", "paths"],
    )
    def test_claims_that_fall_short_of_the_problem_are_an_error_with_both(self, registered, claims, asked, named):
        """A9, D3: a built backend may claim less than its spec, unless the problem needs the missing claim."""
        capabilities = replace(EVERY_PATH, needs_cpu_seq_lens=False, extras={"lse", "sinks"})
        built = registered(backend(Claims(**claims)), capabilities=capabilities)
        build_backend(built, context(), Problem())
        with raises_naming(BackendError, "fast", *named):
            build_backend(built, context(), Problem(**asked))

    @pytest.mark.parametrize(
        ("claims", "layers", "role"),
        [
            ({"extras": []}, (*SINKS.layers, replace(GDN, layer_id=1)), Role.LINEAR),
            ({"mla_extend": []}, (MLA,), Role.DECODE),
            ({"mla_extend": []}, (FULL,), Role.PREFILL),
        ],
        ids=["sinks of other layers", "decode of MLA", "prefill without MLA"],
    )
    def test_what_its_own_role_does_not_need_may_be_left_out(self, registered, claims, layers, role):
        """D3: a backend needs only the members of the role that it was selected for."""
        built = registered(backend(Claims(**claims)), capabilities=replace(EVERY_PATH, extras={"lse", "sinks"}))
        problem = Problem(ModelSpec("m", "test", layers, 4096))
        assert build_backend(built, context(roles=frozenset({role})), problem).claims == Claims(**claims)


def test_a_cache_of_another_layout_than_the_spec_declares_is_refused(registered):
    """D3: the layout is checked when the backend is built, because a host may omit it at selection."""
    shape = (3, 2, 64, MLA.mla.row_dim)
    pool = MLAPool.over([MLA], {0: torch.zeros(shape)[:, 0]}, "pages tokens dim", page_size=64, dtype=DType.FLOAT32)
    own = context(pools=KVPools(mla=pool))
    build_backend(registered(backend(), capabilities=replace(EVERY_PATH, layouts={"strided"})), own)
    with raises_naming(BackendError, "fast", "layer 0", "strided", "token_major"):
        build_backend(registered(backend(), capabilities=replace(EVERY_PATH, layouts={"token_major"})), own)


@pytest.mark.parametrize(("heads", "page_size"), [(1, 64), (2, 1)])
def test_head_major_memory_has_either_order_with_one_head_or_pages_of_one_token(registered, heads, page_size):
    """D3: one KV head is left of each rank of many."""
    pool = MHAPool(
        [replace(FULL, num_kv_heads=heads)],
        num_pages=3,
        page_size=page_size,
        dtype=DType.FLOAT32,
        device="cpu",
        layout="head_major",
    )
    own = context(pools=KVPools(mha=pool), page_size=page_size)
    build_backend(registered(backend(), capabilities=replace(EVERY_PATH, layouts={"head_major"})), own)


ROLES = {Role.PREFILL: "first", Role.DECODE: "second", Role.LINEAR: "third"}


class TestContext:
    """Contexts that the backends of a selection are built from."""

    def build(self, registered: Any, request: BackendRequest, *layers: LayerSpec, coordinator: object = None) -> Any:
        seen: dict[str, BackendContext] = {}

        def factory(context: BackendContext) -> Recorder:
            seen[context.name] = context
            return Recorder(context.name, Claims(cuda_graph=GraphLevel.ALWAYS))

        backends = {name: registered(factory, name) for name in ("first", "second", "third")}
        model = ModelSpec("m", "test", tuple(replace(layer, layer_id=i) for i, layer in enumerate(layers)), 4096)
        problem = Problem(model, "cpu", None, DType.FLOAT32, DType.FLOAT32, 64)
        whole = context(name="", roles=frozenset(), model=model, coordinator=coordinator)
        return build_selection(select(Registry(backends), request, problem), whole), seen

    def test_the_coordinator_reaches_every_backend(self, registered):
        """A10: each captures it in its constructor."""
        coordinator = object()
        request = BackendRequest(roles=ROLES)
        hybrid, seen = self.build(registered, request, GDN, FULL, coordinator=coordinator)
        assert isinstance(hybrid, HybridLinearBackend) and isinstance(hybrid.children["full"], SplitBackend)
        assert {name: found.coordinator for name, found in seen.items()} == dict.fromkeys(ROLES.values(), coordinator)

    def test_each_backend_gets_only_its_own_roles(self, registered):
        """D3: a backend that only decodes does not have to support the prefill path."""
        _, seen = self.build(registered, BackendRequest(roles=ROLES), GDN, FULL)
        assert {name: set(found.roles) for name, found in seen.items()} == {n: {r} for r, n in ROLES.items()}

    def test_each_backend_takes_the_batches_of_its_own_role(self, registered):
        """D3, A9: and not those of the other."""
        hybrid, _ = self.build(registered, BackendRequest(roles=ROLES), GDN, FULL)
        assert {role: child.backend_id.name for role, child in hybrid.children["full"].children.items()} == {
            Role.PREFILL: "first",
            Role.DECODE: "second",
        }
        assert hybrid.children["linear"].backend_id.name == "third"

    def test_each_backend_is_given_its_own_options(self, registered):
        """D3: as a user set them, with defaults for the rest."""
        settings = {"second": {"pieces": "2"}, "third": {"pieces": "3"}}
        _, seen = self.build(registered, BackendRequest(roles=ROLES, options=settings), GDN, FULL)
        assert [seen[name].options for name in ROLES.values()] == [Options(1), Options(2), Options(3)]

    def test_what_is_built_is_held_to_the_problem_that_it_was_selected_for(self, registered):
        """A9, D3"""
        capabilities = replace(EVERYTHING, cuda_graph=GraphLevel.ALWAYS)
        modest = registered(lambda context: Recorder(context.name, Claims()), "modest", capabilities)
        problem = Problem(ModelSpec("m", "test", (FULL,), 4096), page_size=64, cuda_graph=GraphLevel.DECODE)
        selection = select(Registry({"modest": modest}), BackendRequest("modest"), problem)
        with raises_naming(BackendError, "DECODE", "NEVER"):
            build_selection(selection, context(name="", roles=frozenset(), model=problem.model))

    def test_one_backend_of_both_roles_is_built_once(self, registered):
        """D3"""
        built, seen = self.build(registered, BackendRequest("second"), FULL)
        assert isinstance(built, Recorder)
        assert {name: set(found.roles) for name, found in seen.items()} == {"second": {Role.PREFILL, Role.DECODE}}
