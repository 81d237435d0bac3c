"""Captured batches: one graph serves other lengths and pages. On a CPU the calls are made again, not replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, DType, ForwardMode, GraphLevel
from flash_references import build, on_cpu, on_devices
from support.devices import nothing_waits
from support.mha_scene import LAYER, MHACase, MHAScene
from support.mla_scene import NAN, relative_error

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
everywhere = on_devices("fa4")


class Capture:
    """A batch at fixed addresses on one scene, captured (or not) with the calls that a step makes."""

    def __init__(self, scene: MHAScene, requests: int, per_request: int) -> None:
        self.scene, self.backend = scene, scene.backend
        self.rows = requests * per_request
        batch = scene.batch()
        self.batch = replace(batch, input_ids=batch.input_ids[: self.rows])
        case, device = scene.case, scene.device
        shape = {"dtype": scene.dtype, "device": device}
        self.q = torch.zeros(self.rows, case.heads, case.head_dim, **shape)
        self.k = torch.zeros(self.rows, case.kv_heads, case.head_dim, **shape)
        self.v = torch.zeros(self.rows, case.kv_heads, scene.layer.v_head_dim, **shape)
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> Capture:
        self.backend.init_cuda_graph_state(self.batch.batch_size + 1, self.rows + 3)
        self.batch.plan = self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.plan = self.batch.plan
        if self.scene.device.type == "cpu":
            self.run()
            return self
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        return self

    def run(self) -> None:
        self.backend.init_forward_metadata_in_graph(self.batch)
        forward = self.backend.forward_decode if self.batch.forward_mode.is_decode else self.backend.forward_extend
        self.out = forward(self.q, self.k, self.v, self.scene.layer, self.batch)

    def stage(self, scene: MHAScene) -> Callable[[], torch.Tensor]:
        """Another scene's batch, of fewer requests perhaps, made ready on the device; call it to replay it there."""
        real, batch, device = len(scene.totals), self.batch, scene.device
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lens = torch.full((batch.batch_size,), fill, dtype=torch.int32)
        lens[:real] = torch.tensor(scene.totals, dtype=torch.int32)
        table = torch.full_like(batch.page_table, 1 << 30)
        table[:real, : scene.page_table.shape[1]] = scene.page_table.to(device)
        copies = [(batch.seq_lens, lens.to(device)), (batch.page_table, table)]
        for target, rows in zip((self.q, self.k, self.v), (scene.q, *scene.new_rows()), strict=True):
            source = torch.full_like(target, NAN)
            source[: len(rows)] = rows
            copies.append((target, source))
        for target, other in (
            (self.scene.pool.keys(LAYER), scene.pool.keys(LAYER)),
            (self.scene.pool.values(LAYER), scene.pool.values(LAYER)),
        ):
            source = torch.full_like(target, NAN)
            source[: len(other)] = other
            copies.append((target, source))

        def replay() -> torch.Tensor:
            batch.seq_lens_cpu = lens
            for target, source in copies:
                target.copy_(source)
            assert self.backend.init_forward_metadata_out_graph(batch) is self.plan
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()
            return self.out

        return replay

    def replay(self, scene: MHAScene) -> torch.Tensor:
        return self.stage(scene)()


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
    # Every page size and every shape in both modes, and of their pairs two in five.
    [(DECODE, 1, *pair) for pair in zip(PAGE_SIZES, SHAPES, strict=True)]
    + [(VERIFY, 4, *pair) for pair in zip(PAGE_SIZES, reversed(SHAPES), strict=True)],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, page_size, shape, kernel, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(MHACase((), mode, page_size, **SHAPES[shape]), new, device)
    captured = Capture(stage, requests=4, per_request=new).capture()
    cached = captured.plan.metadata.cached
    calls = [call for call in (cached.whole, cached.divided and cached.divided.call) if call is not None]
    assert calls
    held = [cached.new_slots, *(tensor for call in calls for tensor in (call.page_table, call.kv_lens))]
    addresses = [tensor.data_ptr() for tensor in held]
    for other in others:
        out = captured.replay(other)
        wanted = other.wanted()[0]
        assert relative_error(out[: len(wanted)], wanted) <= (1e-6 if device == "cpu" else 5e-3)
        assert (out[len(wanted) :] == 0).all()
        assert stage.written() == sum(other.totals)
        assert [tensor.data_ptr() for tensor in held] == addresses


@everywhere
def test_decode_is_divided_as_the_longest_context_asks(kernel, device):
    """The parts are counted at capture; which pages each has is found when the graph runs."""
    stage, others = scenes(MHACase((), DECODE, 128, 8, 2, 64), 1, device)
    captured = Capture(stage, requests=4, per_request=1).capture()
    cached = captured.plan.metadata.cached
    assert cached.divided is not None and cached.whole is None
    assert cached.divided.call.page_table.shape[0] == 4 * cached.divided.count
    assert relative_error(captured.replay(others[0]), others[0].wanted()[0]) <= (1e-6 if device == "cpu" else 5e-3)


@everywhere
def test_an_undivided_batch_is_read_by_its_own_table(kernel, device):
    """No copy of it is made in the graph: where pages need not be cut, kernels read what the batch has."""
    stage, _ = scenes(MHACase((), VERIFY, 64, 8, 2, 64), 4, device)
    captured = Capture(stage, requests=4, per_request=4).capture()
    whole = captured.plan.metadata.cached.whole
    assert whole.page_table is captured.batch.page_table
    assert whole.kv_lens is captured.batch.seq_lens


@everywhere
def test_replay_planning_waits_for_nothing(kernel, device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(MHACase((), DECODE, 64), 1, device)
    captured = Capture(stage, requests=4, per_request=1).capture()
    captured.replay(others[0])
    captured.batch.seq_lens_cpu = None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


@everywhere
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(kernel, device):
    """Replays queued one behind the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(MHACase((), DECODE, 64), 1, device)
    captured = Capture(stage, requests=4, per_request=1).capture()
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
    def stage(self, mode: ForwardMode = DECODE, lengths=((20, 1), (9, 1)), kernel: str = "fa4") -> MHAScene:
        return MHAScene(MHACase(lengths, mode, dtype=DType.FLOAT32), "cpu", build(kernel))

    def test_graph_planning_without_limits_says_what_to_call(self):
        stage = self.stage()
        with pytest.raises(BackendError, match="init_cuda_graph_state"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def test_a_kernel_that_cannot_be_captured_says_so(self):
        stage = self.stage(kernel="torch")
        assert stage.backend.claims.cuda_graph is GraphLevel.NEVER
        with pytest.raises(BackendError, match="kernel=torch cannot be captured; use kernel=fa4"):
            stage.backend.init_cuda_graph_state(4, 4)
