"""The ``torch_sparse`` backend: gathers cache rows by slot and attends to them with torch operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    Claims,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    LayerSpec,
    MLAPool,
    NewRows,
    Plan,
    PoolError,
)
from attnplug.kernels import (
    Group,
    RowTiles,
    Softmax,
    attend,
    attend_tiles,
    merge_partial,
    output_width,
    plan_groups,
    spread,
)
from attnplug.sparse import Coordinator, IndexerDims, IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_sparse.attention import SparseAttention
from attnplug_sparse.hisparse.hot_pool import HOT_ENTRIES
from attnplug_sparse.pools import COMPRESSED
from attnplug_sparse.torch_sparse.entries import Entries, Windows
from attnplug_sparse.torch_sparse.invariant import (
    EntryTiles,
    attend_selected_in_tiles,
    choose_in_tiles,
    merge_in_tiles,
)
from attnplug_sparse.torch_sparse.selection import attend_selected, choose_positions, selected_slots, selects_all


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSlots:
    """Slots of what a coordinator has loaded for one layer, -1 for none: ``rows`` ``[rows, window]`` of the pool of
    latent rows, ``entries`` ``[rows, topk]`` of that of entries."""

    rows: Tensor
    entries: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Metadata of a plan: groups that cover the batch, and the compressor windows that its new tokens complete.

    If results are invariant, ``tiles`` cover the batch instead, and ``entry_tiles``, by tokens per entry, have entries
    as keys. With either these or a coordinator of compressed layers, ``near`` ``[rows, window]`` are the positions in
    each row's sliding window, newest first, -1 for none. ``loaded`` is set for the call of a layer.
    """

    groups: tuple[Group, ...]
    windows: Mapping[tuple[int, int], Windows]
    near: SelectedPositions | None = None
    loaded: LoadedSlots | None = None
    tiles: RowTiles | None = None
    entry_tiles: Mapping[int, EntryTiles] = field(default_factory=dict)


class TorchSparseBackend(SparseAttention):
    """Absorbed MLA for models with sparse or compressed layers, their dense layers included, with any page size.

    It holds the pools and no state of any batch.
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        super().__init__(context, claims)
        if context.pools.mla is None:
            raise PoolError(
                f"backend {context.name} serves MLA layers, and there is no MLA pool; build the pools with it"
            )
        self._mla: MLAPool = context.pools.mla
        self._fixed_tiles, self._entries = bool(context.invariant - {"run"}), None
        if context.model.compressed_layers:
            self._entries = Entries(context.pools.cache(COMPRESSED), one_by_one=self._fixed_tiles)
        self._window = max((layer.sliding_window or 0 for layer in context.model.layers), default=0)

    def plan(self, geometry: Geometry) -> Plan:
        tiles = RowTiles.of(geometry) if self._fixed_tiles and geometry.rows else None
        new_slots, groups = plan_groups(geometry) if tiles is None else (geometry.new_slots(), ())
        if self._entries is None:
            return Plan.of(self.backend_id, geometry, Work(groups, {}, tiles=tiles), new_slots)
        near, entry_tiles = None, {}
        if self.coordinator is not None or tiles is not None:
            starts = [total - new for new, total in zip(geometry.query_lens, geometry.kv_lens, strict=True)]
            _, position = spread(starts, geometry.query_lens, geometry.device)
            distance = torch.arange(self._window, device=geometry.device)
            near = SelectedPositions((position.unsqueeze(1) - distance).clamp_(min=-1).int())
        if tiles is not None:
            entry_tiles = {ratio: EntryTiles.over(tiles, ratio) for ratio in self._entries.ratios}
        work = Work(groups, self._entries.plan(geometry, new_slots), near, tiles=tiles, entry_tiles=entry_tiles)
        return Plan.of(self.backend_id, geometry, work, new_slots)

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
        if self.coordinator is not None and self._entries is not None and plan.query_rows:
            self.layers.check(layer, q)
            extras = self.layers.check_extras(layer, q, extras)
            new = self.rows_to_write(self.coordinator, plan, k, v, layer, save_kv_cache)
            loaded = self._load(self.coordinator, layer, new, extras, plan, batch)
            plan, save_kv_cache = replace(plan, metadata=replace(plan.metadata, loaded=loaded)), False
        return super().run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    def _load(
        self,
        coordinator: Coordinator,
        layer: LayerSpec,
        new: tuple[Tensor, Tensor],
        extras: ForwardExtras,
        plan: Plan,
        batch: ForwardBatch,
    ) -> LoadedSlots:
        """Write a layer's new rows and entries, and load the rows of the window and the selected entries."""
        layer_id, geometry, count, work = layer.layer_id, batch.geometry, plan.query_rows, plan.metadata
        rows = coordinator.load_selected(layer_id, *new, work.near, geometry).slots
        if layer.compressed is None:
            return LoadedSlots(rows, None)
        if extras.entries is None:
            raise BackendError(f"layer {layer_id} is compressed, and extras.entries were not given; give them")
        entries, inputs = self._entries_of(layer), extras.entries.first(count)
        if layer.indexer is None:
            entries.write(layer_id, inputs, work.windows)
            return LoadedSlots(rows, None)
        if not isinstance(extras.selected, SelectedPositions):
            raise BackendError(f"layer {layer_id}: {coordinator.name} loads entries by number; give SelectedPositions")
        made = entries.make(layer_id, inputs, work.windows)
        selected = SelectedPositions(extras.selected.positions[:count])
        return LoadedSlots(rows, coordinator.load_entries(layer_id, *made, selected, geometry).slots)

    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedRows:
        work: Work = plan.metadata
        if layer.compressed is not None and index.entries is not None:
            self._entries_of(layer).write_index(layer.layer_id, index.entries, work.windows)
        if work.tiles is not None:
            tiles = work.tiles if layer.compressed is None else work.entry_tiles[layer.compressed.ratio]
            return SelectedPositions(choose_in_tiles(index, self._index_reader(layer), tiles, dims.topk, dims.scale))
        chosen = torch.empty(index.q.shape[0], dims.topk, dtype=torch.int32, device=index.q.device)
        for group in work.groups:
            rows = slice(None) if group.rows is None else group.rows
            part = IndexInputs(index.q[rows], None, index.weights[rows])
            if layer.compressed is not None:
                entries = self._entries_of(layer)
                chosen[rows] = entries.choose(layer.layer_id, part, group, dims.topk, dims.scale)
                continue
            chosen[rows] = choose_positions(part, self._read_keys(layer, group.slots), group, dims.topk, dims.scale)
        return SelectedPositions(chosen)

    def _index_reader(self, layer: LayerSpec) -> Callable[[Tensor], Tensor]:
        if layer.compressed is None:
            return partial(self._read_keys, layer)
        return partial(self._entries_of(layer).read_index, layer.layer_id)

    def _read_keys(self, layer: LayerSpec, slots: Tensor) -> Tensor:
        assert self.index_keys is not None
        return self.index_keys.read_keys(layer.layer_id, slots)

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        work: Work = plan.metadata
        groups, lse = work.groups, extras.lse
        if extras.entries is not None and new is not None:
            self._entries_of(layer).write(layer.layer_id, extras.entries, work.windows)
        if work.tiles is not None:
            found, lses = self._attend_in_tiles(q, layer, work, work.tiles, extras)
            if lse is not None:
                lse.copy_(lses)
            return found.to(q.dtype)
        loaded = work.loaded
        whole = len(groups) == 1 and groups[0].rows is None
        out = q if whole else q.new_empty(*q.shape[:2], output_width(layer))
        for group in groups:
            rows = slice(None) if group.rows is None else group.rows
            result, sums = self._attend_group(q[rows], rows, layer, group, extras, loaded)
            if lse is not None and sums is not None:
                lse[rows] = sums
            if whole:
                return result
            out[rows] = result
        return out

    def _attend_in_tiles(
        self, q: Tensor, layer: LayerSpec, work: Work, tiles: RowTiles, extras: ForwardExtras
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of all rows, both float32."""
        if layer.compressed is None:
            return self._attend_rows_in_tiles(q, layer, work, tiles, extras, extras.sinks)
        found = self._attend_rows_in_tiles(q, layer, work, tiles, extras, None)
        return merge_in_tiles(tiles, found, self._attend_entries_in_tiles(q, layer, work, extras), extras.sinks)

    def _attend_rows_in_tiles(
        self, q: Tensor, layer: LayerSpec, work: Work, tiles: RowTiles, extras: ForwardExtras, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert layer.mla is not None
        softmax, rank = Softmax.of(layer), layer.mla.kv_lora_rank
        read = partial(self._mla.read_rows, layer.layer_id)
        if work.near is not None and softmax.window is not None:
            # Gathered like selected rows, so that a coordinator, which loads them, changes no bits.
            near: SelectedRows = SelectedPositions(work.near.positions[:, : softmax.window])
            if work.loaded is not None:
                near = SelectedSlots(work.loaded.rows[:, : softmax.window])
            plain = Softmax(softmax.scale, None, softmax.cap)
            return attend_selected_in_tiles(q, near, softmax.window, tiles, read, rank, plain, sinks)
        if extras.selected is not None and layer.indexer is not None and layer.compressed is None:
            topk = layer.indexer.topk
            return attend_selected_in_tiles(q, extras.selected, topk, tiles, read, rank, softmax, sinks)

        def keys_and_values(slots: Tensor) -> tuple[Tensor, Tensor]:
            rows = read(slots).unsqueeze(2)
            return rows, rows[..., :rank]

        return attend_tiles(q, tiles, keys_and_values, softmax, sinks, rank)

    def _attend_entries_in_tiles(
        self, q: Tensor, layer: LayerSpec, work: Work, extras: ForwardExtras
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over entries; a row that sees none has a log-sum-exp of -inf."""
        assert layer.compressed is not None
        softmax = Softmax(layer.scale, None, layer.logit_cap)
        tiles, width = work.entry_tiles[layer.compressed.ratio], output_width(layer)
        read = partial(self._entries_of(layer).read, layer.layer_id)
        if layer.indexer is None or extras.selected is None:

            def keys_and_values(slots: Tensor) -> tuple[Tensor, Tensor]:
                rows = read(slots).unsqueeze(2)
                return rows, rows

            return attend_tiles(q, tiles, keys_and_values, softmax, None, width)
        selected: SelectedRows = extras.selected
        if work.loaded is not None and work.loaded.entries is not None:
            selected = SelectedSlots(work.loaded.entries)
            read = partial(self.context.pools.cache(HOT_ENTRIES).read_rows, layer.layer_id)
        elif isinstance(selected, SelectedSlots):  # slots of entries; ``read`` takes those of tokens
            selected = SelectedSlots(selected.slots * layer.compressed.ratio)
        return attend_selected_in_tiles(q, selected, layer.indexer.topk, tiles, read, width, softmax, None)

    def _attend_group(
        self,
        q: Tensor,
        rows: Tensor | slice,
        layer: LayerSpec,
        group: Group,
        extras: ForwardExtras,
        loaded: LoadedSlots | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of a group, whose queries are ``rows`` of the batch's."""
        softmax = Softmax(layer.scale, layer.sliding_window, layer.logit_cap)
        slots = None
        if extras.selected is not None and layer.compressed is None:
            slots = selected_slots(extras.selected, rows, group)
        sums: Tensor | None
        # With a coordinator only the selected rows are in the pool, even if all rows are selected.
        if loaded is not None:
            near = loaded.rows[rows][:, : layer.sliding_window].long()
            result, sums = self._attend_selected(q.float(), near, layer, Softmax(layer.scale, None, layer.logit_cap))
        elif slots is not None and (self.coordinator is not None or not selects_all(slots, group)):
            result, sums = self._attend_selected(q, slots, layer, softmax)
        else:
            result, sums = self._attend_dense(q, layer, group, softmax, extras)
        if layer.compressed is not None and sums is not None:
            part, part_sums = self._attend_entries(q, rows, layer, group, softmax, extras, loaded)
            result, sums = merge_partial(result, sums, part, part_sums)
        if extras.sinks is not None and sums is not None:
            # The weight that the other keys keep; without a sink it is 1.
            result = result * torch.sigmoid(sums - extras.sinks).unsqueeze(-1)
        return result.to(q.dtype), sums

    def _attend_dense(
        self, q: Tensor, layer: LayerSpec, group: Group, softmax: Softmax, extras: ForwardExtras
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over all rows, or over those of the window. Not rounded if a sink or entries follow."""
        assert layer.mla is not None
        unfinished = layer.sinks or layer.compressed is not None
        queries = (q.float() if unfinished else q).unflatten(0, (group.extent.requests, group.extent.queries))
        near = group.within(softmax.window)
        keys = self._mla.read_rows(layer.layer_id, near.slots).unsqueeze(2)
        values = keys[..., : layer.mla.kv_lora_rank]
        result, sums = attend(queries, keys, values, near.extent, softmax, unfinished or extras.lse is not None)
        return result.flatten(0, 1), None if sums is None else sums.flatten(0, 1)

    def _attend_selected(self, q: Tensor, slots: Tensor, layer: LayerSpec, softmax: Softmax) -> tuple[Tensor, Tensor]:
        assert layer.mla is not None
        rank, layer_id = layer.mla.kv_lora_rank, layer.layer_id
        return attend_selected(q, slots, lambda where: self._mla.read_rows(layer_id, where), rank, softmax)

    def _attend_entries(
        self,
        q: Tensor,
        rows: Tensor | slice,
        layer: LayerSpec,
        group: Group,
        softmax: Softmax,
        extras: ForwardExtras,
        loaded: LoadedSlots | None,
    ) -> tuple[Tensor, Tensor]:
        entries, layer_id = self._entries_of(layer), layer.layer_id
        softmax = Softmax(softmax.scale, None, softmax.cap)
        if loaded is not None and loaded.entries is not None:
            pool, chosen = self.context.pools.cache(HOT_ENTRIES), loaded.entries[rows].long()
            return attend_selected(q, chosen, lambda at: pool.read_rows(layer_id, at), output_width(layer), softmax)
        if extras.selected is None:
            return entries.attend(layer_id, q, group, softmax)
        slots = entries.selected_slots(layer_id, extras.selected, rows, group)
        return attend_selected(q, slots, lambda where: entries.read(layer_id, where), output_width(layer), softmax)

    def _entries_of(self, layer: LayerSpec) -> Entries:
        if self._entries is None or layer.compressed is None:
            raise PoolError(f"layer {layer.layer_id} is not one of the compressed layers of {self.backend_id.name}")
        return self._entries
