"""The variant of trtllm_mla with TokenSpeed's kernels: its claims, its parts and its results (A5)."""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from attnplug import BackendContext, BackendError, DType, ExtendPath, ForwardMode, Problem, RaggedCall, Role, Serving
from attnplug.host import ExtendPolicy
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_testing.batches import declaring
from attnplug_testing.configs import DEEPSEEK_V3, read
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, check_captured_lanes, check_replay, mla
from attnplug_testing.references.blackwell import PROCESSORS, pretend
from attnplug_testing.references.flashinfer_mla import attend
from attnplug_testing.references.tokenspeed_mla import (
    NEWEST,
    OLDEST,
    ReferenceTokenSpeed,
    build_on,
    reference_tokenspeed,
)
from attnplug_testing.trtllm_checks import FP8, check_absorbed, check_decode, check_verify, lengths, scene
from attnplug_tokenspeed_mla import build, kernels
from attnplug_tokenspeed_mla.plugin import attnplug_backends
from attnplug_trtllm_mla.kernels import to_float8

(SPEC,) = attnplug_backends()
ON_A_B200 = Problem(read(DEEPSEEK_V3), "cuda", 100, DType.BFLOAT16, FP8, 64)
on_every_device = pytest.mark.parametrize("device", DEVICES)
# torch warns once on a CPU without bfloat16 instructions.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


class TestResults:
    @on_every_device
    @pytest.mark.parametrize(("heads", "page_size"), [(5, 32), (16, 64), (128, 128)])
    def test_decode(self, heads, page_size, device):
        """A5, C4: its log-sum-exp is in base 2; any number of heads up to 128 needs no padding."""
        check_decode(build_on(device), device, FP8, page_size, heads)

    @on_every_device
    @pytest.mark.parametrize("new", [2, 8])
    def test_verify_of_a_few_tokens(self, new, device):
        check_verify(build_on(device), device, FP8, new)

    @on_every_device
    @pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.DRAFT_EXTEND])
    def test_requests_with_different_numbers_of_rows_run_row_by_row(self, mode, device):
        """FlashInfer's kernels cannot read its cache."""
        case = mla(((100, 1), (0, 37), (63, 2), (5, 0)), mode, 32, kv_dtype=FP8, padding=3)
        check_absorbed(case, device, build_on(device))

    @on_every_device
    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_prefill_as_mha(self, path, device):
        """C1, C2, C3, C4: in fp8, so as far from float64 as that is."""
        case = mla(((70, 20), (0, 9), (40, 1), (1, 3)), heads=2, kv_dtype=FP8, padding=3)
        model = UpProjected(scene(case, device, build_on(device)))
        out, wanted = model.run(ExtendPolicy(forced=path, chunk_capacity=48)), model.wanted()
        assert relative_error(out[: len(wanted)], wanted) <= 0.3
        assert (out[len(wanted) :] == 0).all()

    @on_every_device
    @pytest.mark.parametrize("causal", [True, False])
    def test_one_ragged_call_of_rows_that_fp8_holds(self, causal, device):
        """C4: then it is as exact as its output; natural logarithms as they come."""
        stage = scene(mla(((70, 20),), heads=4, kv_dtype=FP8), device, build_on(device))
        q, k, v = (
            to_float8(stage.normal(*shape)).to(stage.dtype) for shape in ((9, 4, 192), (50, 4, 192), (50, 4, 128))
        )
        call = RaggedCall.of(0, [3, 6], [20, 30], causal=causal, device=stage.device)
        lse = torch.full((9, 4), math.nan, device=stage.device)
        out = stage.backend.forward_ragged(q, k, v, stage.layer, call, lse=lse)
        wanted, sums = torch.zeros(9, 4, 128).double(), torch.zeros(9, 4).double()
        for rows, keys in ((slice(0, 3), slice(0, 20)), (slice(3, 9), slice(20, 50))):
            parts = (t.cpu() for t in (q[rows], k[keys], v[keys]))
            attend(*parts, stage.layer.scale, causal, wanted[rows], sums[rows])
        assert relative_error(out.cpu(), wanted) <= 1e-2
        assert relative_error(lse.cpu(), sums) <= (1e-6 if device == "cpu" else 5e-3)

    @on_every_device
    def test_captured_decode(self, device):
        build_one = build_on(device)
        case = mla(((400, 1),) * 3, ForwardMode.DECODE, kv_dtype=FP8)
        capture = Capture(KernelScene(case, device, build_one)).reserve().capture()
        for given in (((300, 1), (5, 1), (64, 1)), ((9, 1),)):
            other = scene(replace(case, lengths=given), device, build_one)
            check_replay(capture, other)
            wanted = other.wanted()[0]
            assert relative_error(capture.out[: len(wanted)], wanted) <= 1e-2

    @pytest.mark.parametrize("device", DEVICES[1:])
    def test_captured_lanes_run_on_two_streams(self, device):
        """B5, A2: by scratch memory of their own."""
        case = mla(((300, 1), (5, 1), (64, 1), (127, 1)), ForwardMode.DECODE, kv_dtype=FP8, lanes=2)
        check_captured_lanes(KernelScene(case, device, build_on(device)))

    @pytest.mark.parametrize("version", [OLDEST, NEWEST])
    def test_the_ends_of_the_claimed_range_take_the_same_calls(self, version):
        tokenspeed = ReferenceTokenSpeed(version)
        build_one = partial(reference_tokenspeed, tokenspeed=tokenspeed)
        check_absorbed(mla(lengths(4, 100, 1, seed=1), ForwardMode.DECODE, kv_dtype=FP8), "cpu", build_one)
        model = UpProjected(scene(mla(((70, 9), (0, 3)), heads=2, kv_dtype=FP8), "cpu", build_one))
        model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=32))
        assert len(tokenspeed.named("prefill")) == 4


class TestBuilding:
    def test_its_scratch_is_not_shared_with_the_fallbacks(self, monkeypatch):
        """A2, A5: what decode overwrites is one kind, what FlashInfer's wrappers hold another; kernels are compiled."""
        pretend(monkeypatch)
        tokenspeed = ReferenceTokenSpeed()
        monkeypatch.setattr(build, "load_library", lambda: tokenspeed.library)
        case = mla(((20, 1),), ForwardMode.DECODE, heads=128, kv_dtype=FP8)
        stage = KernelScene(case, "cpu", lambda context: build.tokenspeed_mla(declaring(context, "tokenspeed_mla")))
        uses = {use.kind: use for use in stage.workspace.report()}
        assert set(uses) == {"scratch", "cute-dsl-scratch"}
        assert uses["scratch"].owners == {"under_test/flashinfer_mla": 128 << 20}
        assert uses["cute-dsl-scratch"].owners == {"under_test": PROCESSORS * 64 * 513 * 4}
        assert [call["q_dtype"] for call in tokenspeed.named("warm_up")] == [torch.float8_e4m3fn]

    @pytest.mark.parametrize(
        ("changes", "warmed"),
        [({}, [(192, 128)]), ({"serving": Serving(skip_prefill=True)}, []), ({"v_head_dim": 64}, [])],
        ids=["prefills", "draft", "other-widths"],
    )
    def test_kernels_are_compiled_for_what_will_prefill(self, changes, warmed):
        """For the widths of a call; a draft's worker has no prefill to wait for, nor have widths without a kernel."""
        tokenspeed = ReferenceTokenSpeed()
        case = mla(((20, 1),), ForwardMode.DECODE, kv_dtype=FP8, **changes)
        KernelScene(case, "cpu", partial(reference_tokenspeed, tokenspeed=tokenspeed))
        assert [(call["d_qk"], call["d_v"]) for call in tokenspeed.named("warm_up")] == warmed

    def test_a_library_whose_needs_are_missing_raises_why(self, monkeypatch, tmp_path):
        """Its import succeeds and puts functions there that raise when they are called."""
        (tmp_path / "tokenspeed_mla.py").write_text("_IMPORT_ERROR = ImportError('no module named cutlass')")
        monkeypatch.syspath_prepend(tmp_path)
        kernels.load_library.cache_clear()
        with pytest.raises(ImportError, match="cutlass"):
            kernels.load_library()
        with raises_naming(BackendError, "cutlass", "pip install 'tokenspeed"):
            importlib.import_module(SPEC.factory.partition(":")[0])
        sys.modules.pop("tokenspeed_mla", None)


class TestWhatItSays:
    def test_here_only_its_library_is_missing(self):
        """D3: on a B200, for DeepSeek-V3 with an fp8 cache."""
        for role in (Role.PREFILL, Role.DECODE, Role.DRAFT):
            assert [reason.code for reason in SPEC.refusals(ON_A_B200, role)] == ["requirement"]

    def test_an_fp8_cache_only(self):
        """A5"""
        reasons = SPEC.refusals(replace(ON_A_B200, kv_dtype=DType.BFLOAT16), Role.DECODE)
        (reason,) = (r for r in reasons if r.code == "kv_dtype")
        assert (reason.value, reason.allowed, reason.setting) == ("bfloat16", ["float8_e4m3fn"], "kv_dtype")

    def test_on_an_h200_it_says_which_gpus_it_needs(self):
        """D3"""
        reasons = SPEC.refusals(replace(ON_A_B200, sm=90), Role.DECODE)
        assert [reason.code for reason in reasons][1:] == ["sm"]

    def test_the_unpacked_versions_are_the_ends_of_what_the_plugin_claims(self):
        makefile = (Path(__file__).resolve().parents[3] / "Makefile").read_text()
        assert f"TOKENSPEED := {OLDEST} {NEWEST}\n" in makefile


def test_the_backend_keeps_the_one_parameter_hook():
    """A4, A5, A8"""
    import inspect

    def build_one(context: BackendContext):
        return reference_tokenspeed(context)

    stage = KernelScene(mla(((20, 1),), ForwardMode.DECODE, kv_dtype=FP8), "cpu", build_one)
    assert list(inspect.signature(stage.backend.init_mha_chunk_metadata).parameters) == ["forward_batch"]
