"""Both halves of an MLA batch in two lanes of one backend: interleaved on a CPU, at the same time on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnplug import ForwardBatch
from support.batches import with_plan
from support.mla_scene import MLAScene, relative_error

_ROUNDS = 50


class Lanes:
    """A scene with an even number of requests, equally many new tokens each, whose halves have one shape."""

    def __init__(self, stage: MLAScene) -> None:
        self.stage, half = stage, len(stage.totals) // 2
        self.batches = stage.batch().split(half, lanes=(0, 1))
        rows = [batch.geometry.rows for batch in self.batches]
        self.q, self.k = stage.q.split(rows), stage.new_rows().unsqueeze(1).split(rows)
        self.wanted = stage.wanted_absorbed()[0].split(rows)

    def forward(self, lane: int) -> Tensor:
        backend, batch = self.stage.backend, self.batches[lane]
        run = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
        return run(self.q[lane], self.k[lane], None, self.stage.layer, batch)

    def plan(self, lane: int) -> None:
        with_plan(self.batches[lane], self.stage.backend.init_forward_metadata(self.batches[lane]))

    def check(self, lane: int, out: Tensor) -> None:
        tolerance = 1e-6 if self.stage.device.type == "cpu" else 5e-3
        assert relative_error(out, self.wanted[lane]) <= tolerance


def check_eager_lanes(stage: MLAScene) -> None:
    """Two plans of one shape are alive at once."""
    lanes = Lanes(stage)
    if stage.device.type == "cpu":
        for step in (lanes.plan, lanes.forward):
            made = [step(lane) for lane in (0, 1)]
        for lane, out in enumerate(made):
            lanes.check(lane, out)
        return

    def plan_and_run(lane: int) -> Tensor:
        lanes.plan(lane)
        return lanes.forward(lane)

    _on_two_streams(lanes, [plan_and_run, plan_and_run])


def check_captured_lanes(stage: MLAScene) -> None:
    """Two graphs of one shape, the second planned before the first has run."""
    lanes = Lanes(stage)
    backend, batches = stage.backend, lanes.batches
    backend.init_cuda_graph_state(batches[0].batch_size, batches[0].geometry.rows)
    for batch in batches:
        batch.geometry = replace(batch.geometry, captured=True, host=None)
        with_plan(batch, backend.init_forward_metadata_out_graph(batch, in_capture=True))
    if stage.device.type == "cpu":
        for batch in batches:
            backend.init_forward_metadata_in_graph(batch)
        for lane in (0, 1):
            lanes.check(lane, lanes.forward(lane))
        return
    _on_two_streams(lanes, [_graph(backend, batches[lane], lanes, lane) for lane in (0, 1)])


def _graph(backend, batch: ForwardBatch, lanes: Lanes, lane: int) -> Callable[[int], Tensor]:
    def run() -> Tensor:
        backend.init_forward_metadata_in_graph(batch)
        return lanes.forward(lane)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay(_: int) -> Tensor:
        graph.replay()
        return out.clone()

    return replay


def _on_two_streams(lanes: Lanes, bodies: list[Callable[[int], Tensor]]) -> None:
    for lane, body in enumerate(bodies):
        body(lane)  # compiles
    torch.cuda.synchronize()
    streams, outs = [torch.cuda.Stream() for _ in bodies], []
    for _ in range(_ROUNDS):
        for lane, body in enumerate(bodies):
            with torch.cuda.stream(streams[lane]):
                outs.append((lane, body(lane)))
    torch.cuda.synchronize()
    for lane, out in outs:
        lanes.check(lane, out)
