"""Batches against float64: planning through the reference kernels on a CPU, the real kernels on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attnplug import BackendError, DType, ExtendPath, ForwardExtras, ForwardMode, PlanError
from attnplug.host import ExtendPolicy, ModelAttention
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_conformance.reference import Rules, attention
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.options import FlashInferMLAOptions
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check, mla
from attnplug_testing.references.flashinfer_mla import ReferencePaged, build, on_cpu

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
on_every_device = pytest.mark.parametrize("device", DEVICES)
LENGTHS = ((64, 7), (0, 3), (300, 40), (1, 1))


def scene(case: KernelCase, device: str) -> KernelScene:
    return KernelScene(on_cpu(case) if device == "cpu" else case, device, build)


def apart(q: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Both parts of q as vLLM has them: heads before rows, and columns of something wider."""
    return q[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), torch.cat((q, q), -1)[..., rank : q.shape[2]]


class TestAbsorbed:
    @on_every_device
    @pytest.mark.parametrize("lengths", [((64, 1), (5, 0)), ((128, 1), (30, 0), (30, 0), (2, 1)), ((9, 0), (128, 2))])
    def test_requests_without_new_tokens_do_not_change_the_others(self, lengths, device):
        """They would halve the kernels' query tile, which then ends within a token's 128 heads and loses a key."""
        check(scene(mla(lengths, MIXED, 16, 128), device))
        check(scene(mla(lengths, EXTEND, 16, 96), device))

    @on_every_device
    @pytest.mark.parametrize("path", ExtendPath)
    def test_extend_without_a_new_token(self, path, device):
        layer = UpProjected(scene(mla(((900, 0), (0, 0)), EXTEND), device))
        assert layer.run(ExtendPolicy(forced=path)).shape[0] == 0

    @on_every_device
    @pytest.mark.parametrize(("mode", "lengths"), [(DECODE, ((64, 1), (0, 1), (300, 1))), (EXTEND, LENGTHS)])
    def test_fp8_cache(self, mode, lengths, device):
        """Queries are rounded once more, by the scale."""
        stage = scene(mla(lengths, mode, kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.37, 0.37)), device)
        assert stage.error() <= (1e-5 if device == "cpu" else 2e-2)

    @on_every_device
    @pytest.mark.parametrize("kv_dtype", [None, DType.FLOAT8_E4M3])
    @pytest.mark.parametrize("heads", [16, 24])
    @pytest.mark.parametrize(
        ("mode", "lengths"), [(DECODE, ((64, 1), (0, 1), (300, 1))), (VERIFY, ((64, 3), (9, 3))), (EXTEND, LENGTHS)]
    )
    def test_queries_in_parts(self, mode, lengths, heads, kv_dtype, device):
        """The same numbers as joined, log-sum-exp too, with padded rows and heads that are padded."""
        scales = {} if kv_dtype is None else {"kv_dtype": kv_dtype, "kv_scales": (0.37, 0.37)}
        stage = scene(mla(lengths, mode, heads=heads, padding=2, **scales), device)
        batch = stage.plan(stage.batch())
        q, k, _ = stage.inputs(batch.num_tokens)
        wanted, found = (torch.zeros(q.shape[:2], device=device) for _ in range(2))
        plain = stage.forward(batch, (q, k, None), extras=ForwardExtras(lse=wanted))
        latent, rope = apart(q, stage.case.mla.kv_lora_rank)
        out = stage.forward(batch, (latent, k, None), extras=ForwardExtras(lse=found, q_rope=rope))
        assert torch.equal(out, plain) and torch.equal(found, wanted)

    @pytest.mark.parametrize("padding", [0, 2])
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 5)])
    def test_queries_in_parts_reach_the_kernel_where_they_lie(self, mode, new, padding, monkeypatch):
        given, run = [], ReferencePaged.run

        def noting(self, q, q_rope, *others):
            given.append((q, q_rope))
            run(self, q, q_rope, *others)

        monkeypatch.setattr(ReferencePaged, "run", noting)
        stage = scene(mla(((64, new), (9, new)), mode, padding=padding), "cpu")
        batch = stage.plan(stage.batch())
        q, k, _ = stage.inputs(batch.num_tokens)
        parts = apart(q, stage.case.mla.kv_lora_rank)
        stage.forward(batch, (parts[0], k, None), extras=ForwardExtras(q_rope=parts[1]))
        ((*found,),) = given
        for each, part in zip(found, parts, strict=True):
            assert each.data_ptr() == part.data_ptr() and each.stride() == part.stride() and len(each) == 2 * new
        assert padding or (found[0] is parts[0] and found[1] is parts[1])

    @on_every_device
    @pytest.mark.parametrize("heads", [16, 24])
    def test_the_result_is_put_into_the_hosts_memory(self, heads, device):
        """Written there by the kernel, or copied: memory with gaps, and heads that are padded."""
        stage = scene(mla(((64, 7), (9, 2)), EXTEND, heads=heads, lse=False), device)
        plain, _ = stage.results()
        batch = stage.plan(stage.batch())
        for wide in (plain.shape[2], 2 * plain.shape[2]):
            out = plain.new_zeros(*plain.shape[:2], wide)[..., : plain.shape[2]]
            found = stage.forward(batch, (stage.q, None, None), save=False, extras=ForwardExtras(out=out))
            assert found is out and torch.equal(out, plain)

    @pytest.mark.parametrize("device", DEVICES[1:])
    def test_extend_beyond_the_schedulers_room(self, device):
        """More query tiles than FlashInfer's scheduler holds run as several calls; test_planner divides them. Some
        rows of each request are compared: float64 of all of them fills no GPU."""
        stage = scene(mla(((70, 9000), (0, 8000)), EXTEND, heads=128, lse=False), device)
        outs = stage.results()[0].split(stage.new)
        for request, (before, new) in enumerate(stage.case.lengths):
            keys, values = stage.stored(request)
            queries = stage.q.split(stage.new)[request]
            for last in (16, new // 2, new):
                rows, seen = slice(last - 16, last), before + last
                wanted = attention(queries[rows], keys[:seen], values[:seen], Rules(stage.layer.scale))[0]
                assert relative_error(outs[request][rows], wanted) <= stage.tolerance


class TestAsMHA:
    @on_every_device
    @pytest.mark.parametrize(
        ("path", "capacity"), [(ExtendPath.ONE_SHOT, 16), (ExtendPath.CHUNKED, 1), (ExtendPath.CHUNKED, 100)]
    )
    def test_chunks_that_split_and_pack_and_leave_requests_out(self, path, capacity, device):
        """C1, C2, C3, C4"""
        prefixes = ((130, 40), (0, 9), (64, 1), (1, 3)) if device == "cpu" else ((900, 333), (0, 90), (64, 1), (1, 30))
        stage = scene(mla(((3, 4), (0, 2), (2, 5)) if capacity == 1 else prefixes, page_size=16, padding=3), device)
        layer = UpProjected(stage)
        out, wanted = layer.run(ExtendPolicy(forced=path, chunk_capacity=capacity)), layer.wanted()
        assert relative_error(out[: len(wanted)], wanted) <= 4 * stage.tolerance
        assert (out[len(wanted) :] == 0).all()

    @on_every_device
    @pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
    def test_an_fp8_cache(self, path, device):
        """The chunked path uses new rows before they are rounded to fp8; both are correct."""
        layer = UpProjected(scene(mla(((130, 40), (0, 9)), kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.5, 0.5)), device))
        error = relative_error(layer.run(ExtendPolicy(forced=path, chunk_capacity=64)), layer.wanted())
        assert error <= (2e-2, 2e-1)[path is ExtendPath.CHUNKED]


class TestNothingIsReadBack:
    @on_every_device
    @pytest.mark.parametrize(
        ("mode", "lengths"),
        [(DECODE, ((64, 1), (0, 1), (300, 1))), (VERIFY, ((64, 3), (0, 3), (300, 3))), (EXTEND, LENGTHS)],
    )
    def test_planning_copies_nothing_from_the_device(self, mode, lengths, device):
        """Lengths on the CPU are enough: those on the device are never looked at."""
        stage = scene(mla(lengths, mode, page_size=16), device)
        layer, policy = UpProjected(stage), ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=64)
        layer.run(policy)  # compiles what there is to compile
        batch = stage.batch()
        nonsense = torch.full_like(batch.geometry.seq_lens, -(1 << 30))
        new_lens = None if batch.geometry.new_lens is None else nonsense
        batch.geometry = replace(batch.geometry, seq_lens=nonsense, new_lens=new_lens)
        model, rows = ModelAttention(stage.backend, stage.pools, policy), stage.new_rows(stage.keys).squeeze(1)
        with nothing_waits(device):
            model.plan(batch)
            out = model.attend_mla(layer.q, rows, stage.layer, layer.weights, batch)
        assert relative_error(out, layer.wanted()) <= 4 * stage.tolerance


class TestWrongUse:
    def test_a_ragged_call_of_another_batch_is_refused(self):
        """B5: the index of the call alone does not identify its plan."""
        stage = scene(mla(((20, 2),), EXTEND, heads=16), "cpu")
        model = ModelAttention(stage.backend, stage.pools, ExtendPolicy(forced=ExtendPath.ONE_SHOT))
        batches = [stage.batch() for _ in range(2)]
        plans = [model.plan(batch) for batch in batches]
        (call,) = batches[1].geometry.calls
        q, keys = (stage.normal(rows, 16, stage.layer.head_dim) for rows in (2, 22))
        for other in (plans[0].chunks, stage.backend.plan(stage.batch().geometry), None):
            with raises_naming(PlanError, "2 query rows"):
                stage.backend.forward_ragged(q, keys, keys[..., :128], stage.layer, call, other)

    def test_the_kernel_option_must_suit_the_gpu(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        for kernel in ("fa3", "cutlass"):
            case = mla(((20, 1),), DECODE, options=FlashInferMLAOptions(kernel=kernel))
            with raises_naming(BackendError, "SM 80") as caught:
                KernelScene(case, "cpu", FlashInferMLABackend)
            assert caught.value.settings == ("flashinfer_mla.kernel",)
