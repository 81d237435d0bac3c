"""Chunk planning of every MLA plugin in every serving setup: required plans are made, all others are refused by name
(A4)."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import product

import pytest

from attnplug import BackendContext, ExtendPath, ForwardBatch, ForwardMode, Plan, PlanError, Serving
from attnplug.contract.backend import bind_optional_hook
from attnplug.host import ExtendPolicy, ModelAttention, load_registry
from attnplug.mla.attention import plan_extend
from attnplug.registry.assembly import backend_problems, claim_problems
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, mla
from mla_plugins import PLUGINS, Chunks, joined, serving_mla

HOOK = "init_mha_chunk_metadata"
CAPACITY = 16
LENGTHS = {True: ((30, 5), (0, 4)), False: ((0, 5), (0, 4))}
"""With a prefix and without."""
SERVING = [
    Serving(skip, mode, no_chunks)
    for skip, mode, no_chunks in product((False, True), ("null", "prefill", "decode"), (False, True))
]
_ALLOWED = {**dict.fromkeys(("torch_native", "flashinfer_mla", "triton_mla"), 1e-5), "tokenspeed_mla": 0.3}
"""Relative errors. tokenspeed_mla rounds to fp8, and backends that are not here to bfloat16."""
every_plugin = pytest.mark.parametrize("name", PLUGINS)


def serving_id(serving: object) -> str | None:
    if not isinstance(serving, Serving):
        return None
    draft, unchunked = "-draft" * serving.skip_prefill, "-unchunked" * serving.disable_chunked_prefix_cache
    return f"{serving.disaggregation_mode}{draft}{unchunked}"


every_serving = pytest.mark.parametrize("serving", SERVING, ids=serving_id)
# torch warns once on a CPU without bfloat16 instructions.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


class Stage:
    """A plugin's backend, alone and joined to a linear one, on a scene."""

    def __init__(self, name: str, serving: Serving, prefix: bool) -> None:
        plugin = PLUGINS[name]
        case = plugin.case(mla(LENGTHS[prefix], page_size=64, heads=2, serving=serving))
        self.hybrid: HybridLinearBackend

        def build(context: BackendContext):
            backend = plugin.build(context)
            self.hybrid = joined(context, backend)
            return backend

        self.scene = KernelScene(case, "cpu", build)
        self.backend = self.scene.backend

    def batch(self, path: ExtendPath, captured: bool) -> ForwardBatch:
        """A batch that is prepared for a path, whether or not this backend claims that path."""
        batch = self.scene.batch()
        parts = () if path is ExtendPath.ABSORBED else plan_extend(batch.geometry, path, CAPACITY)
        batch.geometry = replace(batch.geometry, captured=captured, calls=tuple(part.call for part in parts))
        return batch


def path_of(batch: ForwardBatch) -> ExtendPath:
    """Path of a planned batch with a prefix."""
    paths = {0: ExtendPath.ABSORBED, 1: ExtendPath.ONE_SHOT}
    return paths.get(len(batch.geometry.calls), ExtendPath.CHUNKED)


def answer(hook, batch: ForwardBatch, flag: bool) -> int | None:
    """Number of calls that a hook plans; ``None`` for a refusal. Any other exception is a failure."""
    if hook is None:
        return 0
    try:
        plan = hook(batch, flag)
    except PlanError as error:
        assert len(str(error)) > 40
        return None
    assert plan is None or (isinstance(plan, Plan) and plan.metadata)
    return 0 if plan is None else len(plan.metadata)


def test_every_plugin_that_serves_mla_is_here():
    """Fails if a new one is missing in this matrix."""
    assert serving_mla() == set(PLUGINS)


@every_plugin
def test_hooks_keep_their_own_arity(name):
    """A4, A6, A8: one parameter, two, or no hook at all; the wrapper offers both."""
    backend, wanted = Stage(name, Serving(), True).backend, PLUGINS[name].hook
    hook = getattr(backend, HOOK, None)
    assert (None if hook is None else tuple(inspect.signature(hook).parameters)) == wanted


@every_plugin
def test_every_backend_claims_what_its_spec_declares(name):
    """A9: under every way of serving, and with the hooks that its claims take."""
    declared = load_registry().get(name).spec.capabilities
    for serving in SERVING:
        backend = Stage(name, serving, True).backend
        assert [*backend_problems(backend), *claim_problems(backend, declared, 64)] == []


@every_plugin
@every_serving
@pytest.mark.sample(12)
def test_it_plans_when_and_only_when_it_must(name, serving):
    """A3, A4, A8: never an AttributeError or a TypeError; through the hybrid wrapper as without it."""
    for prefix in (True, False):
        stage = Stage(name, serving, prefix)
        alone = bind_optional_hook(stage.backend, HOOK)
        for path, captured, flag in product(ExtendPath, (False, True), (False, True)):
            batch = stage.batch(path, captured)
            chunks = max(len(batch.geometry.calls) - 1, 0)
            assert bool(chunks) == (prefix and path is ExtendPath.CHUNKED)
            wanted = PLUGINS[name].planned(Chunks(serving, path, chunks, captured, flag))
            assert answer(alone, batch, flag) == wanted, (prefix, path, captured, flag)
            assert answer(stage.hybrid.init_mha_chunk_metadata, batch, flag) == wanted


@pytest.mark.parametrize(
    ("name", "serving", "captured"),
    [
        (name, serving, captured)
        for name, plugin in PLUGINS.items()
        for number, serving in enumerate(SERVING)
        for captured in (False, True)
        # A backend that extends in latent space only, or not at all, has no path to choose.
        if number < 2 or (number in (4, 6) if not (plugin.as_mha and plugin.prefills) else not captured)
    ],
    ids=serving_id,
)
@pytest.mark.sample(12)
def test_what_the_policy_chooses_runs_right(name, serving, captured):
    """C1, C2, A4: with a prefix, by the abilities that the backend claims in this way of serving."""
    stage = Stage(name, serving, prefix=True)
    policy = ExtendPolicy(
        chunk_threshold=1,
        chunk_capacity=CAPACITY,
        disable_chunked_prefix_cache=serving.disable_chunked_prefix_cache,
    )
    model, batch = UpProjected(stage.scene), stage.scene.batch()
    batch.geometry = replace(batch.geometry, captured=captured)
    plugin = PLUGINS[name]
    if not plugin.prefills or (serving.skip_prefill and not plugin.prefills_always):
        with raises_naming(PlanError, "extend"):
            model.run(policy, batch)
        return
    assert relative_error(model.run(policy, batch), model.wanted()) <= _ALLOWED.get(name, 3e-2)
    chose = path_of(batch)
    assert chose in stage.backend.claims.mla_extend
    if serving.disable_chunked_prefix_cache:
        assert chose is (ExtendPath.ABSORBED if plugin.decodes else ExtendPath.ONE_SHOT)
    elif ExtendPath.CHUNKED in stage.backend.claims.mla_extend:
        assert chose is ExtendPath.CHUNKED


@pytest.mark.parametrize("name", [name for name, plugin in PLUGINS.items() if plugin.decodes and plugin.prefills])
def test_decodes_run_apart_from_chunks_in_every_layer(name):
    """C1: plans of both halves are in one lane and stay valid while layers alternate between them."""
    case = PLUGINS[name].case(mla(((30, 1), (4, 1), (20, 9), (0, 5)), ForwardMode.MIXED, page_size=64, heads=2))
    scene = KernelScene(case, "cpu", PLUGINS[name].build)
    policy = ExtendPolicy(chunk_threshold=1, chunk_capacity=CAPACITY, split_threshold=0, query_threshold=0)
    model, batch, attention = UpProjected(scene), scene.batch(), ModelAttention(scene.backend, scene.pools, policy)
    attention.plan(batch)
    as_mha = bool(scene.backend.claims.mla_extend - {ExtendPath.ABSORBED})
    assert [half.forward_mode for half in batch.plan.halves] == [ForwardMode.DECODE, ForwardMode.EXTEND] * as_mha
    wanted, rows = model.wanted(), scene.new_rows(scene.keys).squeeze(1)
    for _ in range(2):
        out = attention.attend_mla(model.q, rows, scene.layer, model.weights, batch)
        assert relative_error(out, wanted) <= _ALLOWED.get(name, 3e-2)


@pytest.mark.parametrize("name", [name for name, plugin in PLUGINS.items() if plugin.decodes])
def test_decode_needs_no_chunks(name):
    """A4: a draft's worker and a decode server only decode, and hooks are never asked."""
    for serving in (Serving(skip_prefill=True), Serving(disaggregation_mode="decode")):
        case = PLUGINS[name].case(mla(((30, 1), (4, 1)), ForwardMode.DECODE, heads=8, serving=serving))
        stage = KernelScene(case, "cpu", PLUGINS[name].build)
        assert stage.error() <= 0.1
