"""A captured batch of an MLA backend on a scene, replayed with the batches of other scenes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnplug import ForwardBatch
from support.mla_scene import LAYER, NAN, MLAScene


class Capture:
    """A captured batch of fixed memory, into which the batches of scenes are copied before each replay."""

    def __init__(self, scene: MLAScene, requests: int, per_request: int) -> None:
        self.scene, self.backend = scene, scene.backend
        device, case = scene.device, scene.case
        self.rows, self.per_request = requests * per_request, per_request
        self.q = torch.zeros(self.rows, *scene.q.shape[1:], dtype=scene.dtype, device=device)
        self.k = torch.full((self.rows, 1, case.dims.row_dim), NAN, dtype=scene.dtype, device=device)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        width = 4096 // case.page_size
        self.batch = ForwardBatch(
            forward_mode=case.mode,
            input_ids=torch.zeros(self.rows, dtype=torch.int64, device=device),
            page_table=torch.full((requests, width), 1 << 30, dtype=torch.int32, device=device),
            seq_lens=torch.full((requests,), fill, dtype=torch.int32, device=device),
            seq_lens_cpu=torch.full((requests,), fill, dtype=torch.int32),
        )
        self.graph = None

    def capture(self) -> None:
        self.backend.init_cuda_graph_state(self.batch.batch_size + 1, self.rows + 3)
        self.batch.plan = self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.plan = self.batch.plan
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
        self.backend.init_forward_metadata_in_graph(self.batch)
        forward = self.backend.forward_decode if self.batch.forward_mode.is_decode else self.backend.forward_extend
        self.out = forward(self.q, self.k, None, self.scene.layer, self.batch)

    def stage(self, scene: MLAScene) -> Callable[[], torch.Tensor]:
        """Another scene's batch, of fewer requests perhaps, made ready on the device; call it to replay it there."""
        real, batch, device = len(scene.totals), self.batch, scene.device
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lens = torch.full((batch.batch_size,), fill, dtype=torch.int32)
        lens[:real] = torch.tensor(scene.totals, dtype=torch.int32)
        table = torch.full_like(batch.page_table, 1 << 30)
        table[:real, : scene.page_table.shape[1]] = scene.page_table.to(device)
        q, k = torch.full_like(self.q, NAN), torch.full_like(self.k, NAN)
        q[: len(scene.q)], k[: len(scene.q), 0] = scene.q, scene.new_rows()
        memory = self.scene.pool.rows(LAYER)
        rows = torch.empty_like(memory).copy_(torch.tensor(NAN))
        rows[: len(scene.pool.rows(LAYER))] = scene.pool.rows(LAYER)
        on_device = lens.to(device)

        def replay() -> torch.Tensor:
            batch.seq_lens_cpu = lens
            for target, source in (
                (batch.seq_lens, on_device),
                (batch.page_table, table),
                (self.q, q),
                (self.k, k),
                (memory, rows),
            ):
                target.copy_(source)
            assert self.backend.init_forward_metadata_out_graph(batch) is self.plan
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()
            return self.out

        return replay

    def replay(self, scene: MLAScene) -> torch.Tensor:
        return self.stage(scene)()
