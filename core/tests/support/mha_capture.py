"""An MHA batch captured in a CUDA graph and replayed with other scenes' batches; on a CPU it is run instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attnplug import ForwardBatch
from support.batches import captured, padded_tree, static_tree, with_plan
from support.mha_scene import LAYER, MHAScene
from support.mla_scene import NAN


class MHACapture:
    """A batch at fixed addresses on one scene, in a lane, captured (or not) with the calls that a step makes."""

    def __init__(self, scene: MHAScene, requests: int, per_request: int, lane: int = 0) -> None:
        self.scene, self.backend = scene, scene.backend
        self.rows = requests * per_request
        case, device = scene.case, scene.device
        batch = captured(
            case.mode,
            requests,
            per_request,
            pages=-(-scene.context.limits.max_context // case.page_size),
            page_size=case.page_size,
            device=device,
            fill=self.backend.get_cuda_graph_seq_len_fill_value(),
        )
        self.batch = ForwardBatch(replace(batch.geometry, lane=lane, tree=static_tree(batch.geometry, case.trees)))
        shape = {"dtype": scene.dtype, "device": device}
        self.q = torch.zeros(self.rows, case.heads, case.head_dim, **shape)
        self.k = torch.zeros(self.rows, case.kv_heads, case.head_dim, **shape)
        self.v = torch.zeros(self.rows, case.kv_heads, scene.layer.v_head_dim, **shape)
        self.graph: torch.cuda.CUDAGraph | None = None

    def capture(self, *, reserve: bool = True) -> MHACapture:
        if reserve:
            self.backend.init_cuda_graph_state(self.batch.batch_size + 1, self.rows + 3)
        self.plan = self.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        with_plan(self.batch, self.plan)
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

    def fill(self) -> None:
        self.backend.init_forward_metadata_in_graph(self.batch)

    def attend(self) -> None:
        forward = self.backend.forward_decode if self.batch.forward_mode.is_decode else self.backend.forward_extend
        self.out = forward(self.q, self.k, self.v, self.scene.layer, self.batch)

    def run(self) -> None:
        self.fill()
        self.attend()

    def copies(self, scene: MHAScene) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What another scene's batch, of fewer requests perhaps, puts where this one's is."""
        real, geometry, device = len(scene.totals), self.batch.geometry, scene.device
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lens = torch.full((geometry.requests,), fill, dtype=torch.int32)
        lens[:real] = torch.tensor(scene.totals, dtype=torch.int32)
        table = torch.full_like(geometry.page_table, 1 << 30)
        width = min(table.shape[1], scene.page_table.shape[1])  # a scene may have a page to spare
        table[:real, :width] = scene.page_table[:, :width].to(device)
        copies = [(geometry.seq_lens, lens.to(device)), (geometry.page_table, table)]
        if geometry.tree is not None:
            copies.append((geometry.tree, padded_tree(geometry.tree, scene.case.trees)))
        for target, rows in zip((self.q, self.k, self.v), (scene.q, *scene.new_rows()), strict=True):
            source = torch.full_like(target, NAN)
            source[: len(rows)] = rows
            copies.append((target, source))
        return copies

    def stage(self, scene: MHAScene) -> Callable[[], torch.Tensor]:
        """Another scene's batch and cache made ready on the device; call it to replay it there."""
        copies = self.copies(scene)
        for target, other in (
            (self.scene.pool.keys(LAYER), scene.pool.keys(LAYER)),
            (self.scene.pool.values(LAYER), scene.pool.values(LAYER)),
        ):
            source = torch.full(target.shape, NAN, device=target.device).to(target.dtype)
            source[: len(other)] = other
            copies.append((target, source))

        def replay() -> torch.Tensor:
            for target, source in copies:
                target.copy_(source)
            assert self.backend.init_forward_metadata_out_graph(self.batch) is self.plan
            if self.graph is None:
                self.run()
            else:
                self.graph.replay()
            return self.out

        return replay

    def replay(self, scene: MHAScene) -> torch.Tensor:
        return self.stage(scene)()
