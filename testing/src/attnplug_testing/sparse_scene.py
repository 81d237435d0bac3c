"""The conformance kit's scenes of sparse layers, for tests of a backend with or without HiSparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, DType, ForwardBatch, ForwardExtras, ForwardMode, LayerSpec
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_conformance.arithmetic import NAN
from attnplug_conformance.case import LAST
from attnplug_conformance.check import CheckContext
from attnplug_conformance.checks.hisparse import HotScene
from attnplug_conformance.checks.sparse import SparseCapture, SparseScene, check_selected
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
    """Return a case of a sparse MLA layer. ``index`` is the indexer's ``(heads, head_dim)``."""
    return mla(lengths, mode, page_size, heads, dims=dims, v_head_dim=16, dtype=dtype,
               index=IndexerDims(*index, topk), **changes)  # fmt: skip


class SparseStage(KernelScene, SparseScene):
    """A scene of a sparse case. The last layer shares the selection of the layer under test."""

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
        """Store the same rows in the layer that shares the selection."""
        self.store(LAST, [(0, before) for before, _ in self.case.lengths])

    def planned(self) -> ForwardBatch:
        return self.plan(self.batch())

    def given(self) -> IndexInputs:
        """Return the batch's index inputs, padding included."""
        return self.index_inputs(sum(self.new) + self.case.padding)

    def visible(self) -> list[tuple[int, list[int]]]:
        """Return, for each token, its request and the positions that it sees."""
        spans = enumerate(self.case.lengths)
        return [
            (each, self.seen(each, place)) for each, (before, new) in spans for place in range(before, before + new)
        ]

    def attend(
        self, batch: ForwardBatch, selected: SelectedRows | None, layer: LayerSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, padding rows included."""
        lse = torch.full((batch.num_tokens, self.layer.num_heads), NAN, device=self.device)
        return self.forward(batch, layer=layer, extras=ForwardExtras(lse=lse, selected=selected)), lse

    def check(self, batch: ForwardBatch | None = None) -> SelectedRows:
        """Check selection and attention against float64; return the selected rows."""
        batch = batch or self.planned()
        selected = self.select(batch)
        self.check_attends(batch, selected)
        return selected

    def check_attends(self, batch: ForwardBatch, selected: SelectedRows, layer: LayerSpec | None = None) -> None:
        """Check that exactly the ``chosen`` rows are attended to, and that padding gives zero."""
        check_selected(CheckContext(self.made, self.case), self, *self.attend(batch, selected, layer))

    def by_position(self, choices: list[list[int]], columns: int | None = None) -> SelectedPositions:
        """Return chosen positions per token, padded with -1 to ``columns``, as another backend might select them."""
        columns, self.chosen = columns or self.index.topk, choices
        rows = [row + [-1] * (columns - len(row)) for row in choices]
        return SelectedPositions(torch.tensor(rows, dtype=torch.int32, device=self.device))

    def as_slots(self, selected: SelectedPositions) -> SelectedSlots:
        """Convert positions to slots, ``[tokens, topk]`` without padding tokens."""
        requests = torch.tensor([request for request, _ in self.visible()])
        positions = selected.positions[: len(requests)].cpu().long()
        pages = self.page_table[requests[:, None], (positions // self.page_size).clamp(min=0)]
        slots = pages * self.page_size + positions % self.page_size
        return SelectedSlots(slots.where(positions >= 0, -1).int().to(self.device))

    def slot(self, request: int, position: int) -> tuple[int, int]:
        """Return the page of a cached row and its offset in the page."""
        return int(self.page_table[request, position // self.page_size]), position % self.page_size


class HotStage(SparseStage, HotScene):
    """A sparse scene whose backend gets its rows through HiSparse."""


def check_replays(stage: SparseStage, others: list[SparseStage], *, exact: bool = True) -> None:
    """Check replays against float64: selection, attention, rows written, and no wait for the device.

    If ``exact``, the results are also bitwise those of an eager run.
    """
    capture = SparseCapture(stage)
    capture.reserve().capture()
    for other in others:
        capture.put(other)
        with nothing_waits(other.device.type):
            out = capture.replay()
        other.check_selection(capture.selected)
        check_selected(CheckContext(other.made, other.case), other, out)
        assert stage.written() == sum(other.totals)
        if exact:
            batch, tokens = other.planned(), len(other.q)
            selected = other.select(batch)
            assert isinstance(capture.selected, SelectedSlots) and isinstance(selected, SelectedSlots)
            assert torch.equal(capture.selected.slots[:tokens], selected.slots)
            assert torch.equal(out[:tokens], other.attend(batch, selected)[0])
