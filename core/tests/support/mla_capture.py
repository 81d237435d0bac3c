"""An MLA batch captured in a CUDA graph and replayed with other scenes' batches; on a CPU it is run instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attnplug import AttentionBackend, BackendContext, Plan
from support.batches import captured, padded_tree, static_tree, with_plan
from support.devices import nothing_is_zero_by_chance
from support.mla_scene import LAYER, NAN, MLACase, MLAScene, relative_error


class MLACapture:
    """A captured batch of fixed memory, into which the batches of scenes are copied before each replay."""

    def __init__(self, scene: MLAScene, requests: int, per_request: int) -> None:
        self.scene, self.backend = scene, scene.backend
        device, case = scene.device, scene.case
        self.rows, self.per_request = requests * per_request, per_request
        self.q = torch.zeros(self.rows, *scene.q.shape[1:], dtype=scene.dtype, device=device)
        self.k = torch.full((self.rows, 1, case.dims.row_dim), NAN, dtype=scene.dtype, device=device)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        width = 4096 // case.page_size
        self.batch = captured(
            case.mode, requests, per_request, pages=width, page_size=case.page_size, device=device, fill=fill
        )
        self.batch.geometry = replace(self.batch.geometry, tree=static_tree(self.batch.geometry, case.trees))
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        self.backend.init_cuda_graph_state(self.batch.batch_size + 1, self.rows + 3)
        plan = self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        with_plan(self.batch, plan)
        self.plan = _of_one(plan)
        if self.scene.device.type == "cpu":
            self.run()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        forward = self.backend.forward_decode if self.batch.forward_mode.is_decode else self.backend.forward_extend
        with nothing_is_zero_by_chance(self.scene.device):
            self.backend.init_forward_metadata_in_graph(self.batch)
            self.out = forward(self.q, self.k, None, self.scene.layer, self.batch)

    def stage(self, scene: MLAScene) -> Callable[[], torch.Tensor]:
        """Another scene's batch, of fewer requests perhaps, made ready on the device; call it to replay it there."""
        real, batch, device = len(scene.totals), self.batch, scene.device
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lens = torch.full((batch.batch_size,), fill, dtype=torch.int32)
        lens[:real] = torch.tensor(scene.totals, dtype=torch.int32)
        table = torch.full_like(batch.geometry.page_table, 1 << 30)
        table[:real, : scene.page_table.shape[1]] = scene.page_table.to(device)
        q, k = torch.full_like(self.q, NAN), torch.full_like(self.k, NAN)
        q[: len(scene.q)], k[: len(scene.q), 0] = scene.q, scene.new_rows()
        memory = self.scene.pool.rows(LAYER)
        rows = torch.full(memory.shape, NAN, device=device).to(memory.dtype)
        rows[: len(scene.pool.rows(LAYER))] = scene.pool.rows(LAYER)
        on_device, tree = lens.to(device), batch.geometry.tree
        trees = [] if tree is None else [(tree, padded_tree(tree, scene.case.trees))]

        def replay() -> torch.Tensor:
            for target, source in (
                (batch.geometry.seq_lens, on_device),
                (batch.geometry.page_table, table),
                (self.q, q),
                (self.k, k),
                (memory, rows),
                *trees,
            ):
                target.copy_(source)
            assert _of_one(self.backend.init_forward_metadata_out_graph(batch)) is self.plan
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()
            return self.out

        return replay

    def replay(self, scene: MLAScene) -> torch.Tensor:
        return self.stage(scene)()


def replay_scenes(
    case: MLACase, device: str, build: Callable[[BackendContext], AttentionBackend]
) -> tuple[MLAScene, list[MLAScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests.

    They are as ``case`` says, but for the lengths; new tokens are as many as its first request has.
    """
    new = case.lengths[0][1]
    prefixes = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [2000, 900], [0, 1, 2, 3]]
    others = [
        MLAScene(replace(case, lengths=tuple((prefix, new) for prefix in some), seed=seed), device, build)
        for seed, some in enumerate(prefixes)
    ]
    return MLAScene(replace(case, lengths=((4000, new),) * 4), device, build), others


def check_replays(stage: MLAScene, others: list[MLAScene]) -> None:
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    capture = MLACapture(stage, requests=4, per_request=stage.new[0])
    capture.capture()
    address = capture.plan.new_slots.data_ptr()
    for other in others:
        out = capture.replay(other)
        wanted = other.wanted_absorbed()[0]
        assert relative_error(out[: len(wanted)], wanted) <= (1e-6 if stage.device.type == "cpu" else 5e-3)
        assert (out[len(wanted) :] == 0).all()
        written = (~stage.pool.rows(LAYER).float().isnan()).any(-1).sum()
        assert int(written) == sum(other.totals)
        assert capture.plan.new_slots.data_ptr() == address


def _of_one(plan: Plan) -> Plan:
    """The plan of the backend that runs it: of a wrapper's, its one part."""
    return plan.parts[0] if plan.parts else plan
