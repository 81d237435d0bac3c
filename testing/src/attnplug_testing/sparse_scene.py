"""The conformance kit's scenes of sparse layers under tests of a backend, with all of its rows on the device or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, DType, ForwardBatch, ForwardExtras, ForwardMode, LayerSpec
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_conformance.arithmetic import NAN
from attnplug_conformance.case import LAST
from attnplug_conformance.check import Stand
from attnplug_conformance.checks.hisparse import HotScene
from attnplug_conformance.checks.sparse import SparseCapture, SparseScene, judge_selected
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.devices import nothing_waits
from attnplug_testing.kernel_scene import KernelCase, KernelScene, Lengths, Make, mla

NARROW = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)


def sparse(
    lengths: Lengths,
    mode: ForwardMode = ForwardMode.EXTEND,
    page_size: int = 16,
    heads: int = 4,
    *,
    topk: int = 8,
    index: tuple[int, int] = (8, 16),
    dims: MLADims = NARROW,
    dtype: DType = DType.FLOAT32,
    **changes: Any,
) -> KernelCase:
    """``index`` are the heads of the index and their width."""
    return mla(lengths, mode, page_size, heads, dims=dims, v_head_dim=16, dtype=dtype,
               index=IndexerDims(*index, topk), **changes)  # fmt: skip


class SparseStage(KernelScene, SparseScene):
    """A scene of a sparse case. The last layer shares the choice of the one under test."""

    declares = "torch_sparse"

    def __init__(self, case: KernelCase, device: str = "cpu", make: Make = TorchSparseBackend) -> None:
        super().__init__(case, device, make)

    @property
    def context(self) -> BackendContext:
        return self.made.contexts[0]

    @property
    def shared(self) -> LayerSpec:
        return self.case.layers[2]

    @property
    def index_keys(self) -> IndexKeyPool:
        return self.pools.cache(INDEX_KEYS)

    def store_shared(self) -> None:
        """The same rows in the layer that shares the choice."""
        self.store(LAST, [(0, before) for before, _ in self.case.lengths])

    def planned(self) -> ForwardBatch:
        return self.plan(self.batch())

    def given(self) -> IndexInputs:
        """What the batch brings to the index, padding included."""
        return self.index_inputs(sum(self.new) + self.case.padding)

    def visible(self) -> list[tuple[int, list[int]]]:
        """The request of each token, and the positions that it sees."""
        spans = enumerate(self.case.lengths)
        return [
            (each, self.seen(each, place)) for each, (before, new) in spans for place in range(before, before + new)
        ]

    def attend(
        self, batch: ForwardBatch, selected: SelectedRows | None, layer: LayerSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, padding rows included."""
        lse = torch.full((batch.num_tokens, self.layer.num_heads), NAN, device=self.device)
        return self.forward(batch, layer=layer, extras=ForwardExtras(lse=lse, selected=selected)), lse

    def check(self, batch: ForwardBatch | None = None) -> SelectedRows:
        """Rows are chosen as well as float64 chooses them, and attended to as float64 does."""
        batch = batch or self.planned()
        selected = self.select(batch)
        self.check_attends(batch, selected)
        return selected

    def check_attends(self, batch: ForwardBatch, selected: SelectedRows, layer: LayerSpec | None = None) -> None:
        """To the rows that are ``chosen``, and to no others; padding gives nothing."""
        judge_selected(Stand(self.made, self.case), self, *self.attend(batch, selected, layer))

    def by_position(self, choices: list[list[int]], columns: int | None = None) -> SelectedPositions:
        """Positions for each token, as another backend may choose them."""
        columns, self.chosen = columns or self.index.topk, choices
        rows = [row + [-1] * (columns - len(row)) for row in choices]
        return SelectedPositions(torch.tensor(rows, dtype=torch.int32, device=self.device))

    def as_slots(self, selected: SelectedPositions) -> SelectedSlots:
        """The same rows by their slots, with a row for each token that is not padding."""
        requests = torch.tensor([request for request, _ in self.visible()])
        positions = selected.positions[: len(requests)].cpu().long()
        pages = self.page_table[requests[:, None], (positions // self.page_size).clamp(min=0)]
        slots = pages * self.page_size + positions % self.page_size
        return SelectedSlots(slots.where(positions >= 0, -1).int().to(self.device))

    def slot(self, request: int, position: int) -> tuple[int, int]:
        """The page of a row, and its place there."""
        return int(self.page_table[request, position // self.page_size]), position % self.page_size


class HotStage(SparseStage, HotScene):
    """The same with a backend that HiSparse brings rows to."""


def check_replays(stage: SparseStage, others: list[SparseStage], *, exact: bool = True) -> None:
    """A batch that was captured once chooses and attends as float64 does, writes no rows but new ones, and waits for
    nothing; if ``exact``, its bits are those of a batch that was not captured."""
    capture = SparseCapture(stage)
    capture.reserve().capture()
    for other in others:
        capture.put(other)
        with nothing_waits(other.device.type):
            out = capture.replay()
        other.judge(capture.selected)
        judge_selected(Stand(other.made, other.case), other, out)
        assert stage.written() == sum(other.totals)
        if exact:
            batch, tokens = other.planned(), len(other.q)
            selected = other.select(batch)
            assert torch.equal(capture.selected.slots[:tokens], selected.slots)
            assert torch.equal(out[:tokens], other.attend(batch, selected)[0])
