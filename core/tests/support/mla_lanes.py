"""Two lanes of one MLA backend: plans of one shape alive at once, interleaved on a CPU, on two streams on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnplug import AttentionBackend, BackendContext, ForwardBatch
from attnplug.host import plan_forward
from support.batches import captured, with_plan
from support.devices import nothing_is_zero_by_chance
from support.mla_scene import MLACase, MLAScene, relative_error

RUNS = 20
"""Calls on each stream, enough that the two meet."""


class Lane:
    """One lane's half of a scene's requests, with its queries and new rows. Both halves have the same shape."""

    def __init__(self, scene: MLAScene, batch: ForwardBatch, rows: slice) -> None:
        self.scene, self.batch, self.rows = scene, batch, rows
        self.q, self.k = scene.q[rows].clone(), scene.new_rows()[rows].unsqueeze(1).clone()
        self.outs: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if scene.device.type == "cuda" else None

    def run(self) -> None:
        backend = self.scene.backend
        forward = backend.forward_decode if self.batch.forward_mode.is_decode else backend.forward_extend
        with nothing_is_zero_by_chance(self.scene.device):
            self.outs.append(forward(self.q, self.k, None, self.scene.layer, self.batch))

    def replay(self) -> None:
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
            self.outs.append(self.captured_out.clone())

    def capture(self) -> None:
        """From a batch of fixed memory, as a graph is captured with; then this lane's real batch is put there."""
        real, backend = self.batch.geometry, self.scene.backend
        self.batch = captured(
            real.mode,
            real.requests,
            real.max_new,
            pages=real.page_table.shape[1],
            page_size=real.page_size,
            device=real.device,
            fill=backend.get_cuda_graph_seq_len_fill_value(),
        )
        fixed = self.batch.geometry = replace(self.batch.geometry, lane=real.lane)
        with_plan(self.batch, backend.init_forward_metadata_out_graph(self.batch, in_capture=True))
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self._plan_and_run()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._plan_and_run()
            self.captured_out = self.outs[-1]
        fixed.page_table.copy_(real.page_table)
        fixed.seq_lens.copy_(real.seq_lens)
        self.outs.clear()

    def _plan_and_run(self) -> None:
        self.scene.backend.init_forward_metadata_in_graph(self.batch)
        self.run()


def two_lanes(scene: MLAScene) -> list[Lane]:
    """The first half of a scene's requests is one lane's, the second the other's."""
    halves = scene.batch().split(len(scene.totals) // 2, lanes=(0, 1))
    rows = halves[0].geometry.rows
    assert rows == halves[1].geometry.rows
    return [Lane(scene, batch, slice(n * rows, (n + 1) * rows)) for n, batch in enumerate(halves)]


def check_lanes(
    case: MLACase,
    device: str,
    build: Callable[[BackendContext], AttentionBackend],
    tolerance: float,
    *,
    graphs: bool | None = None,
) -> None:
    """Eager and captured, or one of them."""
    for captures in (False, True) if graphs is None else (graphs,):
        scene = MLAScene(replace(case, lanes=2), device, build)
        lanes = two_lanes(scene)
        if captures:
            geometry = lanes[0].batch.geometry
            scene.backend.init_cuda_graph_state(geometry.requests, geometry.rows)
            for lane in lanes:
                lane.capture()
            if device == "cpu":  # what a graph does first: both, before either runs
                for lane in lanes:
                    scene.backend.init_forward_metadata_in_graph(lane.batch)
        else:
            for lane in lanes:
                plan_forward(scene.backend, lane.batch)
        _run_at_once(lanes)
        wanted = scene.wanted_absorbed()[0]
        for lane in lanes:
            for out in lane.outs:
                assert relative_error(out, wanted[lane.rows].to(out.device)) <= tolerance, (captures, lane.rows)


def _run_at_once(lanes: list[Lane]) -> None:
    if lanes[0].stream is None:
        for lane in (*lanes, lanes[0]):
            lane.run()
        return
    torch.cuda.synchronize()
    for lane in lanes * RUNS:
        with torch.cuda.stream(lane.stream):
            lane.replay()
    torch.cuda.synchronize()
