"""Which wrappers exist, and what the chunk hook does, under every combination of the switches (A1, A3)."""

from __future__ import annotations

from itertools import product

import pytest

from attnplug import BackendContext, DType, ExtendPath, ForwardMode, Geometry, PlanError, PoolError, Serving
from attnplug.host import ExtendPolicy, MLAAttention, plan_extend
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from reference_kernels import ReferenceKernels, on_cpu
from support.mla_scene import MLACase, MLAModel, MLAScene, relative_error

MATRIX = [
    (Serving(skip, mode, no_chunks), no_ragged)
    for skip, mode, no_chunks, no_ragged in product(
        (False, True), ("null", "prefill", "decode"), (False, True), (False, True)
    )
]
every_combination = pytest.mark.parametrize(("serving", "disable_ragged"), MATRIX)


def enabled(serving: Serving, disable_ragged: bool) -> bool:
    """A3, word by word."""
    return (
        not serving.skip_prefill
        and serving.disaggregation_mode != "decode"
        and not serving.disable_chunked_prefix_cache
        and not disable_ragged
    )


def scene(serving: Serving, disable_ragged: bool, lengths=((30, 5), (0, 4)), mode=ForwardMode.EXTEND) -> MLAScene:
    made: list[ReferenceKernels] = []

    def build(context: BackendContext) -> FlashInferMLABackend:
        made.append(ReferenceKernels.of(context))
        return FlashInferMLABackend(context, kernels=made[0])

    options = FlashInferMLAOptions(disable_ragged=disable_ragged)
    stage = MLAScene(on_cpu(MLACase(lengths, mode, page_size=16, serving=serving, options=options)), "cpu", build)
    stage.made = made[0].made
    return stage


@every_combination
def test_planning_constructor_makes_every_wrapper_that_its_role_needs(serving, disable_ragged):
    """A1: decode and ragged always, paged prefill and verify unless skip_prefill, the chunk runner exactly under A3."""
    stage = scene(serving, disable_ragged)
    wanted = ["decode", "ragged"]
    if not serving.skip_prefill:
        wanted += ["paged", "paged"]
    if enabled(serving, disable_ragged):
        wanted += ["ragged"]
    assert sorted(stage.made) == sorted(wanted)
    assert (stage.backend.mha_chunk_kv_cache is not None) == enabled(serving, disable_ragged)


def test_planning_of_every_kind_of_batch_has_a_wrapper_of_its_own():
    """A1: a verify is planned on the verify wrapper, beside an extend and a decode whose plans are still in use."""
    stage = scene(Serving(), False, ((30, 1), (9, 1)), ForwardMode.DECODE)
    made, plans = list(stage.made), []
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DECODE):
        batch = scene(Serving(), False, ((30, 1), (9, 1)), mode).batch()
        plans.append(stage.backend.init_forward_metadata(batch))
    assert stage.made == made, "a wrapper was lent out already"


@every_combination
def test_planning_claims_only_the_extends_it_can_run(serving, disable_ragged):
    """A3, C1"""
    paths = scene(serving, disable_ragged).backend.claims.mla_extend
    assert ExtendPath.ABSORBED in paths
    assert (ExtendPath.CHUNKED in paths) == enabled(serving, disable_ragged)
    assert (ExtendPath.ONE_SHOT in paths) == (not serving.skip_prefill and not disable_ragged)


@every_combination
@pytest.mark.parametrize("path", ExtendPath)
@pytest.mark.parametrize("flag", [False, True])
def test_planning_hook_is_right_or_refuses_in_words(serving, disable_ragged, path, flag):
    """A3, A4's ground: whatever the switches and whoever prepared the batch, never an AttributeError."""
    stage = scene(serving, disable_ragged)
    batch = stage.batch()
    batch.mla_plan = plan_extend(Geometry.of(batch, 16), path, 8)
    if path is ExtendPath.ABSORBED:
        from attnplug.mla.plan import ABSORBED

        batch.mla_plan = ABSORBED
        assert stage.backend.init_mha_chunk_metadata(batch, flag) is None
    elif path is ExtendPath.CHUNKED and not enabled(serving, disable_ragged):
        with pytest.raises(PlanError, match=r"chunked KV off \(.+\).* 4 prefix chunks"):
            stage.backend.init_mha_chunk_metadata(batch, flag)
    else:
        plan = stage.backend.init_mha_chunk_metadata(batch, flag)
        calls = [call.index for call in batch.mla_plan.calls]
        if flag and path is ExtendPath.ONE_SHOT:
            assert plan is None  # its one call is somebody else's
        else:
            assert plan is not None and plan.query_rows == 9
            assert sorted(plan.metadata) == (calls[1:] if flag else calls)


@every_combination
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
def test_planning_of_what_was_not_built_is_refused_in_words(serving, disable_ragged, mode):
    """A1: a draft's worker decodes, and says so when asked for more."""
    stage = scene(serving, disable_ragged, ((30, 1), (9, 1)), mode)
    if serving.skip_prefill and mode is not ForwardMode.DECODE:
        with pytest.raises(PlanError, match=f"skip_prefill=True.*not {mode}"):
            stage.backend.init_forward_metadata(stage.batch())
    else:
        assert relative_error(stage.absorbed()[0], stage.wanted_absorbed()[0]) <= 1e-6


@every_combination
def test_planning_by_the_policy_alone_runs_in_every_combination(serving, disable_ragged):
    """C1: thresholds low enough that each path would be taken where the backend can."""
    stage = scene(serving, disable_ragged)
    model = MLAModel(stage)
    if serving.skip_prefill:
        with pytest.raises(PlanError, match="skip_prefill"):
            model.run(ExtendPolicy())
        return
    for policy in (ExtendPolicy(), ExtendPolicy(chunk_threshold=1), ExtendPolicy(chunk_threshold=1, chunk_capacity=8)):
        assert relative_error(model.run(policy), model.wanted()) <= 1e-6


def test_planning_hook_before_the_batch_is_prepared_says_what_to_call():
    stage = scene(Serving(), False)
    with pytest.raises(PlanError, match=r"MLAAttention\.prepare"):
        stage.backend.init_mha_chunk_metadata(stage.batch())


def test_planning_the_regression_8218_after_800():
    """A8's bug: the plan covers the rows of its own batch, however many an earlier one had."""
    stage = scene(Serving(), False, lengths=((800, 8218),))
    mla = MLAAttention(stage.backend, stage.pool, ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=512))
    first = scene(Serving(), False, lengths=((0, 800),)).batch()
    first.plan = stage.backend.init_forward_metadata(first)
    mla.prepare(first)
    batch = stage.batch()
    mla.prepare(batch)
    assert batch.chunk_plan.query_rows == 8218
    planned = batch.chunk_plan.metadata[0]
    assert planned.call.query_indptr[-1] == 8218 == planned.lease.kernel.call.query_rows


def test_planning_of_what_runs_as_mha_takes_no_paged_kernel():
    """C2: prepared first, such a batch is planned once, and not for the path it does not take."""
    stage = scene(Serving(), False)
    model = MLAModel(stage)
    batch = stage.batch()
    mla = MLAAttention(stage.backend, stage.pool, ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=8))
    mla.prepare(batch)
    batch.plan = stage.backend.init_forward_metadata(batch)
    assert batch.plan.metadata.calls == () and batch.plan.query_rows == 9
    out = mla.attend(model.q, stage.new_rows(), stage.layer, model.weights, batch)
    assert relative_error(out, model.wanted()) <= 1e-6
    with pytest.raises(PlanError, match="planned to run as MHA"):
        stage.absorbed(batch)


def test_planning_ragged_call_that_was_not_planned_is_refused():
    """B5"""
    stage = scene(Serving(), False)
    model = MLAModel(stage)
    model.run(ExtendPolicy(forced=ExtendPath.ONE_SHOT))
    call = model.batch.mla_plan.calls[0]
    model.batch.chunk_plan = None
    with pytest.raises(PlanError, match="call 0 of 9 query rows has no plan"):
        stage.backend.forward_ragged(model.q, model.q, model.q, stage.layer, model.batch, call)


def test_planning_backend_without_an_mla_pool_is_refused():
    from attnplug.host import KVPools

    def build(context: BackendContext) -> FlashInferMLABackend:
        from dataclasses import replace

        return FlashInferMLABackend(replace(context, pools=KVPools()), kernels=ReferenceKernels.of(context))

    with pytest.raises(PoolError, match="serves MLA layers, and needs a model and a pool"):
        MLAScene(MLACase(((5, 1),), ForwardMode.DECODE, dtype=DType.FLOAT32), "cpu", build)
