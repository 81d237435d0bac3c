"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import replace

import pytest
import torch

from attnplug import DType, ForwardBatch, ForwardExtras, ForwardMode, Geometry
from attnplug.host import plan_forward
from interpreted_mha import TOLERANCE, build, on, scene, tolerance
from support.batches import with_plan
from support.devices import DEVICES, nothing_waits
from support.mha_capture import MHACapture
from support.mha_scene import LAYER, MHACase, MHAScene
from support.mla_scene import NAN, relative_error

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.5, 3.0)}
SMALL = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 32}


def scenes(case: MHACase, new: int, device: str) -> tuple[MHAScene, list[MHAScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    case = on(case, device)
    prefixes = [[100, 5, 16, 31], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[300, 5, 64, 127], [1000, 17, 1, 0], [2000, 900]]
    longest = max(max(some) for some in prefixes)
    stage = MHAScene(replace(case, lengths=((2 * longest, new),) * 4), device, build)
    others = [
        MHAScene(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed), device, build)
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, for queries of padded requests
@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [
        (DECODE, 1, {"window": 20}),
        (DECODE, 1, FP8),
        (DRAFT_EXTEND, 2, {"page_size": 1}),
    ],
    ids=["window", "fp8", "draft"],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, changes, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(MHACase((), mode, **{**SMALL, **changes}), new, device)
    capture = MHACapture(stage, requests=4, per_request=new).capture()
    metadata = capture.plan.metadata
    held = [metadata.slots, *(schedule.records for schedule, _ in metadata.schedules.values())]
    addresses = [tensor.data_ptr() for tensor in held]
    for other in others:
        out = capture.replay(other)
        wanted = other.wanted()[0]
        assert relative_error(out[: len(wanted)], wanted) <= tolerance(stage.case)
        assert (out[len(wanted) :] == 0).all()
        assert stage.written() == sum(other.totals)
        assert [tensor.data_ptr() for tensor in held] == addresses


@on_a_gpu
@pytest.mark.parametrize("requests", [1, 3, 17, 32])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_fifty_replays_are_as_batches_that_were_not_captured(page_size, mode, new, requests, device):
    """Random lengths, pages and padding; equal bits, nothing allocated, nothing waited for."""
    chance = random.Random(requests)
    case = MHACase(((3000, new),) * requests, mode, page_size, 32, 8, 64, lse=False)
    stage = scene(case, device)
    capture = MHACapture(stage, requests, new).capture()
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
            assert capture.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan
            capture.graph.replay()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        replayed = capture.out.clone()
        batch = ForwardBatch(replace(capture.batch.geometry, captured=False))
        plan_forward(stage.backend, batch)
        forward = stage.backend.forward_decode if mode.is_decode else stage.backend.forward_extend
        assert torch.equal(replayed, forward(capture.q, capture.k, capture.v, stage.layer, batch))
        assert (replayed[real * new :] == 0).all()


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share partial results and counters, and each is planned anew in its own graph."""
    stage, others = scenes(MHACase((), DECODE, **SMALL), 1, device)
    large = MHACapture(stage, 4, 1).capture()
    small = MHACapture(stage, 2, 1).capture(reserve=False)
    four = [other for other in others if len(other.totals) == 4][:2]
    alone = [large.replay(other).clone() for other in four]
    for other, wanted in zip(four, alone, strict=True):
        small.replay(next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(large.replay(other), wanted)


@on_every_device
def test_replay_planning_waits_for_nothing_and_launches_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(MHACase((), DECODE, **SMALL), 1, device)
    capture = MHACapture(stage, 4, 1).capture()
    capture.replay(others[0])
    ((schedule, _),) = capture.plan.metadata.schedules.values()
    schedule.records.fill_(-7)
    with nothing_waits(device):
        assert capture.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan
    assert (schedule.records == -7).all()


@on_a_gpu
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one after the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(MHACase((), DECODE), 1, device)
    capture = MHACapture(stage, 4, 1).capture()
    ready = [capture.stage(other) for other in others if len(other.totals) == 4]
    alone = [replay().clone() for replay in ready]
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy / 8192
    assert not torch.cuda.current_stream().query()
    with nothing_waits(device):
        queued = [replay().clone() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


@on_every_device
def test_a_second_capture_of_a_shape_reads_its_own_page_table(device):
    """Two captures share a plan, and each graph reads the memory that it was captured with."""
    stage, others = scenes(MHACase((), DECODE, **SMALL), 1, device)
    first = MHACapture(stage, 4, 1).capture()
    second = MHACapture(stage, 4, 1).capture(reserve=False)
    assert first.plan is second.plan
    first.batch.geometry.page_table.fill_(1 << 30)
    assert relative_error(second.replay(others[0]), others[0].wanted()[0]) <= TOLERANCE[stage.case.dtype]


@on_every_device
def test_captured_rows_go_where_the_host_says(device):
    """Slots are copied inside the graph, from wherever the batch has them then."""
    stage, others = scenes(MHACase((), DECODE, **SMALL), 1, device)
    capture = MHACapture(stage, 4, 1)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    capture.replay(others[0])
    assert stage.written() == sum(others[0].totals) - 4
    slots.copy_(others[0].batch().geometry.new_slots())
    assert relative_error(capture.replay(others[0]), others[0].wanted()[0]) <= TOLERANCE[stage.case.dtype]
    assert stage.written() == sum(others[0].totals)


class CapturedExtend:
    """An extend of fixed memory, replayed with other divisions of its rows among its requests."""

    def __init__(self, stage: MHAScene, requests: int, rows: int) -> None:
        self.stage, case, device = stage, stage.case, stage.device
        shape = {"dtype": stage.dtype, "device": device}
        self.q = torch.zeros(rows, case.heads, case.head_dim, **shape)
        self.k, self.v = (torch.zeros(rows, case.kv_heads, case.head_dim, **shape) for _ in range(2))
        self.lse = torch.zeros(rows, case.heads, device=device)
        zeros, pages = torch.zeros(requests, dtype=torch.int32, device=device), 40
        self.geometry = Geometry(
            case.mode,
            torch.full((requests, pages), 1 << 30, dtype=torch.int32, device=device),
            zeros,
            case.page_size,
            rows=rows,
            max_seq_len=pages * case.page_size,
            max_new=rows,
            new_lens=zeros.clone(),
            captured=True,
        )
        self.batch = ForwardBatch(self.geometry)
        self.graph: torch.cuda.CUDAGraph | None = None
        stage.backend.init_cuda_graph_state(requests, rows)
        self.plan = stage.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        with_plan(self.batch, self.plan)
        self.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def run(self) -> None:
        backend, extras = self.stage.backend, ForwardExtras(lse=self.lse)
        backend.init_forward_metadata_in_graph(self.batch)
        self.out = backend.forward_extend(self.q, self.k, self.v, self.stage.layer, self.batch, extras=extras)

    def replay(self, other: MHAScene) -> tuple[torch.Tensor, torch.Tensor]:
        table, seq_lens, new_lens = self.geometry.page_table, self.geometry.seq_lens, self.geometry.new_lens
        real = len(other.totals)
        for lens, numbers in ((seq_lens, other.totals), (new_lens, other.new)):
            lens.zero_()
            lens[:real] = torch.tensor(numbers, dtype=torch.int32)
        table.fill_(1 << 30)
        table[:real, : other.page_table.shape[1]] = other.page_table.to(table.device)
        for target, rows in zip((self.q, self.k, self.v), (other.q, *other.new_rows()), strict=True):
            target.fill_(NAN)
            target[: len(rows)] = rows
        for kind in ("keys", "values"):
            memory, source = (getattr(pool, kind)(LAYER) for pool in (self.stage.pool, other.pool))
            memory.fill_(NAN)
            memory[: len(source)] = source
        assert self.stage.backend.init_forward_metadata_out_graph(self.batch) is self.plan
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return self.out, self.lse


def two_lanes(mode: ForwardMode, new: int, device: str) -> tuple[MHAScene, MHAScene]:
    """Two batches of one shape over one pool and one backend: each has half of the requests."""
    longest = 90 if device == "cpu" else 20000
    given = tuple((max(longest - 31 * number, 0), new) for number in range(4))
    stage = scene(MHACase(given, mode, lanes=2, lse=False, **SMALL), device)
    halves = []
    for mine in (slice(0, 2), slice(2, 4)):
        half = copy(stage)
        half.case = replace(stage.case, lengths=stage.case.lengths[mine])
        half.new, half.totals, half.page_table = stage.new[mine], stage.totals[mine], stage.page_table[mine]
        half.keys, half.values = stage.keys[mine], stage.values[mine]
        half.q = stage.q[mine.start * new : mine.stop * new]
        halves.append(half)
    return halves[0], halves[1]


class TestLanes:
    """Plans of one shape, alive and running at the same time."""

    def test_each_lane_has_partial_results_and_counters_of_its_own(self):
        stage, other = two_lanes(DECODE, 1, "cpu")
        metadata = []
        for lane, half in enumerate((stage, other)):
            batch = half.batch()
            batch.geometry = replace(batch.geometry, lane=lane)
            metadata.append(half.backend.init_forward_metadata(batch).metadata)
        (first, second) = (next(iter(each.schedules.values()))[1] for each in metadata)
        for name in ("values", "weights", "counters"):
            assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()

    @on_a_gpu
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_graphs_on_two_streams(self, mode, new, device):
        """Both at once, many times over: each result is float64's."""
        halves = two_lanes(mode, new, device)
        lanes = [MHACapture(half, 2, new, lane) for lane, half in enumerate(halves)]
        for number, lane in enumerate(lanes):
            for target, source in lane.copies(halves[number]):
                target.copy_(source)
            lane.capture(reserve=number == 0)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        found: list[list[torch.Tensor]] = [[], []]
        for _ in range(20):
            for number, (lane, stream) in enumerate(zip(lanes, streams, strict=True)):
                with torch.cuda.stream(stream):
                    lane.graph.replay()
                    found[number].append(lane.out.clone())
        torch.cuda.synchronize()
        for outs, half in zip(found, halves, strict=True):
            wanted = half.wanted()[0]
            assert max(relative_error(out, wanted) for out in outs) <= 5e-3
