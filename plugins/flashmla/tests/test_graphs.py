"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import ForwardMode
from attnplug_conformance.checks.graphs import Capture
from reference_flashmla import scene
from support.devices import DEVICES, nothing_waits
from support.kernel_scene import KernelScene, check_captured_lanes, check_replay, mla, ready_replays, replayed

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(
    mode: ForwardMode, new: int, device: str, heads: int = 16, page_size: int = 64
) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [200, 17, 1, 0], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[2000, 900], [1000, 17, 1, 0]]
    case, longest = mla((), mode, page_size, heads), max(max(some) for some in prefixes)
    stage = scene(replace(case, lengths=((longest, new),) * 4), device)
    others = [
        scene(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed), device)
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size"), [(DECODE, 1, 24, 128), (VERIFY, 4, 128, 64), (DRAFT_EXTEND, 2, 64, 128)]
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    stage, others = scenes(mode, new, device, heads, page_size)
    capture = Capture(stage).reserve().capture()
    for other in others:
        check_replay(capture, other)


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share memory, and each is planned anew in its own graph."""
    stage, others = scenes(DECODE, 1, device)
    large = Capture(stage).reserve().capture()
    small = Capture(stage, 0, large.attention, requests=2).capture()
    four = [other for other in others if len(other.totals) == 4]
    alone = [replayed(large, other).clone() for other in four]
    for other, wanted in zip(four, alone, strict=True):
        replayed(small, next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(replayed(large, other), wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one after the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(DECODE, 1, device)
    ready = ready_replays(Capture(stage).reserve().capture(), [each for each in others if len(each.totals) == 4])
    alone = [replay() for replay in ready]
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy / 8192
    assert not torch.cuda.current_stream().query()
    with nothing_waits(device):
        queued = [replay() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
def test_captured_lanes_run_on_two_streams(mode, new, device):
    """Each has memory of its own: a captured one is refilled before the other has run."""
    given = tuple((prefix, new) for prefix in (30000, 5, 64, 15000))
    check_captured_lanes(scene(mla(given, mode, lanes=2), device))


@on_every_device
def test_a_replay_writes_new_rows_where_the_host_says(device):
    """Its slots are copied inside the graph, from wherever the batch has them then."""
    capture = Capture(scene(mla(((64, 1),) * 4, DECODE), device)).reserve()
    slots = torch.tensor([64, -1, 7, -1], device=device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    assert capture.plan.new_slots.tolist() == slots.tolist() and capture.plan.new_slots is not slots
    slots.copy_(torch.tensor([-1, 3, -1, 9]))
    capture.attention.refill(capture.batch)
    assert capture.plan.new_slots.tolist() == [-1, 3, -1, 9]


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
