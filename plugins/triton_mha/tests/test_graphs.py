"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attnplug import DType, ForwardBatch, ForwardMode
from attnplug_conformance.case import LAYER
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.captures import (
    check_host_slots,
    check_overtaking,
    check_second_capture,
    check_two_shapes,
    replay_scenes,
)
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import (
    KernelCase,
    KernelScene,
    check_captured_lanes,
    check_replay,
    mha,
    replayed,
)
from interpreted_mha import scene

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.5, 3.0)}
BY_ROW, NVFP4 = ({**FP8, "kv_dtype": name} for name in ("fp8_per_token_head", "nvfp4"))
SMALL = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 32}


def scenes(case: KernelCase, new: int, device: str) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[100, 5, 16, 31], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[300, 5, 64, 127], [1000, 17, 1, 0], [2000, 900]]
    return replay_scenes(lambda each: scene(each, device), case, new, prefixes, 2 * max(map(max, prefixes)))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, for queries of padded requests
@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [
        (DECODE, 1, {"window": 20}),
        (DECODE, 1, FP8),
        (DECODE, 1, BY_ROW),
        (DECODE, 1, NVFP4),
        (DRAFT_EXTEND, 2, {"page_size": 1}),
    ],
    ids=["window", "fp8", "fp8 by row", "nvfp4", "draft"],
)
@pytest.mark.sample(2)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, changes, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(mha((), mode, **{**SMALL, **changes}), new, device)
    capture = Capture(stage).reserve().capture()
    metadata = capture.plan.metadata
    ((schedule, _),) = metadata.schedules.values()
    assert schedule.separate_merge is not None or device != "cpu"
    held = [
        metadata.slots,
        schedule.records,
        *([] if schedule.separate_merge is None else [schedule.separate_merge.tiles]),
    ]
    addresses = [tensor.data_ptr() for tensor in held]
    for other in others:
        check_replay(capture, other)
        assert [tensor.data_ptr() for tensor in held] == addresses


@on_a_gpu
@pytest.mark.parametrize(
    ("requests", "mode", "new", "page_size"),
    [(1, DECODE, 1, 16), (3, VERIFY, 4, 64), (17, DECODE, 1, 64), (32, VERIFY, 4, 16)],
)
def test_fifty_replays_are_as_batches_that_were_not_captured(page_size, mode, new, requests, device):
    """Random lengths, pages and padding; equal bits, nothing allocated, nothing waited for."""
    chance = random.Random(requests)
    stage = scene(mha(((3000, new),) * requests, mode, page_size, 32, 8), device)
    capture = Capture(stage).reserve().capture()
    eager = [pages.clone() for pages in (stage.pool.keys(LAYER), stage.pool.values(LAYER))]
    for _ in range(50):
        real = chance.randint(1, requests)
        table, lens = capture.batch.geometry.page_table, capture.batch.geometry.seq_lens
        totals = [chance.choice([new, new + 1, 64, chance.randint(new, 3000)]) for _ in range(real)]
        pages = torch.randperm(len(stage.pool.keys(LAYER)), device=device)[: real * 48].int().view(real, -1)
        width = min(pages.shape[1], table.shape[1])
        most = width * page_size
        totals = [min(total, most) for total in totals]
        table.fill_(1 << 30)
        table[:real, :width] = pages[:, :width]
        lens.zero_()
        lens[:real] = torch.tensor(totals, dtype=torch.int32, device=device)
        for memory, old in zip((stage.pool.keys(LAYER), stage.pool.values(LAYER)), eager, strict=True):
            old.normal_()
            memory.copy_(old)
        for rows in (capture.q, capture.k, capture.v):
            rows.normal_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with nothing_waits(device):
            assert stage.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan
            capture.graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        found = capture.out.clone()
        batch = ForwardBatch(replace(capture.batch.geometry, captured=False))
        stage.plan(batch)
        forward = stage.backend.forward_decode if mode.is_decode else stage.backend.forward_extend
        assert torch.equal(found, forward(capture.q, capture.k, capture.v, stage.layer, batch))
        assert (found[real * new :] == 0).all()


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share partial results and counters, and each is planned anew in its own graph."""
    check_two_shapes(*scenes(mha((), DECODE, **SMALL), 1, device))


@on_every_device
def test_replay_planning_launches_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(mha((), DECODE, **SMALL), 1, device)
    capture = Capture(stage).reserve().capture()
    replayed(capture, others[0])
    ((schedule, _),) = capture.plan.metadata.schedules.values()
    schedule.records.fill_(-7)
    with nothing_waits(device):
        assert stage.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan
    assert (schedule.records == -7).all()


@on_a_gpu
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays with different lengths are queued while the device is busy."""
    check_overtaking(*scenes(mha((), DECODE), 1, device))


@on_every_device
def test_a_second_capture_of_a_shape_reads_its_own_page_table(device):
    """Two captures share a plan, and each graph reads the memory that it was captured with."""
    stage, others = scenes(mha((), DECODE, **SMALL), 1, device)
    check_second_capture(stage, others[0])


@on_every_device
def test_captured_rows_go_where_the_host_says(device):
    """Slots are copied inside the graph, from wherever the batch has them then."""
    stage, others = scenes(mha((), DECODE, **SMALL), 1, device)
    check_host_slots(stage, others[0])


class TestLanes:
    """Plans of one shape, alive and running at the same time."""

    def test_each_lane_has_partial_results_and_counters_of_its_own(self):
        halves = scene(mha(((90, 1), (59, 1), (28, 1), (0, 1)), DECODE, lanes=2, **SMALL), "cpu").halves()
        plans = [half.backend.init_forward_metadata(half.batch(lane=lane)) for lane, half in enumerate(halves)]
        (first, second) = (next(iter(plan.metadata.schedules.values()))[1] for plan in plans)
        for name in ("values", "weights", "counters"):
            assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()

    @on_a_gpu
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_captured_lanes_run_on_two_streams(self, mode, new, device):
        given = tuple((20000 - 31 * number, new) for number in range(4))
        check_captured_lanes(scene(mha(given, mode, lanes=2, **SMALL), device))
