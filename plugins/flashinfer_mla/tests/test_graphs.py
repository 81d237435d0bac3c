"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendContext, BackendError, DType, ForwardMode, PlanError
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from reference_kernels import ReferenceKernels, library_schedule, on_cpu
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
from support.mla_scene import MLACase, MLAScene

on_every_device = pytest.mark.parametrize("device", DEVICES)


def build(context: BackendContext) -> FlashInferMLABackend:
    kernels = ReferenceKernels.of(context) if context.device.type == "cpu" else None
    return FlashInferMLABackend(context, kernels=kernels)


def scenes(
    mode: ForwardMode, new: int, device: str, heads: int, page_size: int, **changes
) -> tuple[MLAScene, list[MLAScene]]:
    case = MLACase(((0, new),), mode, page_size, heads, **changes)
    return replay_scenes(on_cpu(case) if device == "cpu" else case, device, build)


@on_every_device
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (16, 1), (128, 16), (24, 64)])
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)])
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    check_replays(*scenes(mode, new, device, heads, page_size))


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)])
def test_one_capture_serves_an_fp8_cache_too(mode, new, device):
    """Of padding nothing is written there either. The library rounds the scale to bfloat16, which holds this one."""
    check_replays(*scenes(mode, new, device, 16, 64, kv_dtype=DType.FLOAT8_E4M3, kv_scale=0.375))


def swapped(make):
    """As if two of the library's arrays had changed places."""

    def made(call):
        schedule = make(call)
        return replace(schedule, q_len=schedule.kv_len, kv_len=schedule.q_len)

    return made


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(ForwardMode.DECODE, 1, device, 16, 64)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    captured.batch.seq_lens_cpu = None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


@on_every_device
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays queued one behind the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(ForwardMode.DECODE, 1, device, 16, 64)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    ready = [captured.stage(other) for other in others if len(other.totals) == 4]
    alone = [replay().clone() for replay in ready]
    if device == "cuda":
        busy = torch.randn(8192, 8192, device=device)
        for _ in range(20):
            busy = busy @ busy / 8192
        assert not torch.cuda.current_stream().query()
    with nothing_waits(device):
        queued = [replay().clone() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


class TestWrongUse:
    def test_a_plan_laid_out_in_an_unknown_way_is_not_captured(self, monkeypatch):
        """A later FlashInfer may lay its plans out differently: then there are no graphs, instead of wrong results."""
        stage = self.stage()
        monkeypatch.setattr("reference_kernels.library_schedule", swapped(library_schedule))
        stage.backend.init_cuda_graph_state(4, 4)
        with pytest.raises(BackendError, match=r"a way that this plugin does not know: .* run without CUDA graphs"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def stage(self, mode: ForwardMode = ForwardMode.DECODE, new: int = 1) -> MLAScene:
        return MLAScene(MLACase(((20, new), (9, new)), mode, dtype=DType.FLOAT32), "cpu", build)

    def test_graph_planning_without_memory_says_what_to_call(self):
        stage = self.stage()
        with pytest.raises(BackendError, match="init_cuda_graph_state"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def test_a_page_table_wider_than_the_memory_is_refused_whenever_it_comes(self):
        stage = self.stage()
        stage.backend.init_cuda_graph_state(4, 4)
        batch = stage.batch()
        stage.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        batch.page_table = torch.zeros(2, 65, dtype=torch.int32)
        with pytest.raises(PlanError, match=r"65 pages a request does not fit .* 64 pages"):
            stage.backend.init_forward_metadata_out_graph(batch)
