"""Base class of backends that serve sparse layers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    Claims,
    ForwardBatch,
    ForwardExtras,
    LayerSpec,
    Plan,
    PlanError,
    PlannedAttention,
)
from attnplug.kernels import output_width
from attnplug.sparse import (
    CompressorInputs,
    Coordinator,
    IndexerDims,
    IndexInputs,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
    selected_tensor,
)
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool


class SparseAttention(PlannedAttention):
    """Implements ``select`` on top of ``choose``: finds the plan, checks the call, writes the new index keys, and
    returns -1 for padding.

    ``index_keys`` is the context's pool, ``None`` if no layer has an index with keys. ``coordinator`` is the context's,
    ``None`` for models that are not sparse. With one, new rows are written and selected rows are loaded here, before
    ``attend``, which gets them as ``SelectedSlots``: slots of ``context.pools.mla``. Slots of the page table, which
    plans have, are then no slots of that pool.

    Subclass contract: ``plan``, ``attend`` and ``choose``. ``attend`` gets ``extras.selected`` for sparse layers. A
    backend that claims coordinators reads no other rows, and its ``choose`` returns positions if there is one. If it
    serves models with compressed layers, it loads rows of windows and entries itself.
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        super().__init__(context, claims)
        self.index_keys: IndexKeyPool | None = context.pools.cache(INDEX_KEYS) if context.model.index_layers else None
        readable = context.declared.index_dtypes
        if self.index_keys is not None and readable is not None and self.index_keys.dtype not in readable:
            raise BackendError(
                f"backend {context.name} reads index keys in {', '.join(sorted(readable))}, and the pool has them in "
                f"{self.index_keys.dtype}"
            )
        sparse = context.model.is_sparse or context.model.compressed_layers
        self.coordinator: Coordinator | None = context.coordinator if sparse else None
        if self.coordinator is not None and self.coordinator.name not in (known := context.declared.coordinators):
            raise BackendError(
                f"backend {context.name} works with the coordinators {', '.join(sorted(known)) or 'none'}, and was "
                f"given {self.coordinator.name} ({type(self.coordinator).__name__})"
            )

    @abstractmethod
    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        """Select the rows of one layer, as ``RowSelection.select`` specifies, for ``plan.query_rows`` tokens.

        There is at least one token, and ``index`` has as many rows. Its keys are in ``index_keys`` already; the keys
        that its ``entries`` complete are still to be written.
        """

    def select(self, index: IndexInputs, layer: LayerSpec, batch: ForwardBatch) -> SelectedRows:
        given, dims = index.q.shape[0], self._dims(layer)
        _check(index, layer, dims)
        plan = batch.plan_for(self.backend_id, given)
        rows = plan.query_rows
        if not rows:
            return SelectedPositions(_nothing(index.q, given, dims.topk))
        if index.k is not None:
            self._write(layer, plan, index.k[:rows])
        if rows == given:
            return self.choose(index, layer, dims, plan)
        k = None if index.k is None else index.k[:rows]
        entries = None if index.entries is None else index.entries.first(rows)
        chosen = self.choose(IndexInputs(index.q[:rows], k, index.weights[:rows], entries), layer, dims, plan)
        found = selected_tensor(chosen)
        padded = _nothing(found, given, found.shape[1])
        padded[:rows] = found
        return type(chosen)(padded)

    def run_plan(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        entries = None if extras is None else extras.entries
        if entries is not None:
            check_entries(entries, layer, output_width(layer), q.shape[0])
        elif layer.compressed is not None and save_kv_cache and plan.query_rows:
            raise BackendError(
                f"layer {layer.layer_id} makes an entry of every {layer.compressed.ratio} tokens, but backend "
                f"{self.backend_id.name} was given no extras.entries; give what the layer's compressor made of the "
                "new tokens"
            )
        selects = layer.indexer is not None and layer.compressed is None
        if self.coordinator is not None and selects and plan.query_rows:
            self.layers.check(layer, q, None if extras is None else extras.q_rope)
            wanted = self.layers.check_extras(layer, q, extras)
            new = self.rows_to_write(self.coordinator, plan, k, v, layer, save_kv_cache)
            slots = self._load_selected(self.coordinator, plan, new, layer, batch, wanted.selected)
            more = q.shape[0] - plan.query_rows
            if more:
                slots = torch.cat((slots, _nothing(slots, more, slots.shape[1])))
            extras, save_kv_cache = replace(wanted, selected=SelectedSlots(slots)), False
        return super().run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    def rows_to_write(
        self,
        coordinator: Coordinator,
        plan: Plan,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        save_kv_cache: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the new rows ``[rows, row_dim]`` that a coordinator is to write, and their slots by the page table."""
        if not save_kv_cache or plan.new_slots is None:
            raise PlanError(
                f"layer {layer.layer_id}: {coordinator.name} writes the new rows when it loads the others, so it needs "
                "them, and a plan with new_slots; pass save_kv_cache=True"
            )
        return self.layers.new_rows(layer, k, v, plan.query_rows)[0], plan.new_slots

    def _load_selected(
        self,
        coordinator: Coordinator,
        plan: Plan,
        new: tuple[Tensor, Tensor],
        layer: LayerSpec,
        batch: ForwardBatch,
        selected: SelectedRows | None,
    ) -> Tensor:
        """Write the new rows and return the pool's slots of the selected ones, ``[plan.query_rows, width]``."""
        if not isinstance(selected, SelectedPositions):
            raise BackendError(
                f"layer {layer.layer_id}: rows were selected by slots of the page table, and {coordinator.name} loads "
                f"rows by their positions; choose of backend {self.backend_id.name} has to return SelectedPositions"
            )
        planned = SelectedPositions(selected.positions[: plan.query_rows])
        return coordinator.load_selected(layer.layer_id, *new, planned, batch.geometry).slots

    def _dims(self, layer: LayerSpec) -> IndexerDims:
        dims = layer.indexer
        lacking = self.index_keys is None and layer.compressed is None
        if dims is None or dims.shares is not None or lacking:
            why = "has no index" if dims is None else f"reuses the selection of layer {dims.shares}"
            if lacking:
                why = f"is not of the model that backend {self.backend_id.name} was built for, which has no index"
            raise BackendError(f"rows were to be selected for layer {layer.layer_id}, which {why}")
        return dims

    def _write(self, layer: LayerSpec, plan: Plan, keys: Tensor) -> None:
        if plan.new_slots is None:
            raise PlanError(
                f"backend {self.backend_id.name} is to write the index keys of layer {layer.layer_id}, and its plan "
                "has no new_slots; make the plan with Plan.of(backend_id, geometry, metadata, geometry.new_slots())"
            )
        assert self.index_keys is not None
        self.index_keys.write(layer.layer_id, plan.new_slots, keys)


def _check(index: IndexInputs, layer: LayerSpec, dims: IndexerDims) -> None:
    """Raise BackendError unless inputs have the shapes of the layer's indexer."""
    rows = index.q.shape[0]
    expected = {"q": (rows, dims.heads, dims.head_dim), "k": (rows, dims.head_dim), "weights": (rows, dims.heads)}
    for name, shape in expected.items():
        tensor: Tensor | None = getattr(index, name)
        if tensor is not None and tensor.shape != shape:
            raise BackendError(
                f"layer {layer.layer_id}: index.{name} has shape {tuple(tensor.shape)}; give {shape} for {rows} tokens"
            )
    if index.entries is not None and layer.compressed is None:
        raise BackendError(f"layer {layer.layer_id} is not compressed, but index.entries were given; give index.k")
    if index.k is not None and layer.compressed is not None:
        raise BackendError(f"layer {layer.layer_id} is compressed, but index.k was given; give index.entries")
    if index.entries is not None:
        check_entries(index.entries, layer, dims.head_dim, rows)
    if index.weights.dtype is not torch.float32:
        raise BackendError(f"layer {layer.layer_id}: index.weights is {index.weights.dtype}; give torch.float32")


def check_entries(entries: CompressorInputs, layer: LayerSpec, dim: int, tokens: int) -> None:
    """Raise BackendError unless ``entries`` are inputs of the layer's compressor to entries of width ``dim``."""
    dims, weights = layer.compressed, entries.weights
    if dims is None:
        raise BackendError(f"layer {layer.layer_id} makes no entries, but extras.entries were given")
    width = dims.series * dim
    wanted = {"values": (tokens, width), "gates": (tokens, width), "bias": (dims.ratio, width), "norm": (dim,)}
    found = {"values": entries.values, "gates": entries.gates, "bias": weights.bias, "norm": weights.norm}
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise BackendError(
                f"layer {layer.layer_id}: the {name} for entries have shape {tuple(found[name].shape)}; give {shape} "
                f"for {tokens} tokens, windows of {dims.ratio} and entries of {dim}"
            )
    if weights.frequencies.dim() != 1 or 2 * weights.frequencies.shape[0] > dim:
        raise BackendError(
            f"layer {layer.layer_id}: the frequencies for entries have shape {tuple(weights.frequencies.shape)}; give "
            f"one for each pair of up to {dim} columns"
        )
    for name in ("bias", "norm", "frequencies"):
        if (dtype := getattr(weights, name).dtype) is not torch.float32:
            raise BackendError(f"layer {layer.layer_id}: the {name} for entries are {dtype}; give torch.float32")


def _nothing(like: Tensor, rows: int, width: int) -> Tensor:
    """An empty selection ``[rows, width]``."""
    return torch.full((rows, width), -1, dtype=torch.int32, device=like.device)
