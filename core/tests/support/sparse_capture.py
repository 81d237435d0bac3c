"""A step of a sparse layer in fixed memory, captured on a GPU, replayed with other scenes' batches."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnplug import ForwardExtras, IndexInputs, SelectedRows
from support.batches import captured, padded_tree, static_tree, with_plan
from support.devices import nothing_is_zero_by_chance, nothing_waits
from support.sparse_scene import LAYER, NAN, SparseScene


class SparseCapture:
    """Choice and attention of one layer. ``stage`` has pools with room for what is replayed."""

    def __init__(self, stage: SparseScene, requests: int, new: int, pages: int = 24) -> None:
        self.stage, case, device = stage, stage.case, stage.device
        self.rows, self.written = requests * new, 0
        self.batch = captured(case.mode, requests, new, pages=pages, page_size=case.page_size, device=device, fill=0)
        self.batch.geometry = replace(self.batch.geometry, tree=static_tree(self.batch.geometry, case.trees))
        self.memory = [self._static(tensor) for tensor in self._inputs(stage)]
        stage.backend.init_cuda_graph_state(requests + 1, self.rows + 3)
        self.plan = stage.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        with_plan(self.batch, self.plan)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.selected: SelectedRows
        self.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def _static(self, like: Tensor) -> Tensor:
        return torch.zeros(self.rows, *like.shape[1:], dtype=like.dtype, device=like.device)

    @staticmethod
    def _inputs(stage: SparseScene) -> list[Tensor]:
        index = stage.index()
        assert index.k is not None
        return [stage.q, stage.new_rows(stage.rows).unsqueeze(1), index.q, index.k, index.weights]

    def run(self) -> None:
        backend, layer, (q, k, *index) = self.stage.backend, self.stage.layer, self.memory
        with nothing_is_zero_by_chance(self.stage.device):
            backend.init_forward_metadata_in_graph(self.batch)
            self.lse = torch.empty(q.shape[:2], device=q.device)
            self.selected = backend.select(IndexInputs(*index), layer, self.batch)
            forward = backend.forward_decode if self.batch.forward_mode.is_decode else backend.forward_extend
            extras = ForwardExtras(lse=self.lse, selected=self.selected)
            self.out = forward(q, k, None, layer, self.batch, extras=extras)

    def replay(self, other: SparseScene) -> tuple[SelectedRows, Tensor, Tensor]:
        """What the other scene's batch gives: its rows, output and log-sum-exp. ``written`` is then how many cache rows
        have changed. Whatever the batch has less of is NaN, and leads nowhere."""
        geometry, requests, tokens = self.batch.geometry, len(other.totals), len(other.q)
        for mine, theirs in zip(self.memory, self._inputs(other), strict=True):
            mine.fill_(NAN)
            mine[:tokens] = theirs[:tokens]
        geometry.seq_lens.zero_()
        geometry.seq_lens[:requests] = torch.tensor(other.totals, dtype=torch.int32, device=other.device)
        geometry.page_table.fill_(1 << 30)
        geometry.page_table[:requests, : other.page_table.shape[1]] = other.page_table.to(other.device)
        if geometry.tree is not None:
            geometry.tree.copy_(padded_tree(geometry.tree, other.case.trees))
        for pool, source in ((self.stage.mla.rows, other.mla.rows), (self.stage.keys.keys, other.keys.keys)):
            pool(LAYER).view(torch.uint8).fill_(0xFF)  # NaN in every type
            pool(LAYER)[: len(source(LAYER))] = source(LAYER)
        before = self.stage.mla.rows(LAYER).clone().view(torch.uint8)
        with nothing_waits(other.device.type):
            assert self.stage.backend.init_forward_metadata_out_graph(self.batch) is self.plan
            self.run() if self.graph is None else self.graph.replay()
        after = self.stage.mla.rows(LAYER).view(torch.uint8)
        self.written = int((after != before).flatten(0, 2).any(-1).sum())
        kind = type(self.selected)
        tensor = self.selected.slots if hasattr(self.selected, "slots") else self.selected.positions
        return kind(tensor[:tokens]), self.out, self.lse
