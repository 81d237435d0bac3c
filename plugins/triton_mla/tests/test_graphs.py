"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import DType, ForwardBatch, ForwardExtras, ForwardMode, Geometry
from attnplug.host import plan_forward
from attnplug_triton_mla.configurations import Configuration
from attnplug_triton_mla.options import TritonMLAOptions
from interpreted_mla import build, on, scene
from support.batches import with_plan
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
from support.mla_lanes import check_lanes, two_lanes
from support.mla_scene import LAYER, NAN, MLACase, MLAScene, relative_error

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND, MIXED = ForwardMode.EXTEND, ForwardMode.MIXED
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


def coarse(*_: int, **__: bool) -> Configuration:
    """Long steps, since what is interpreted costs by the step."""
    return Configuration(16, 128, 4, 2, merge="last")


def scenes(mode: ForwardMode, new: int, device: str, **changes):
    case = replace(on(MLACase(((0, new),), mode, heads=2), device), **changes)
    return replay_scenes(case, device, lambda context: build(context, coarse if device == "cpu" else None))


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4), (DRAFT_EXTEND, 2)])
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, device):
    check_replays(*scenes(mode, new, device))


@on_a_gpu
@pytest.mark.parametrize(
    ("heads", "page_size", "invariant"),
    [(8, 1, False), (16, 64, False), (16, 64, True), (24, 16, False), (128, 64, False), (128, 64, True)],
)
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4), (DRAFT_EXTEND, 2)])
def test_captures_of_every_shape(mode, new, heads, page_size, invariant, device):
    options = TritonMLAOptions(batch_invariant=invariant)
    check_replays(*scenes(mode, new, device, heads=heads, page_size=page_size, options=options))


@on_a_gpu
def test_a_captured_fp8_cache(device):
    check_replays(*scenes(DECODE, 1, device, heads=16, kv_dtype=DType.FLOAT8_E4M3, kv_scale=0.5))


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share partial results and counters, and each is planned anew in its own graph."""
    stage, others = scenes(DECODE, 1, device)
    large, small = (MLACapture(stage, requests, 1) for requests in (4, 2))
    large.capture()
    stage.backend.init_cuda_graph_state = lambda *_: None
    small.capture()
    four = [other for other in others if len(other.totals) == 4][:2]
    alone = [large.replay(other).clone() for other in four]
    for other, wanted in zip(four, alone, strict=True):
        small.replay(next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(large.replay(other), wanted)


@on_every_device
def test_a_replay_is_as_a_batch_that_was_not_captured(device):
    """Equal bits: the schedule is the same, made from the same numbers."""
    stage, others = scenes(DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    full = next(other for other in others if len(other.totals) == 4)
    out = captured.replay(full).clone()
    assert torch.equal(out, full.absorbed()[0])


@on_every_device
def test_replay_planning_waits_for_nothing_and_launches_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    numbers = captured.plan.metadata.schedule.numbers.fill_(-7)
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan
    assert (numbers == -7).all()


@on_a_gpu
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one after the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(DECODE, 1, device, heads=16)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    ready = [captured.stage(other) for other in others if len(other.totals) == 4]
    alone = [replay().clone() for replay in ready]
    busy = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        busy = busy @ busy / 8192
    assert not torch.cuda.current_stream().query()
    with nothing_waits(device):
        queued = [replay().clone() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


class CapturedExtend:
    """An extend of fixed memory, replayed with other divisions of its rows among its requests."""

    def __init__(self, stage: MLAScene, requests: int, rows: int, mode: ForwardMode) -> None:
        self.stage, device = stage, stage.device
        self.q = torch.zeros(rows, *stage.q.shape[1:], dtype=stage.dtype, device=device)
        self.k = torch.zeros(rows, 1, stage.case.dims.row_dim, dtype=stage.dtype, device=device)
        self.lse = torch.zeros(rows, stage.case.heads, device=device)
        zeros, pages, page_size = torch.zeros(requests, dtype=torch.int32, device=device), 40, stage.case.page_size
        table = torch.full((requests, pages), 1 << 30, dtype=torch.int32, device=device)
        self.geometry = Geometry(
            mode,
            table,
            zeros,
            page_size,
            rows=rows,
            max_seq_len=pages * page_size,
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
        self.out = backend.forward_extend(self.q, self.k, None, self.stage.layer, self.batch, extras=extras)

    def replay(self, other: MLAScene) -> tuple[torch.Tensor, torch.Tensor]:
        table, seq_lens, new_lens = self.geometry.page_table, self.geometry.seq_lens, self.geometry.new_lens
        real = len(other.totals)
        for lens, numbers in ((seq_lens, other.totals), (new_lens, other.new)):
            lens.zero_()
            lens[:real] = torch.tensor(numbers, dtype=torch.int32)
        table.fill_(1 << 30)
        table[:real, : other.page_table.shape[1]] = other.page_table.to(table.device)
        self.q.fill_(NAN)
        self.k.fill_(NAN)
        self.q[: len(other.q)], self.k[: len(other.q), 0] = other.q, other.new_rows()
        memory = self.stage.pool.rows(LAYER)
        memory.fill_(NAN)
        memory[: len(other.pool.rows(LAYER))] = other.pool.rows(LAYER)
        assert self.stage.backend.init_forward_metadata_out_graph(self.batch) is self.plan
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return self.out, self.lse


@on_every_device
@pytest.mark.parametrize("mode", [EXTEND, MIXED])
def test_a_captured_extend_serves_any_division_of_its_rows(mode, device):
    """ALWAYS: prompts of other lengths, after other prefixes, fewer of them, and rows that are padding."""
    divisions = [((0, 12), (30, 7), (5, 1)), ((100, 1), (0, 20)), ((3, 1), (64, 1), (0, 1), (70, 0)), ((200, 9),)]
    case = on(MLACase(((0, 24),), mode, page_size=16, heads=2), device)
    stage = scene(replace(case, lengths=((500, 4),) * 4), device)
    captured = CapturedExtend(stage, requests=4, rows=24, mode=mode)
    for seed, division in enumerate(divisions):
        other = scene(replace(case, lengths=division, seed=seed), device)
        out, lse = captured.replay(other)
        wanted, wanted_lse = other.wanted_absorbed()
        rows, tolerance = len(wanted), 1e-6 if device == "cpu" else 5e-3
        assert relative_error(out[:rows], wanted) <= tolerance and (out[rows:] == 0).all()
        assert relative_error(lse[:rows], wanted_lse) <= tolerance and (lse[rows:] == float("-inf")).all()
        assert int((~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()) == sum(other.totals)


@on_every_device
def test_a_second_capture_of_a_shape_reads_its_own_page_table(device):
    """Two captures share a plan, and each graph reads the memory that it was captured with."""
    stage, others = scenes(DECODE, 1, device)
    first, second = (MLACapture(stage, requests=4, per_request=1) for _ in range(2))
    first.capture()
    stage.backend.init_cuda_graph_state = lambda *_: None
    second.capture()
    assert first.plan is second.plan
    full = next(other for other in others if len(other.totals) == 4)
    first.batch.geometry.page_table.fill_(1 << 30)
    assert relative_error(second.replay(full), full.wanted_absorbed()[0]) <= (1e-6 if device == "cpu" else 5e-3)


@on_every_device
def test_a_replay_writes_new_rows_where_the_host_says(device):
    """Its slots are copied inside the graph, from wherever the batch has them then."""
    stage, _ = scenes(DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    slots = torch.tensor([64, -1, 7, -1], device=device)
    captured.batch.geometry = replace(captured.batch.geometry, slots=slots)
    captured.capture()
    assert captured.plan.new_slots.tolist() == slots.tolist() and captured.plan.new_slots is not slots
    slots.copy_(torch.tensor([-1, 3, -1, 9]))
    captured.backend.init_forward_metadata_in_graph(captured.batch)
    assert captured.plan.new_slots.tolist() == [-1, 3, -1, 9]


class TestLanes:
    """Plans of one shape, alive and running at the same time."""

    def case(self, mode: ForwardMode, new: int, device: str) -> MLACase:
        longest = 150 if device == "cpu" else 30000
        return MLACase(tuple((prefix, new) for prefix in (longest, 5, 64, longest // 2)), mode, heads=2, lanes=2)

    @on_every_device
    @pytest.mark.parametrize(("mode", "new", "graphs"), [(DECODE, 1, None), (EXTEND, 5, False), (VERIFY, 3, True)])
    def test_at_the_same_time(self, mode, new, graphs, device):
        case = on(self.case(mode, new, device), device)
        check_lanes(case, device, build, 1e-6 if device == "cpu" else 5e-3, graphs=graphs)

    def test_one_runs_while_parts_of_the_other_wait_to_be_merged(self, monkeypatch):
        """Partial results are a lane's own."""
        from attnplug_triton_mla import backend

        stage = scene(self.case(DECODE, 1, "cpu"), "cpu")
        lanes, merge = two_lanes(stage), backend.launch_merge

        def merge_late(*arguments):
            monkeypatch.setattr(backend, "launch_merge", merge)
            lanes[1].run()
            merge(*arguments)

        for lane in lanes:
            plan_forward(stage.backend, lane.batch)
        monkeypatch.setattr(backend, "launch_merge", merge_late)
        lanes[0].run()
        for lane in lanes:
            assert relative_error(lane.outs[0], stage.wanted_absorbed()[0][lane.rows]) <= 1e-6
