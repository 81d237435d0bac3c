"""Captured batches: one graph serves other lengths and pages. On a CPU the calls are made again, not replayed."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
import torch

from attnplug import DType, ForwardMode, GraphLevel, PlanError
from attnplug.host import plan_forward
from flash_references import build, on_cpu, on_devices
from support.batches import with_plan
from support.devices import DEVICES, nothing_waits
from support.mha_capture import MHACapture
from support.mha_scene import MHACase, MHAScene
from support.mla_scene import relative_error

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
everywhere = on_devices("fa4")


def scenes(case: MHACase, new: int, device: str) -> tuple[MHAScene, list[MHAScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    case = on_cpu(case) if device == "cpu" else case
    prefixes = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [2000, 900], [0, 1, 2, 3]]
    if device == "cpu":
        prefixes = [[300, 5, 64, 127], [63], [500, 90], [0, 1, 2, 3]]
    longest = max(max(some) for some in prefixes)
    stage = MHAScene(replace(case, lengths=((2 * longest, new),) * 4), device, build("fa4"))
    others = [
        MHAScene(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed), device, build("fa4"))
        for seed, some in enumerate(prefixes)
    ]
    return stage, others


SHAPES = {
    "gqa": {"heads": 8, "kv_heads": 2, "head_dim": 64},
    "mha": {"heads": 8, "kv_heads": 8, "head_dim": 128},
    "mqa": {"heads": 16, "kv_heads": 1, "head_dim": 256},
    "window": {"heads": 8, "kv_heads": 2, "head_dim": 64, "window": 100},
    "192-128": {"heads": 8, "kv_heads": 2, "head_dim": 192, "v_head_dim": 128},
}
PAGE_SIZES = [1, 16, 64, 128, 256]


@everywhere
@pytest.mark.parametrize(
    ("mode", "new", "page_size", "shape"),
    # What the conformance kit does not capture: windows, other widths, and pages of a tile.
    [(DECODE, 1, 64, "window"), (VERIFY, 4, 128, "192-128")],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, page_size, shape, kernel, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(MHACase((), mode, page_size, **SHAPES[shape]), new, device)
    capture = MHACapture(stage, requests=4, per_request=new).capture()
    cached = capture.plan.metadata.cached
    calls = [call for call in (cached.whole, cached.divided and cached.divided.call) if call is not None]
    assert calls
    held = [capture.plan.new_slots, *(tensor for call in calls for tensor in (call.page_table, call.kv_lens))]
    addresses = [tensor.data_ptr() for tensor in held]
    for other in others:
        out = capture.replay(other)
        wanted = other.wanted()[0]
        assert relative_error(out[: len(wanted)], wanted) <= (1e-6 if device == "cpu" else 5e-3)
        assert (out[len(wanted) :] == 0).all()
        assert stage.written() == sum(other.totals)
        assert [tensor.data_ptr() for tensor in held] == addresses


@everywhere
def test_decode_is_divided_as_the_longest_context_asks(kernel, device):
    """The parts are counted at capture; which pages each has is found when the graph runs."""
    stage, others = scenes(MHACase((), DECODE, 128, 8, 2, 64), 1, device)
    capture = MHACapture(stage, requests=4, per_request=1).capture()
    cached = capture.plan.metadata.cached
    assert cached.divided is not None and cached.whole is None
    assert cached.divided.call.page_table.shape[0] == 4 * cached.divided.count
    assert relative_error(capture.replay(others[0]), others[0].wanted()[0]) <= (1e-6 if device == "cpu" else 5e-3)


@everywhere
def test_an_undivided_batch_is_read_by_its_own_table(kernel, device):
    """No copy of it is made in the graph: where pages need not be cut, kernels read what the batch has."""
    stage, _ = scenes(MHACase((), VERIFY, 64, 8, 2, 64), 4, device)
    capture = MHACapture(stage, requests=4, per_request=4).capture()
    whole = capture.plan.metadata.cached.whole
    assert whole.page_table is capture.batch.geometry.page_table
    assert whole.kv_lens is capture.batch.geometry.seq_lens


@everywhere
def test_replay_planning_waits_for_nothing(kernel, device):
    """Nothing is sent, nothing read back, and the host knows no length."""
    stage, others = scenes(MHACase((), DECODE, 64), 1, device)
    capture = MHACapture(stage, requests=4, per_request=1).capture()
    capture.replay(others[0])
    with nothing_waits(device):
        assert capture.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan


@everywhere
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(kernel, device):
    """Replays queued one after the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(MHACase((), DECODE, 64), 1, device)
    capture = MHACapture(stage, requests=4, per_request=1).capture()
    ready = [capture.stage(other) for other in others if len(other.totals) == 4]
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


@everywhere
def test_captured_rows_go_where_the_host_says(kernel, device):
    stage, others = scenes(MHACase((), DECODE, 64), 1, device)
    capture = MHACapture(stage, requests=4, per_request=1)
    slots = torch.full((4,), -1, dtype=torch.int64, device=device)
    capture.batch.geometry = replace(capture.batch.geometry, slots=slots)
    capture.capture()
    capture.replay(others[0])
    assert stage.written() == sum(others[0].totals) - 4
    slots.copy_(others[0].batch().geometry.new_slots())
    assert relative_error(capture.replay(others[0]), others[0].wanted()[0]) <= (1e-6 if device == "cpu" else 5e-3)
    assert stage.written() == sum(others[0].totals)


LANES = {"gqa": (DECODE, 64, 1, 300), "divided": (DECODE, 128, 1, 2000), "verify": (VERIFY, 16, 4, 300)}


def two_lanes(mode: ForwardMode, page_size: int, new: int, longest: int, device: str) -> tuple[MHAScene, MHAScene]:
    """Two batches of one shape over one pool and one backend: each has half of the requests."""
    case = MHACase(tuple((longest - 31 * number, new) for number in range(8)), mode, page_size, lanes=2, lse=False)
    stage = MHAScene(on_cpu(case) if device == "cpu" else case, device, build("fa4"))
    halves = []
    for mine in (slice(0, 4), slice(4, 8)):
        half = copy(stage)
        half.case = replace(stage.case, lengths=stage.case.lengths[mine])
        half.new, half.totals, half.page_table = stage.new[mine], stage.totals[mine], stage.page_table[mine]
        half.keys, half.values = stage.keys[mine], stage.values[mine]
        half.q = stage.q[mine.start * new : mine.stop * new]
        halves.append(half)
    return halves[0], halves[1]


@everywhere
@pytest.mark.parametrize("kind", LANES)
def test_captures_of_two_lanes_interleave(kind, kernel, device):
    """Plans of one shape in two lanes: both are filled before either runs, and each gives its own result."""
    new = LANES[kind][2]
    halves = two_lanes(*LANES[kind], device)
    lanes = [MHACapture(half, 4, new, lane) for lane, half in enumerate(halves)]
    lanes[0].backend.init_cuda_graph_state(4, 4 * new)
    for lane, half in zip(lanes, halves, strict=True):
        with_plan(lane.batch, lane.backend.init_forward_metadata_out_graph(lane.batch, in_capture=True))
        for target, source in lane.copies(half):
            target.copy_(source)
    assert lanes[0].batch.plan.attention is not lanes[1].batch.plan.attention
    for lane in lanes:
        lane.fill()
    for lane in lanes:
        lane.attend()
    for lane, half in zip(lanes, halves, strict=True):
        assert relative_error(lane.out, half.wanted()[0]) <= (1e-6 if device == "cpu" else 5e-3)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", LANES)
def test_lanes_run_on_two_streams(kind, eager, device):
    """Both at once, many times over: each result is float64's."""
    new = LANES[kind][2]
    halves = two_lanes(*LANES[kind], device)
    lanes = [MHACapture(half, 4, new, lane) for lane, half in enumerate(halves)]
    for number, lane in enumerate(lanes):
        for target, source in lane.copies(halves[number]):
            target.copy_(source)
        if eager:
            lane.batch = halves[number].batch()
            lane.batch.geometry = replace(lane.batch.geometry, lane=number)
            plan_forward(lane.backend, lane.batch)
            lane.attend()  # compiles what there is to compile
        else:
            lane.capture(reserve=number == 0)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for number, (lane, stream) in enumerate(zip(lanes, streams, strict=True)):
            with torch.cuda.stream(stream):
                lane.attend() if lane.graph is None else lane.graph.replay()
                found[number].append(lane.out.clone())
    torch.cuda.synchronize()
    for outs, half in zip(found, halves, strict=True):
        wanted = half.wanted()[0]
        assert max(relative_error(out, wanted) for out in outs) <= 5e-3


class TestWrongUse:
    def stage(self, kernel: str = "fa4") -> MHAScene:
        case = MHACase(((20, 4), (9, 4)), VERIFY, dtype=DType.FLOAT32)
        return MHAScene(case, "cpu", build(kernel))

    def test_a_kernel_that_cannot_be_captured_claims_no_graphs(self):
        assert self.stage("torch").backend.claims.cuda_graph is GraphLevel.NEVER
        assert self.stage("fa4").backend.claims.cuda_graph is GraphLevel.UNIFORM

    def test_a_shape_captured_anew_with_other_memory_is_refused(self):
        """Kernels read the batch's own table where it lies, and the plan of a shape is made once."""
        stage = self.stage()
        MHACapture(stage, 2, 4).capture()
        with pytest.raises(PlanError, match=r"captured in lane 0 with its page table and lengths in other memory"):
            MHACapture(stage, 2, 4).capture(reserve=False)
