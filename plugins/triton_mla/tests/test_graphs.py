"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, DType, ForwardBatch, ForwardExtras, ForwardMode, PlanError
from attnplug_triton_mla.configurations import Configuration
from attnplug_triton_mla.options import TritonMLAOptions
from interpreted_mla import build, on, scene
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
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
    captured.batch.seq_lens_cpu = None
    numbers = captured.plan.metadata.schedule.numbers.fill_(-7)
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan
    assert (numbers == -7).all()


@on_a_gpu
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one behind the other, each with lengths of its own, while the device is busy."""
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
        zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        self.batch = ForwardBatch(
            forward_mode=mode,
            input_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            page_table=torch.full((requests, 40), 1 << 30, dtype=torch.int32, device=device),
            seq_lens=zeros,
            extend_seq_lens=zeros.clone(),
            captured=True,
        )
        self.graph: torch.cuda.CUDAGraph | None = None
        stage.backend.init_cuda_graph_state(requests, rows)
        self.batch.plan = stage.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
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
        batch, real = self.batch, len(other.totals)
        for target in (batch.seq_lens, batch.extend_seq_lens):
            target.zero_()
        batch.page_table.fill_(1 << 30)
        batch.seq_lens[:real] = torch.tensor(other.totals, dtype=torch.int32)
        batch.extend_seq_lens[:real] = torch.tensor(other.new, dtype=torch.int32)
        batch.page_table[:real, : other.page_table.shape[1]] = other.page_table.to(batch.page_table.device)
        self.q.fill_(NAN)
        self.k.fill_(NAN)
        self.q[: len(other.q)], self.k[: len(other.q), 0] = other.q, other.new_rows()
        memory = self.stage.pool.rows(LAYER)
        memory.fill_(NAN)
        memory[: len(other.pool.rows(LAYER))] = other.pool.rows(LAYER)
        assert self.stage.backend.init_forward_metadata_out_graph(batch) is batch.plan
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
    """Nothing of a page table is kept with the plan that two captures share."""
    stage, others = scenes(DECODE, 1, device)
    first, second = (MLACapture(stage, requests=4, per_request=1) for _ in range(2))
    first.capture()
    stage.backend.init_cuda_graph_state = lambda *_: None
    second.capture()
    assert first.plan is second.plan
    full = next(other for other in others if len(other.totals) == 4)
    first.batch.page_table.fill_(1 << 30)
    assert relative_error(second.replay(full), full.wanted_absorbed()[0]) <= (1e-6 if device == "cpu" else 5e-3)


class TestWrongUse:
    """What core refuses for every backend is tested there; here, that it is asked."""

    def stage(self, mode: ForwardMode = DECODE, new: int = 1) -> MLAScene:
        return scene(MLACase(((20, new), (9, new)), mode, heads=2), "cpu")

    def test_graph_planning_without_memory_says_what_to_call(self):
        stage = self.stage()
        with pytest.raises(BackendError, match="init_cuda_graph_state"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def test_more_than_was_announced_is_refused(self):
        stage = self.stage(VERIFY, 3)
        stage.backend.init_cuda_graph_state(4, 5)
        with pytest.raises(PlanError, match="2 requests, 6 rows does not fit the memory for graphs, of 4 requests, 5"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def test_an_extend_needs_its_new_tokens(self):
        stage = self.stage(EXTEND)
        stage.backend.init_cuda_graph_state(4, 8)
        batch = stage.batch()
        batch.extend_seq_lens = None
        with pytest.raises(PlanError, match="captured extend needs extend_seq_lens"):
            stage.backend.init_forward_metadata_out_graph(batch, in_capture=True)
