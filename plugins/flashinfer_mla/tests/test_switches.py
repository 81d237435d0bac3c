"""Wrappers and the chunk hook under every combination of the switches (A1, A3)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from attnplug import BackendContext, ExtendPath, ForwardMode, PlanError, Serving
from attnplug.host import ExtendPolicy, ModelAttention
from attnplug.mla.attention import plan_extend
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_testing.batches import declaring
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, mla
from attnplug_testing.references.flashinfer_mla import ReferenceKernels, on_cpu

MATRIX = [
    (Serving(skip, mode, no_chunks), no_ragged)
    for skip, mode, no_chunks, no_ragged in product(
        (False, True), ("null", "prefill", "decode"), (False, True), (False, True)
    )
]
every_combination = pytest.mark.parametrize(("serving", "disable_ragged"), MATRIX)


def enabled(serving: Serving, disable_ragged: bool) -> bool:
    """True if chunked KV is on, by the text of A3."""
    return (
        not serving.skip_prefill
        and serving.disaggregation_mode != "decode"
        and not serving.disable_chunked_prefix_cache
        and not disable_ragged
    )


def scene(
    serving: Serving, disable_ragged: bool, lengths=((30, 5), (0, 4)), mode=ForwardMode.EXTEND, lanes=1
) -> KernelScene:
    kernels: list[ReferenceKernels] = []

    def build(context: BackendContext) -> FlashInferMLABackend:
        kernels.extend(ReferenceKernels.of(context))
        return FlashInferMLABackend(declaring(context, "flashinfer_mla"), kernels=kernels)

    options = FlashInferMLAOptions(disable_ragged=disable_ragged)
    case = mla(lengths, mode, page_size=16, serving=serving, options=options, lanes=lanes)
    stage = KernelScene(on_cpu(case), "cpu", build)
    stage.wrappers = [lane.made for lane in kernels]
    return stage


def attention(stage: KernelScene, **policy: object) -> ModelAttention:
    return ModelAttention(stage.backend, stage.pools, ExtendPolicy(**policy))


@every_combination
def test_planning_constructor_makes_every_wrapper_that_its_role_needs(serving, disable_ragged):
    """A1: decode and ragged always, paged prefill and verify unless skip_prefill, the chunk runner exactly under A3; in
    every lane."""
    stage = scene(serving, disable_ragged, lanes=2)
    wanted = ["decode", "ragged"]
    if not serving.skip_prefill:
        wanted += ["paged", "paged"]
    if enabled(serving, disable_ragged):
        wanted += ["ragged"]
    assert [sorted(made) for made in stage.wrappers] == [sorted(wanted)] * 2
    for lane in stage.backend.lanes:
        assert (lane.mha_chunk_kv_cache is not None) == enabled(serving, disable_ragged)


def test_planning_of_every_kind_of_batch_has_a_wrapper_of_its_own():
    """A1: a verify is planned on the verify wrapper while plans of an extend and a decode are still in use."""
    stage = scene(Serving(), False, ((30, 1), (9, 1)), ForwardMode.DECODE)
    made, plans = list(stage.wrappers[0]), []
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DECODE):
        batch = scene(Serving(), False, ((30, 1), (9, 1)), mode).batch()
        plans.append(stage.backend.init_forward_metadata(batch))
    assert stage.wrappers == [made], "a wrapper was lent out already"


@every_combination
def test_planning_claims_only_the_extends_it_can_run(serving, disable_ragged):
    """A3, C1"""
    paths = scene(serving, disable_ragged).backend.claims.mla_extend
    assert ExtendPath.ABSORBED in paths
    assert (ExtendPath.CHUNKED in paths) == enabled(serving, disable_ragged)
    assert (ExtendPath.ONE_SHOT in paths) == (not serving.skip_prefill and not disable_ragged)


@every_combination
@pytest.mark.parametrize("path", ExtendPath)
@pytest.mark.sample(31)
def test_planning_hook_is_right_or_refuses_in_words(serving, disable_ragged, path):
    """A3, A4: for all switches and for batches prepared for any path, it never raises an AttributeError."""
    stage = scene(serving, disable_ragged)
    for flag in (False, True):
        check_hook(stage, enabled(serving, disable_ragged), path, flag)


def check_hook(stage: KernelScene, chunks: bool, path: ExtendPath, flag: bool) -> None:
    batch = stage.batch()
    if path is not ExtendPath.ABSORBED:
        calls = tuple(part.call for part in plan_extend(batch.geometry, path, 8))
        batch.geometry = replace(batch.geometry, calls=calls)
    if path is ExtendPath.ABSORBED:
        assert stage.backend.init_mha_chunk_metadata(batch, flag) is None
    elif path is ExtendPath.CHUNKED and not chunks:
        with raises_naming(PlanError, 4):
            stage.backend.init_mha_chunk_metadata(batch, flag)
    else:
        plan = stage.backend.init_mha_chunk_metadata(batch, flag)
        calls = [call.index for call in batch.geometry.calls]
        if flag and path is ExtendPath.ONE_SHOT:
            assert plan is None  # another backend runs its one call
        else:
            assert plan is not None and plan.query_rows == 9
            assert sorted(plan.metadata) == (calls[1:] if flag else calls)


@every_combination
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND])
@pytest.mark.sample(31)
def test_planning_of_what_was_not_built_is_refused_in_words(serving, disable_ragged, mode):
    """A1: a draft's worker can only decode, and refuses other modes by name."""
    stage = scene(serving, disable_ragged, ((30, 1), (9, 1)), mode)
    if serving.skip_prefill and mode is not ForwardMode.DECODE:
        with raises_naming(PlanError, "skip_prefill", mode):
            stage.backend.init_forward_metadata(stage.batch())
    else:
        assert stage.error() <= stage.tolerance


@every_combination
@pytest.mark.sample(11)
def test_planning_by_the_policy_alone_runs_in_every_combination(serving, disable_ragged):
    """C1: thresholds are low enough for each path that the backend supports."""
    stage = scene(serving, disable_ragged)
    model = UpProjected(stage)
    if serving.skip_prefill:
        with raises_naming(PlanError, "skip_prefill"):
            model.run(ExtendPolicy())
        return
    for policy in (ExtendPolicy(), ExtendPolicy(chunk_threshold=1), ExtendPolicy(chunk_threshold=1, chunk_capacity=8)):
        assert relative_error(model.run(policy), model.wanted()) <= 4 * stage.tolerance


def test_planning_the_regression_8218_after_800():
    """The bug behind A8: a plan covers the rows of its own batch, regardless of earlier batches."""
    stage = scene(Serving(), False, lengths=((800, 8218),))
    chunked = attention(stage, forced=ExtendPath.CHUNKED, chunk_capacity=512)
    chunked.plan(scene(Serving(), False, lengths=((0, 800),)).batch())
    chunks = chunked.plan(stage.batch()).chunks
    assert chunks.query_rows == 8218
    planned = chunks.metadata[0]
    assert planned.call.query_indptr[-1] == 8218 == planned.handle.kernel.call.query_rows


def test_planning_of_what_runs_as_mha_takes_no_paged_kernel():
    """C2: such a batch is planned once, and not for the path it does not take."""
    stage = scene(Serving(), False)
    model = UpProjected(stage)
    out = model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=8))
    plan = model.batch.plan.attention
    assert plan.metadata is None and plan.new_slots is None and plan.query_rows == 9
    assert relative_error(out, model.wanted()) <= 4 * stage.tolerance
    with raises_naming(PlanError, ExtendPath.ABSORBED):
        stage.results(model.batch)


@pytest.mark.parametrize("path", ExtendPath)
def test_planning_lends_wrappers_of_the_batchs_lane(path):
    """B5: plans of two lanes are alive at once; a lane that was not built is refused."""
    stage = scene(Serving(), False, lanes=2)
    model, made, plans = UpProjected(stage), [list(lane) for lane in stage.wrappers], []
    for lane in (0, 1):
        batch = stage.batch()
        batch.geometry = replace(batch.geometry, lane=lane)
        assert relative_error(model.run(ExtendPolicy(forced=path), batch), model.wanted()) <= 4 * stage.tolerance
        plans.append(batch.plan)
    assert stage.wrappers == made, "a wrapper of another lane was lent out"
    beyond = stage.batch()
    beyond.geometry = replace(beyond.geometry, lane=2)
    with raises_naming(PlanError, "lane 2"):
        attention(stage, forced=path).plan(beyond)


def test_planning_of_a_capture_takes_a_wrapper_of_its_lane():
    stage = scene(Serving(), False, ((30, 1), (9, 1)), ForwardMode.DECODE, lanes=2)
    stage.backend.init_cuda_graph_state(2, 2)
    batch = stage.batch()
    batch.geometry = replace(batch.geometry, lane=1, captured=True, host=None)
    stage.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert [made.count("graph decode") for made in stage.wrappers] == [0, 1]
