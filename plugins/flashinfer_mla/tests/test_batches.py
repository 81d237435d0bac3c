"""Batches against float64: planning through the reference kernels on a CPU, the real kernels on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, DType, ExtendPath, ForwardExtras, ForwardMode, PlanError
from attnplug.host import ExtendPolicy, KVPools, ModelAttention, plan_forward
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from reference_kernels import build, on_cpu
from support.devices import DEVICES, nothing_waits
from support.mla_scene import MLACase, MLAModel, MLAScene, relative_error

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
on_every_device = pytest.mark.parametrize("device", DEVICES)
GPU = DEVICES[1]


def tolerance(case: MLACase) -> float:
    if case.dtype is DType.FLOAT32:
        return 1e-6
    return 5e-3 if case.kv_dtype is None else 8e-3  # queries of an fp8 cache are rounded once more, by its scale


def scene(case: MLACase, device: str) -> MLAScene:
    return MLAScene(on_cpu(case) if device == "cpu" else case, device, build)


def lengths(count: int, longest: int, new: int | tuple[int, int], seed: int) -> tuple[tuple[int, int], ...]:
    """Prefixes of every kind (none, one row, whole pages, long ones) with new tokens after them."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 63, 64, 65, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((p, new if isinstance(new, int) else chance.randint(*new)) for p in prefixes)


def check_absorbed(case: MLACase, device: str) -> None:
    stage = scene(case, device)
    out, lse = stage.absorbed()
    wanted, wanted_lse = stage.wanted_absorbed()
    tokens = len(wanted)
    assert relative_error(out[:tokens], wanted) <= tolerance(stage.case)
    assert (out[tokens:] == 0).all()
    assert lse is not None
    assert relative_error(lse[:tokens], wanted_lse) <= tolerance(stage.case)
    assert (lse[tokens:] == float("-inf")).all()


class TestAbsorbed:
    @on_every_device
    @pytest.mark.parametrize("lengths", [((64, 1), (5, 0)), ((128, 1), (30, 0), (30, 0), (2, 1)), ((9, 0), (128, 2))])
    def test_requests_without_new_tokens_do_not_change_the_others(self, lengths, device):
        """They would halve the kernels' query tile, which then ends within a token's 128 heads and loses a key."""
        check_absorbed(MLACase(lengths, MIXED, 16, 128), device)
        check_absorbed(MLACase(lengths, EXTEND, 16, 96), device)

    @on_every_device
    @pytest.mark.parametrize("path", ExtendPath)
    def test_extend_without_a_new_token(self, path, device):
        model = MLAModel(scene(MLACase(((9000, 0), (0, 0)), EXTEND), device))
        assert model.run(ExtendPolicy(forced=path)).shape[0] == 0

    @on_every_device
    @pytest.mark.parametrize("scale", [1.0, 0.37])
    @pytest.mark.parametrize("mode", [DECODE, EXTEND])
    def test_fp8_cache(self, mode, scale, device):
        new = 1 if mode is DECODE else (1, 40)
        check_absorbed(MLACase(lengths(4, 300, new, seed=5), mode, kv_dtype=DType.FLOAT8_E4M3, kv_scale=scale), device)

    @on_every_device
    @pytest.mark.parametrize("heads", [16, 24])
    def test_the_result_is_put_into_the_hosts_memory(self, heads, device):
        """Written there by the kernel, or copied: memory with gaps, and heads that are padded."""
        stage = scene(MLACase(((64, 7), (9, 2)), EXTEND, heads=heads, lse=False), device)
        plain, _ = stage.absorbed()
        batch = stage.batch()
        plan_forward(stage.backend, batch)
        for wide in (plain.shape[2], 2 * plain.shape[2]):
            out = plain.new_zeros(*plain.shape[:2], wide)[..., : plain.shape[2]]
            extras = ForwardExtras(out=out)
            found = stage.backend.forward_extend(
                stage.q, None, None, stage.layer, batch, save_kv_cache=False, extras=extras
            )
            assert found is out and torch.equal(out, plain)

    @pytest.mark.parametrize("device", [GPU])
    def test_extend_beyond_the_schedulers_room(self, device):
        """More query tiles than FlashInfer's scheduler holds run as several calls; test_planner divides them."""
        check_absorbed(MLACase(((70, 9000), (0, 8000)), EXTEND, heads=128), device)


class TestAsMHA:
    @on_every_device
    @pytest.mark.parametrize("capacity", [1, 16, 100, 1 << 17])
    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_chunks_that_split_and_pack_and_leave_requests_out(self, path, capacity, device):
        """C1, C2, C3, C4"""
        if capacity == 1:
            prefixes = ((3, 4), (0, 2), (2, 5))
        else:
            prefixes = (
                ((130, 40), (0, 9), (64, 1), (1, 3)) if device == "cpu" else ((900, 333), (0, 90), (64, 1), (1, 30))
            )
        model = MLAModel(scene(MLACase(prefixes, page_size=16, padding=3), device))
        out = model.run(ExtendPolicy(forced=path, chunk_capacity=capacity))
        wanted = model.wanted()
        assert relative_error(out[: len(wanted)], wanted) <= tolerance(model.scene.case)
        assert (out[len(wanted) :] == 0).all()

    @on_every_device
    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_fp8_cache_and_float16(self, path, device):
        for case in (
            MLACase(((130, 40), (0, 9)), kv_dtype=DType.FLOAT8_E4M3, kv_scale=0.5),
            MLACase(((130, 40), (0, 9)), dtype=DType.FLOAT16),
        ):
            model = MLAModel(scene(case, device))
            policy = ExtendPolicy(forced=path, chunk_capacity=64)
            if case.kv_dtype is None:
                assert relative_error(model.run(policy), model.wanted()) <= 5e-3
                continue
            # Chunked takes its new rows as they come, not as fp8 has them; both are right.
            assert relative_error(model.run(policy), model.wanted()) <= (5e-3, 5e-2)[path is ExtendPath.CHUNKED]

    @on_every_device
    def test_planning_one_batch_does_not_depend_on_another(self, device):
        """One-shot planning takes its lengths from its own batch, whatever was planned before or in between."""
        longer = ((80, 82), (0, 9)) if device == "cpu" else ((800, 821), (0, 9))
        stage = scene(MLACase(longer, page_size=16), device)
        model = MLAModel(stage)
        batch = stage.batch()
        out = model.run(ExtendPolicy(forced=ExtendPath.ONE_SHOT), batch)
        kept = batch.plan.chunks
        stage.backend.init_forward_metadata(scene(MLACase(((20, 3),), page_size=16), device).batch())
        assert batch.plan.chunks is kept
        assert relative_error(out, model.wanted()) <= tolerance(stage.case)


class TestNothingIsReadBack:
    @on_every_device
    @pytest.mark.parametrize("mode", [DECODE, VERIFY, EXTEND])
    def test_planning_copies_nothing_from_the_device(self, mode, device):
        """Lengths on the CPU are enough: those on the device are never looked at."""
        new = {DECODE: 1, VERIFY: 3}.get(mode, (1, 40))
        stage = scene(MLACase(lengths(4, 300, new, seed=1), mode, page_size=16), device)
        model = MLAModel(stage)
        model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=64))  # compiles what there is to compile
        batch = stage.batch()
        nonsense = torch.full_like(batch.geometry.seq_lens, -(1 << 30))
        new_lens = None if batch.geometry.new_lens is None else nonsense
        batch.geometry = replace(batch.geometry, seq_lens=nonsense, new_lens=new_lens)
        with nothing_waits(device):
            out = model.run(ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=64), batch)
        assert relative_error(out, model.wanted()) <= 2 * tolerance(stage.case)


class TestWrongUse:
    def test_a_host_with_upper_bounds_only_is_told_what_is_needed(self):
        """FlashInfer plans on the host, over exact lengths."""
        stage = scene(MLACase(((20, 2), (9, 1)), EXTEND, exact_lengths=False), "cpu")
        with pytest.raises(PlanError, match="the backend needs exact ones"):
            stage.absorbed()

    def test_a_ragged_call_of_another_batch_is_refused(self):
        """B5: its number alone says nothing."""
        stage = scene(MLACase(((20, 2),), EXTEND, heads=16), "cpu")
        attention = ModelAttention(stage.backend, KVPools(mla=stage.pool), ExtendPolicy(forced=ExtendPath.ONE_SHOT))
        batches = [stage.batch() for _ in range(2)]
        plans = [attention.plan(batch) for batch in batches]
        (call,) = batches[1].geometry.calls
        q, keys = (stage.normal(rows, 16, stage.layer.head_dim) for rows in (2, 22))
        for other in (plans[0].chunks, stage.backend.plan(stage.batch().geometry), None):
            with pytest.raises(PlanError, match="call 0 of 2 query rows has no plan of backend"):
                stage.backend.forward_ragged(q, keys, keys[..., :128], stage.layer, call, other)

    def test_the_kernel_option_must_suit_the_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        for kernel, message in (("fa3", "needs SM 90, this is SM 80"), ("cutlass", "needs SM 100 to 110")):
            case = MLACase(((20, 1),), DECODE, options=FlashInferMLAOptions(kernel=kernel))
            with pytest.raises(BackendError, match=message):
                MLAScene(case, "cpu", FlashInferMLABackend)
