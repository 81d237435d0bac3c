"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attnplug import ForwardMode
from attnplug_testing.captures import (
    check_copied_slots,
    check_overtaking,
    check_replays,
    check_two_shapes,
    replay_scenes,
)
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelScene, check_captured_lanes, check_replays_in_parts, mla
from attnplug_testing.references.flashmla import scene

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(
    mode: ForwardMode, new: int, device: str, heads: int = 16, page_size: int = 64
) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [200, 17, 1, 0], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[2000, 900], [1000, 17, 1, 0]]
    case = mla((), mode, page_size, heads)
    return replay_scenes(lambda each: scene(each, device), case, new, prefixes, max(map(max, prefixes)))


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size"), [(DECODE, 1, 24, 128), (VERIFY, 4, 128, 64), (DRAFT_EXTEND, 2, 64, 128)]
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    check_replays(*scenes(mode, new, device, heads, page_size))


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_one_capture_takes_queries_in_parts(mode, new, device):
    """They are joined inside the graph."""
    check_replays_in_parts(*scenes(mode, new, device))


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share memory, and each is planned anew in its own graph."""
    check_two_shapes(*scenes(DECODE, 1, device))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays with different lengths are queued while the device is busy."""
    check_overtaking(*scenes(DECODE, 1, device))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
def test_captured_lanes_run_on_two_streams(mode, new, device):
    """Lanes have separate memory: one is refilled before the other has run."""
    given = tuple((prefix, new) for prefix in (30000, 5, 64, 15000))
    check_captured_lanes(scene(mla(given, mode, lanes=2), device))


@on_every_device
def test_a_replay_writes_new_rows_where_the_host_says(device):
    """Its slots are copied inside the graph, from wherever the batch has them then."""
    check_copied_slots(scene(mla(((64, 1),) * 4, DECODE), device))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("in_parts", [False, True])
def test_it_waits_for_queries_of_a_kernel_that_lets_others_start_early(in_parts, device):
    """FlashMLA's first kernel is launched early and never waits itself."""
    from attnplug_flashmla.backend import prepare_query
    from attnplug_flashmla.kernels import FlashMLACall, FlashMLAKernels
    from attnplug_testing.late_kernel import fill_late

    torch.manual_seed(0)
    shape = {"dtype": torch.bfloat16, "device": device}
    kernels = FlashMLAKernels(16, 512)
    queries, cache = torch.randn(3, 16, 576, **shape), torch.randn(9, 64, 1, 576, **shape)
    lens = torch.tensor([5, 100, 180], dtype=torch.int32, device=device)
    table = torch.randperm(9, device=device).int().view(3, 3)
    call = FlashMLACall(1, lens, table, kernels.schedule(lens, 1))

    def attend(q: Tensor) -> Tensor:
        q = prepare_query(q[..., :512], q[..., 512:]) if in_parts else prepare_query(q, None)
        return kernels.attend(q, cache, call, 0.1)[0]

    wanted = attend(queries)
    late = torch.full_like(queries, float("nan"))
    fill_late(late.flatten(), queries.flatten(), 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill_late(late.flatten(), queries.flatten(), 1)
        found = attend(late)
    for _ in range(5):
        late.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        assert torch.equal(found, wanted)
