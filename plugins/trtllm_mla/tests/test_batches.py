"""Batches against float64: planning through the reference functions on a CPU, the real kernels on a Blackwell GPU."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from attnplug import BackendError, DType, ExtendPath, ForwardExtras, ForwardMode, PlanError, RaggedCall, Serving
from attnplug.host import ExtendPolicy
from attnplug.mla.attention import plan_extend
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, mla
from attnplug_testing.references.trtllm_mla import (
    NEWEST,
    ReferenceFlashInfer,
    build_on,
    flashinfer_folder,
    reference_trtllm,
)
from attnplug_testing.trtllm_checks import (
    FP8,
    TOLERANCE,
    check_absorbed,
    check_verify,
    lengths,
    scene,
)
from attnplug_trtllm_mla.planner import table_width

GPU_PREFIXES = ((900, 333), (0, 90), (64, 1), (1, 30))
# torch warns once on a CPU without bfloat16 instructions.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
DECODE, VERIFY, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND, ForwardMode.MIXED
on_every_device = pytest.mark.parametrize("device", DEVICES)
of_both_types = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["bf16", "fp8"])


class TestDecode:
    @on_every_device
    @of_both_types
    @pytest.mark.parametrize("new", [2, 8])
    def test_verify_of_a_few_tokens(self, new, kv_dtype, device):
        check_verify(build_on(device), device, kv_dtype, new)

    def test_more_requests_with_a_log_sum_exp_than_scratch_has_room_for_are_several_calls(self):
        """The launcher needs 2 KiB per head and request for it, and raises if there is less."""
        flashinfer = ReferenceFlashInfer()
        case = mla(lengths(40, 100, 1, seed=3), DECODE, heads=128)
        check_absorbed(case, "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        sizes = [len(call["seq_lens"]) for call in flashinfer.named("decode")]
        assert sum(sizes) == 40 and len(sizes) > 1

    def test_without_a_log_sum_exp_it_is_one_call(self):
        flashinfer = ReferenceFlashInfer()
        case = mla(lengths(40, 100, 1, seed=3), DECODE, heads=128, lse=False)
        check_absorbed(case, "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        assert len(flashinfer.named("decode")) == 1

    @on_every_device
    @pytest.mark.parametrize("heads", [16, 24])
    @pytest.mark.parametrize("mode", [DECODE, EXTEND])
    def test_the_result_is_put_into_the_hosts_memory(self, mode, heads, device):
        """The kernel writes there directly, or the result is copied: into memory with gaps, from padded heads, and from
        the fallback."""
        case = mla(((64, 1), (9, 1)) if mode is DECODE else ((64, 3), (9, 1)), mode, heads=heads, lse=False)
        stage = scene(case, device, build_on(device))
        plain, _ = stage.results()
        batch = stage.plan(stage.batch())
        for wide in (512, 1024):
            out = plain.new_zeros(*plain.shape[:2], wide)[..., :512]
            found = stage.forward(batch, (stage.q, None, None), save=False, extras=ForwardExtras(out=out))
            assert found is out and torch.equal(out, plain)


class TestWhatTheDecodeKernelIsNotFor:
    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "kv_dtype"), [(EXTEND, None), (MIXED, FP8), (VERIFY, None), (ForwardMode.DRAFT_EXTEND, FP8)]
    )
    @pytest.mark.sample(2)
    def test_requests_with_different_numbers_of_rows(self, mode, kv_dtype, device):
        """A4: by FlashInfer's kernels, or row by row where these cannot read the cache."""
        case = mla(((100, 1), (0, 37), (64, 1), (63, 2), (5, 0), (130, 40)), mode, 32, kv_dtype=kv_dtype, padding=3)
        stage = check_absorbed(case, device, build_on(device))
        batch = stage.batch()
        fell_back = bool(stage.backend.init_forward_metadata(batch).parts)
        assert fell_back == (kv_dtype is None)

    @on_every_device
    @pytest.mark.parametrize(
        ("heads", "page_size", "kv_dtype"),
        [(24, 64, None), (128, 128, FP8)],
    )
    @pytest.mark.sample(1)
    def test_extend(self, heads, page_size, kv_dtype, device):
        """C1: absorbed, over the paged cache."""
        case = mla(lengths(4, 200, (1, 9), seed=heads), EXTEND, page_size, heads, kv_dtype=kv_dtype)
        check_absorbed(case, device, build_on(device))

    def test_extend_of_one_request_is_no_verify(self):
        """Its rows are equally many in every request, and may be thousands."""
        flashinfer = ReferenceFlashInfer()
        check_absorbed(mla(((64, 40),), EXTEND), "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        assert not flashinfer.calls

    @on_every_device
    def test_a_drafts_worker_catches_up_without_the_fallback(self, device):
        """A1's skip_prefill leaves FlashInfer nothing to extend with."""
        case = mla(((100, 1), (0, 3)), ForwardMode.DRAFT_EXTEND, serving=Serving(skip_prefill=True))
        check_absorbed(case, device, build_on(device))


class TestRandomBatches:
    @on_every_device
    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.sample(4)
    def test_any_mode_page_size_type_and_number_of_heads(self, seed, device):
        """A4, B5, C4: the backend or its fallback plans each batch. Pages are in any order, among others full of
        NaN."""
        chance = random.Random(seed)
        mode = chance.choice([DECODE, VERIFY, EXTEND, MIXED, ForwardMode.DRAFT_EXTEND])
        new = {DECODE: 1, VERIFY: chance.randint(2, 8)}.get(mode, (1, 9))
        case = mla(
            lengths(chance.randint(1, 7), 300, new, seed),
            mode,
            page_size=chance.choice([32, 64, 96, 128]),
            heads=chance.choice([2, 8, 12, 16, 65, 128]),
            kv_dtype=chance.choice([None, FP8]),
            kv_scales=(1.0, 1.0),
            pages=chance.choice(["shuffled", "interleaved", "descending"]),
            padding=chance.randint(0, 4),
            lse=chance.random() < 0.7,
            seed=seed,
        )
        check_absorbed(case, device, build_on(device))


class TestAsMHA:
    @on_every_device
    @pytest.mark.parametrize(
        ("path", "capacity", "kv_dtype"),
        [(ExtendPath.ONE_SHOT, 100, None), (ExtendPath.CHUNKED, 16, None), (ExtendPath.CHUNKED, 100, FP8)],
    )
    def test_chunks_that_split_and_pack_and_leave_requests_out(self, path, capacity, kv_dtype, device):
        """C1, C2, C3, C4"""
        heads, prefixes = (2, ((70, 20), (0, 9), (40, 1), (1, 3))) if device == "cpu" else (16, GPU_PREFIXES)
        case = mla(prefixes, heads=heads, kv_dtype=kv_dtype, padding=3)
        model = UpProjected(scene(case, device, build_on(device)))
        out = model.run(ExtendPolicy(forced=path, chunk_capacity=capacity))
        assert model.batch.plan.chunks is None  # A4: nothing is planned
        wanted = model.wanted()
        # Chunked takes its new rows as they come, not as fp8 has them; both are right.
        allowed = 2e-1 if kv_dtype is FP8 and path is ExtendPath.CHUNKED else 2 * TOLERANCE
        assert relative_error(out[: len(wanted)], wanted) <= allowed
        assert (out[len(wanted) :] == 0).all()

    @on_every_device
    @pytest.mark.parametrize("path", ExtendPath)
    def test_extend_without_a_new_token(self, path, device):
        model = UpProjected(scene(mla(((900, 0), (0, 0)), EXTEND), device, build_on(device)))
        assert model.run(ExtendPolicy(forced=path)).shape[0] == 0

    def test_more_statistics_than_scratch_has_room_for_are_several_calls(self):
        """Rows are counted as if every request had as many as the one with most, and rounded up to 256."""
        flashinfer = ReferenceFlashInfer()
        case = mla(((7, 9), (4, 300), (6, 5), (1, 2), (3, 7)), heads=2)
        stage = scene(case, "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        model = UpProjected(stage)
        stage.backend.lanes[0].ragged._scratch.buffer = torch.empty((1 << 20) + 8 * 2 * 1024, dtype=torch.uint8)
        out = model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=1000))
        assert relative_error(out, model.wanted()) <= 2 * TOLERANCE
        assert [call["batch_size"] for call in flashinfer.named("ragged")] == [2, 3, 2, 3]

    def test_one_request_that_does_not_fit_is_refused_in_words(self):
        stage = scene(mla(((7, 9),), heads=128), "cpu", reference_trtllm)
        stage.backend.lanes[0].ragged._scratch.buffer = torch.empty(1 << 20, dtype=torch.uint8)
        with raises_naming(BackendError, "262144 bytes", "trtllm_mla.workspace_mib"):
            UpProjected(stage).run(ExtendPolicy(forced=ExtendPath.CHUNKED))

    @on_every_device
    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_a_captured_prefill_leaves_its_chunks_to_the_fallback(self, path, device):
        """A4: planned with disable_flashinfer_ragged=True, so the first call stays our own kernel's."""
        flashinfer = ReferenceFlashInfer()
        build = partial(reference_trtllm, flashinfer=flashinfer) if device == "cpu" else build_on(device)
        model = UpProjected(scene(mla(((70, 20), (0, 9)), heads=2 if device == "cpu" else 16), device, build))
        batch = model.scene.batch()
        batch.geometry = replace(batch.geometry, captured=True)
        out = model.run(ExtendPolicy(forced=path, chunk_capacity=32), batch)
        assert relative_error(out, model.wanted()) <= 2 * TOLERANCE
        chunks = [call.index for call in batch.geometry.calls[1:]]
        planned = batch.plan.chunks
        assert (list(planned.metadata) if chunks else planned) == (chunks or None)
        if device == "cpu":
            assert len(flashinfer.named("ragged")) == 1

    @pytest.mark.parametrize("prefix", [0, 70])
    def test_with_chunked_prefix_disabled_a_prefix_is_the_fallbacks_to_plan(self, prefix, monkeypatch):
        """A4: the fallback plans with disable_flashinfer_ragged=True, and only if there is a prefix. In one shot it
        returns None, since our own kernel runs the one call. Chunks are refused, as there is no runner for them."""
        asked = []
        hook = FlashInferMLABackend.init_mha_chunk_metadata

        def spy(fallback, forward_batch, disable_flashinfer_ragged=False):
            asked.append(disable_flashinfer_ragged)
            return hook(fallback, forward_batch, disable_flashinfer_ragged)

        monkeypatch.setattr(FlashInferMLABackend, "init_mha_chunk_metadata", spy)
        case = mla(((prefix, 20), (0, 9)), heads=2, serving=Serving(disable_chunked_prefix_cache=True))
        model = UpProjected(scene(case, "cpu", reference_trtllm))
        out = model.run(ExtendPolicy(forced=ExtendPath.ONE_SHOT))
        assert model.batch.plan.chunks is None and asked == [True] * bool(prefix)
        assert relative_error(out, model.wanted()) <= 2 * TOLERANCE
        batch = model.scene.batch()
        calls = tuple(part.call for part in plan_extend(batch.geometry, ExtendPath.CHUNKED, 16))
        batch.geometry = replace(batch.geometry, calls=calls)
        if not prefix:
            assert model.scene.backend.init_mha_chunk_metadata(batch) is None and not asked
            return
        with raises_naming(PlanError, "disable_chunked_prefix_cache", 5):
            model.scene.backend.init_mha_chunk_metadata(batch)

    def test_a_ragged_call_in_a_lane_that_it_was_not_built_for(self):
        stage = KernelScene(mla(((0, 3),), EXTEND), "cpu", reference_trtllm)
        call = RaggedCall.of(0, [3], [3], causal=True, device=torch.device("cpu"), lane=1)
        q, v = stage.normal(3, 16, 192), stage.normal(3, 16, 128)
        with raises_naming(PlanError, "lane 1"):
            stage.backend.forward_ragged(q, q, v, stage.layer, call)

    def test_ragged_calls_run_on_the_memory_of_their_lane(self):
        """A2: they are not planned, and carry their lane."""
        flashinfer = ReferenceFlashInfer()
        stage = scene(
            mla(((70, 20), (0, 9)), heads=2, lanes=2), "cpu", partial(reference_trtllm, flashinfer=flashinfer)
        )
        model, buffers = UpProjected(stage), [lane.decode.scratch.buffer for lane in stage.backend.lanes]
        for lane in (1, 0):
            batch = stage.batch()
            batch.geometry = replace(batch.geometry, lane=lane)
            out = model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=64), batch)
            assert relative_error(out, model.wanted()) <= 2 * TOLERANCE
        used = [call["workspace_buffer"] for call in flashinfer.named("ragged")]
        assert (
            len(used) == 6 and all(one is buffers[1] for one in used[:3]) and all(one is buffers[0] for one in used[3:])
        )

    @pytest.mark.parametrize(
        ("changes", "wanted"),
        [
            ({}, set(ExtendPath)),
            ({"serving": Serving(disable_chunked_prefix_cache=True)}, {ExtendPath.ABSORBED, ExtendPath.ONE_SHOT}),
            ({"serving": Serving(disaggregation_mode="decode")}, {ExtendPath.ABSORBED, ExtendPath.ONE_SHOT}),
            ({"serving": Serving(skip_prefill=True)}, {ExtendPath.ABSORBED}),
            ({"v_head_dim": 64}, {ExtendPath.ABSORBED}),
        ],
        ids=["whole", "chunks-disabled", "decode-server", "draft", "other-widths"],
    )
    def test_it_claims_only_the_extends_it_can_run(self, changes, wanted):
        """C1, A4: chunks over a prefix are not offered where the fallback has no runner for them."""
        stage = KernelScene(mla(((20, 2),), **changes), "cpu", reference_trtllm)
        assert stage.backend.claims.mla_extend == wanted


class TestPlanning:
    @pytest.mark.parametrize("page_size", [32, 64])
    @pytest.mark.parametrize(("rows", "tiles"), [(0, 1), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)])
    def test_a_row_of_a_page_table_holds_whole_tiles_and_no_more(self, rows, tiles, page_size):
        """A4: blocks % (128 / page_size) == 0."""
        assert table_width(rows, page_size) == tiles * 128 // page_size

    @pytest.mark.parametrize(
        ("heads", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16), (63, 64), (64, 64), (65, 128), (128, 128)]
    )
    def test_the_kernel_is_given_this_ranks_heads_padded(self, heads, padded):
        """The context's model is this rank's. With more heads the result would be the same, but slower."""
        flashinfer = ReferenceFlashInfer()
        check_absorbed(mla(((5, 1),), DECODE, heads=heads), "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        assert [call["query"].shape[2] for call in flashinfer.named("decode")] == [padded]


class TestEveryVersion:
    @pytest.mark.parametrize("version", [None, NEWEST])
    def test_decode_verify_and_ragged_calls_are_taken(self, version):
        """C4: checked against the signatures of the pinned FlashInfer and of the newest supported one, which differ in
        the bases of the log-sum-exp that they offer."""
        if flashinfer_folder(version) is None:
            pytest.skip(f"flashinfer {version} is not unpacked; make test does it")
        build = partial(reference_trtllm, flashinfer=ReferenceFlashInfer(version))
        check_absorbed(mla(lengths(4, 100, 1, seed=1), DECODE), "cpu", build)
        check_absorbed(mla(lengths(4, 100, 3, seed=1), VERIFY, kv_dtype=FP8), "cpu", build)
        model = UpProjected(scene(mla(((70, 9), (0, 3)), heads=2), "cpu", build))
        out = model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=32))
        assert relative_error(out, model.wanted()) <= 2 * TOLERANCE

    def test_the_newest_is_asked_for_natural_logarithms(self):
        """C4"""
        if flashinfer_folder(NEWEST) is None:
            pytest.skip(f"flashinfer {NEWEST} is not unpacked; make test does it")
        flashinfer = ReferenceFlashInfer(NEWEST)
        check_absorbed(mla(((5, 1),), DECODE), "cpu", partial(reference_trtllm, flashinfer=flashinfer))
        assert flashinfer.named("decode")[0]["return_lse_base"] == "basee"


class TestNothingIsReadBack:
    @on_every_device
    @of_both_types
    @pytest.mark.parametrize("mode", [DECODE, VERIFY, EXTEND])
    @pytest.mark.sample(4)
    def test_planning_copies_nothing_from_the_device(self, mode, kv_dtype, device):
        """Lengths on the CPU are enough: those on the device are never looked at."""
        new = {DECODE: 1, VERIFY: 3}.get(mode, (1, 40))
        stage = scene(mla(lengths(4, 200, new, seed=1), mode, kv_dtype=kv_dtype), device, build_on(device))
        stage.results()  # compiles what there is to compile
        batch = stage.batch()
        nonsense = torch.full_like(batch.geometry.seq_lens, -(1 << 30))
        new_lens = None if batch.geometry.new_lens is None else nonsense
        batch.geometry = replace(batch.geometry, seq_lens=nonsense, new_lens=new_lens)
        with nothing_waits(device):
            out = stage.forward(stage.plan(batch))
        assert relative_error(out, stage.wanted()[0]) <= TOLERANCE


class TestWrongUse:
    def extended(self, **changes: object) -> KernelScene:
        return scene(mla(**{"lengths": ((20, 2),), "mode": EXTEND, **changes}), "cpu", reference_trtllm)

    def test_extend_in_a_drafts_worker_is_refused_in_words(self):
        """A1, A4"""
        stage = self.extended(serving=Serving(skip_prefill=True))
        with raises_naming(PlanError, "skip_prefill", "extend"):
            stage.backend.init_forward_metadata(stage.batch())

    def test_a_batch_planned_to_run_as_mha_is_not_run_absorbed(self):
        stage = self.extended()
        model = UpProjected(stage)
        model.run(ExtendPolicy(forced=ExtendPath.ONE_SHOT))
        with raises_naming(PlanError, ExtendPath.ABSORBED):
            stage.results(model.batch)

    def test_a_page_size_that_no_kernel_page_divides_is_refused(self):
        with raises_naming(BackendError, 48) as caught:
            self.extended(page_size=48)
        assert caught.value.settings == ("page_size",)

    def test_values_too_large_for_fp8_saturate(self):
        """torch makes NaN of them."""
        case = mla(((20, 1),), DECODE, kv_dtype=FP8, dtype=DType.BFLOAT16)
        stage = scene(case, "cpu", reference_trtllm)
        stage.q = stage.q * 1e6
        assert stage.results()[0].isfinite().all()
