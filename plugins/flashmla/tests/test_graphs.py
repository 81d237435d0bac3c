"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import ForwardMode
from reference_flashmla import build, on
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
from support.mla_lanes import check_lanes
from support.mla_scene import MLACase

on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(mode: ForwardMode, new: int, device: str, heads: int = 16, page_size: int = 64, lanes: int = 1):
    return replay_scenes(on(MLACase(((0, new),), mode, page_size, heads, lanes=lanes), device), device, build)


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size"),
    [
        (ForwardMode.DECODE, 1, 16, 64),
        (ForwardMode.DECODE, 1, 24, 128),
        (ForwardMode.TARGET_VERIFY, 4, 32, 64),
        (ForwardMode.TARGET_VERIFY, 4, 128, 64),
        (ForwardMode.DRAFT_EXTEND, 2, 64, 128),
    ],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    check_replays(*scenes(mode, new, device, heads, page_size))


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share memory, and each is planned anew in its own graph."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
    large, small = (MLACapture(stage, requests, 1) for requests in (4, 2))
    large.capture()
    stage.backend.init_cuda_graph_state = lambda *_: None
    small.capture()
    four = [other for other in others if len(other.totals) == 4]
    alone = [large.replay(other).clone() for other in four]
    for other, wanted in zip(four, alone, strict=True):
        small.replay(next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(large.replay(other), wanted)


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


@on_every_device
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one after the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
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
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)])
def test_two_lanes_at_the_same_time(mode, new, device):
    """Each has memory of its own: a captured one is refilled before the other has run."""
    longest = 300 if device == "cpu" else 30000
    case = on(MLACase(tuple((prefix, new) for prefix in (longest, 5, 64, longest // 2)), mode), device)
    check_lanes(case, device, build, 1e-6 if device == "cpu" else 5e-3)


@on_every_device
def test_a_replay_writes_new_rows_where_the_host_says(device):
    """Its slots are copied inside the graph, from wherever the batch has them then."""
    stage, _ = scenes(ForwardMode.DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    slots = torch.tensor([64, -1, 7, -1], device=device)
    captured.batch.geometry = replace(captured.batch.geometry, slots=slots)
    captured.capture()
    assert captured.plan.new_slots.tolist() == slots.tolist() and captured.plan.new_slots is not slots
    slots.copy_(torch.tensor([-1, 3, -1, 9]))
    captured.backend.init_forward_metadata_in_graph(captured.batch)
    assert captured.plan.new_slots.tolist() == [-1, 3, -1, 9]


@pytest.mark.parametrize("device", DEVICES[1:])
def test_it_waits_for_queries_of_a_kernel_that_lets_others_start_early(device):
    """FlashMLA's first kernel is launched early and never waits itself."""
    from attnplug_flashmla.kernels import Call, FlashMLAKernels
    from support.late_kernel import fill_late

    torch.manual_seed(0)
    shape = {"dtype": torch.bfloat16, "device": device}
    kernels = FlashMLAKernels(16, 512)
    queries, cache = torch.randn(3, 16, 576, **shape), torch.randn(9, 64, 1, 576, **shape)
    lens = torch.tensor([5, 100, 180], dtype=torch.int32, device=device)
    table = torch.randperm(9, device=device).int().view(3, 3)
    call = Call(1, lens, table, kernels.schedule(lens, 1))
    wanted, _ = kernels.attend(queries, cache, call, 0.1)
    late = torch.full_like(queries, float("nan"))
    fill_late(late.flatten(), queries.flatten(), 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_late(late.flatten(), queries.flatten(), 1)
        found, _ = kernels.attend(late, cache, call, 0.1)
    for _ in range(5):
        late.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(found, wanted)
