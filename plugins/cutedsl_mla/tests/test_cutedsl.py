"""The variant of trtllm_mla with FlashInfer's CuTe DSL kernel: decode only, with separate scratch memory (A5)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from attnplug import BackendContext, DType, ExtendPath, ForwardMode, PlanError, Problem, Role
from attnplug.host import ExtendPolicy
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_cutedsl_mla import build
from attnplug_cutedsl_mla.build import cutedsl_mla
from attnplug_cutedsl_mla.plugin import attnplug_backends
from attnplug_testing.batches import declaring
from attnplug_testing.configs import DEEPSEEK_V3, read
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, check_captured_lanes, mla
from attnplug_testing.references.blackwell import PROCESSORS, pretend
from attnplug_testing.references.cutedsl_mla import build_on, reference_cutedsl
from attnplug_testing.references.trtllm_mla import NEWEST, ReferenceFlashInfer, flashinfer_folder, reference_trtllm
from attnplug_testing.trtllm_checks import FP8, check_absorbed, check_decode, check_verify, lengths, scene
from attnplug_trtllm_mla.build import trtllm_mla

(SPEC,) = attnplug_backends()
ON_A_B200 = Problem(read(DEEPSEEK_V3), "cuda", 100, DType.BFLOAT16, DType.BFLOAT16, 64)
on_every_device = pytest.mark.parametrize("device", DEVICES)
of_both_types = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])
# torch warns once on a CPU without bfloat16 instructions.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


@on_every_device
@pytest.mark.parametrize(
    ("heads", "page_size", "kv_dtype"), [(5, 32, None), (16, 64, FP8), (96, 128, FP8), (128, 128, None)]
)
def test_decode(heads, page_size, kv_dtype, device):
    """A5, C4: natural logarithms need no conversion; any number of heads up to 128 needs no padding."""
    check_decode(build_on(device), device, kv_dtype, page_size, heads)


@on_every_device
@of_both_types
@pytest.mark.parametrize("new", [2, 8])
def test_verify_of_a_few_tokens(new, kv_dtype, device):
    check_verify(build_on(device), device, kv_dtype, new)


@on_every_device
def test_a_draft_that_catches_up_by_different_numbers_of_rows(device):
    case = mla(((100, 1), (0, 3), (63, 2), (5, 0)), ForwardMode.DRAFT_EXTEND, 32, padding=3)
    check_absorbed(case, device, build_on(device))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_captured_lanes_run_on_two_streams(device):
    """B5, A2: by scratch memory of their own."""
    case = mla(((300, 1), (5, 1), (64, 1), (127, 1)), ForwardMode.DECODE, lanes=2)
    check_captured_lanes(KernelScene(case, device, build_on(device)))


@pytest.mark.parametrize(
    ("heads", "queries", "most"), [(16, 1, 8192), (128, 7, 8192), (128, 8, 8191), (65, 4, 8192), (128, 64, 1023)]
)
def test_a_call_has_no_more_blocks_than_cuda_counts(heads, queries, most):
    """65535 in the second dimension: one for each 128 rows of a request, begun ones too."""
    stage = scene(mla(((5, 1),), ForwardMode.DECODE, heads=heads), "cpu", reference_cutedsl)
    assert stage.backend.lanes[0].decode.max_requests(queries, with_lse=True) == most


@of_both_types
def test_decode_kernels_are_compiled_when_it_is_built(kv_dtype):
    """E1: for every number of requests and of rows, in powers of two, and without a change of the cache."""
    flashinfer = ReferenceFlashInfer()
    stage = KernelScene(
        mla(((300, 1), (20, 1), (7, 1)), ForwardMode.DECODE, kv_dtype=kv_dtype),
        "cpu",
        partial(reference_cutedsl, flashinfer=flashinfer),
    )
    limits = stage.backend.context.limits
    calls = flashinfer.named("decode")
    shapes = {(call["query"].shape[0], call["max_seq_len"]) for call in calls}
    counts = {1 << power for power in range(limits.max_requests.bit_length())}
    lens = {1 << power for power in range(7, 20) if 1 << power < limits.max_context} | {limits.max_context}
    assert shapes == {(count, length) for count in counts for length in lens} and len(lens) > 1
    assert {call["query"].dtype for call in calls} == {call["kv_cache"].dtype for call in calls}
    before = stage.snapshot()
    stage.backend.warm_up()
    assert not any(stage.changes(before))


@pytest.mark.parametrize("version", [None, NEWEST])
def test_every_version_takes_the_calls(version):
    if flashinfer_folder(version) is None:
        pytest.skip(f"flashinfer {version} is not unpacked; make test does it")
    build_one = partial(reference_cutedsl, flashinfer=ReferenceFlashInfer(version))
    check_absorbed(mla(lengths(4, 100, 3, seed=1), ForwardMode.TARGET_VERIFY), "cpu", build_one)


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_prefill_is_refused_in_words(mode):
    """A5: decode only."""
    stage = scene(mla(((20, 3), (9, 1)), mode), "cpu", reference_cutedsl)
    with raises_naming(PlanError, mode) as caught:
        stage.backend.init_forward_metadata(stage.batch())
    assert caught.value.settings == ("prefill_attention_backend",)


def test_beside_a_backend_that_prefills_it_decodes():
    """A5, A9: split by roles, the prefill backend's abilities and hooks are the wrapper's."""

    def build(context: BackendContext) -> SplitBackend:
        return SplitBackend(reference_trtllm(context), reference_cutedsl(context))

    for path in ExtendPath:
        model = UpProjected(scene(mla(((40, 9), (0, 3)), heads=2), "cpu", build))
        out = model.run(ExtendPolicy(forced=path, chunk_capacity=32))
        assert relative_error(out, model.wanted()) <= 2e-2
    check_absorbed(mla(lengths(4, 100, 1, seed=2), ForwardMode.DECODE), "cpu", build)


def test_its_scratch_is_never_trtllms(monkeypatch):
    """A2, A5: its kernels overwrite it."""
    pretend(monkeypatch)
    monkeypatch.setattr(build, "load_library", lambda: ReferenceFlashInfer().library)  # it is called at once

    def both(context: BackendContext):
        trtllm_mla(replace(declaring(context, "trtllm_mla"), name="trtllm_mla"))
        return cutedsl_mla(replace(declaring(context, "cutedsl_mla"), name="cutedsl_mla"))

    stage = KernelScene(mla(((20, 1),), ForwardMode.DECODE, heads=128), "cpu", both)
    uses = {use.kind: use for use in stage.workspace.report()}
    assert set(uses) == {"scratch", "trtllm-semaphores", "cute-dsl-scratch"}
    assert uses["cute-dsl-scratch"].owners == {"cutedsl_mla": PROCESSORS * 64 * 513 * 4}
    assert "cutedsl_mla" not in uses["scratch"].owners


def test_here_only_the_dsl_is_missing():
    """D3: on a B200, for DeepSeek-V3."""
    for role in (Role.DECODE, Role.DRAFT):
        (reason,) = SPEC.refusals(ON_A_B200, role)
        assert (reason.code, reason.value) == ("requirement", None)
        assert "nvidia-cutlass-dsl" in str(reason.advice)


def test_it_is_not_chosen_to_prefill():
    """A5, D3"""
    (reason,) = (r for r in SPEC.refusals(ON_A_B200, Role.PREFILL) if r.code == "role")
    assert (reason.allowed, reason.setting) == (["decode", "draft"], "prefill_attention_backend")


def test_on_an_h200_it_says_which_gpus_it_needs():
    """D3"""
    reasons = SPEC.refusals(replace(ON_A_B200, sm=90), Role.DECODE)
    assert [reason.code for reason in reasons][1:] == ["sm"]
