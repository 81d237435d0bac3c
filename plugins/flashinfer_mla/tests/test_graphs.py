"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, DType, ForwardMode
from reference_kernels import build, library_schedule, on_cpu
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
from support.mla_lanes import check_lanes
from support.mla_scene import MLACase, MLAScene

on_every_device = pytest.mark.parametrize("device", DEVICES)


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


def swapped(one: str, other: str):
    """As if two of the library's arrays had changed places."""

    def made(call):
        schedule = library_schedule(call)
        return replace(schedule, **{one: getattr(schedule, other), other: getattr(schedule, one)})

    return made


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(ForwardMode.DECODE, 1, device, 16, 64)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    assert captured.batch.geometry.host is None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


@on_every_device
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays queued one after the other, each with lengths of its own, while the device is busy."""
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


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 4)])
def test_two_lanes_run_at_the_same_time(mode, new, device):
    """B5: plans of one shape, eager and captured, share no wrapper, no scratch and no graph memory. Long requests on a
    GPU: their parts are merged from scratch memory."""
    prefixes = (300, 5, 64, 127) if device == "cpu" else (3000, 2900, 3800, 3500)
    case = MLACase(tuple((prefix, new) for prefix in prefixes), mode)
    check_lanes(on_cpu(case) if device == "cpu" else case, device, build, 1e-6 if device == "cpu" else 5e-3)


@pytest.mark.parametrize("rearranged", [swapped("q_len", "kv_len"), swapped("kv_start", "kv_end")])
def test_a_plan_laid_out_in_an_unknown_way_is_not_captured(monkeypatch, rearranged):
    """A later FlashInfer may lay its plans out differently: then there are no graphs, instead of wrong results."""
    stage = MLAScene(MLACase(((20, 1), (9, 1)), ForwardMode.DECODE, dtype=DType.FLOAT32), "cpu", build)
    monkeypatch.setattr("reference_kernels.library_schedule", rearranged)
    capture = MLACapture(stage, requests=2, per_request=1)
    with pytest.raises(BackendError, match=r"a way that this plugin does not know: .* run without CUDA graphs"):
        capture.capture()
