"""The backend: pool, kernels and plans brought together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendError,
    BackendId,
    Claims,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    Plan,
    PlanError,
    PoolError,
)
from attnplug_triton_mla.configurations import Configuration, Room, choose, fitting, most_partials
from attnplug_triton_mla.graphs import Captured, GraphState
from attnplug_triton_mla.options import TritonMLAOptions
from attnplug_triton_mla.planner import Schedule, Shape
from attnplug_triton_mla.scratch import Partials, Scratch
from attnplug_triton_mla.triton_attention import LayerCache, launch_attend
from attnplug_triton_mla.triton_merge import launch_merge

_EXTRAS = frozenset({"lse"})
_UNIFORM = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """What a plan holds: the batch's own page table, and what was made from it; no schedule where there is no row."""

    page_table: Tensor
    new_slots: Tensor
    schedule: Schedule | None = None
    partials: Partials | None = None


class TritonMLABackend:
    """MLA by Triton kernels: one schedule for every kind of batch, made on the device from the lengths there.

    A plan takes nothing from the host but shapes, one launch fills it, and a captured one follows whatever lengths its
    graph finds. It holds the batch's page table, not a copy: a page table that changes is planned again.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        choose: Callable[[int, int, bool], Configuration] = choose,
        multiprocessors: int | None = None,
    ) -> None:
        layers = [layer for layer in context.model.layers if layer.mla is not None]
        if context.pools.mla is None or not layers:
            raise PoolError(f"backend {context.name} serves MLA layers, and needs a model and a pool with some")
        first, self._pool = layers[0], context.pools.mla
        assert first.mla is not None
        options: TritonMLAOptions = context.options if context.options is not None else TritonMLAOptions()
        self.backend_id = BackendId(context.name)
        self._page_size, self._device, self._dtype = context.page_size, context.device, context.dtype
        self._heads, self._rank = first.num_heads // context.parallel.size, first.mla.kv_lora_rank
        self._invariant, self._choose = options.batch_invariant, choose
        self._caches = {
            layer.layer_id: LayerCache(
                self._pool.rows(layer.layer_id),
                self._pool.scale(layer.layer_id),
                layer.mla.kv_lora_rank,
                layer.mla.qk_rope_head_dim,
            )
            for layer in layers
            if layer.mla is not None
        }
        self._room: Room | None = None
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(self._device)
            multiprocessors = properties.multi_processor_count
            row_dim = first.mla.row_dim
            self._room = Room(
                10 * properties.major + properties.minor,
                properties.shared_memory_per_block_optin,  # type: ignore[attr-defined] # torch's stub leaves it out
                row_dim * context.dtype.itemsize,
                row_dim * self._pool.rows(first.layer_id).element_size(),
            )
        self._multiprocessors = multiprocessors
        rows = most_partials(multiprocessors)
        self._scratch = Scratch(context.name, context.workspace, self._device, self._rank, rows)
        self._max_context = context.limits.max_context
        self._graph: GraphState | None = None
        self.claims = Claims(cuda_graph=GraphLevel.ALWAYS, needs_cpu_seq_lens=False)

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        queries, rows, kv_rows = self._host_lengths(batch)
        if not rows:
            slots = torch.empty(0, dtype=torch.int64, device=self._device)
            return Plan(self.backend_id, batch.forward_mode, 0, 0, Metadata(batch.page_table, slots))
        metadata = self.metadata(batch, rows, queries)
        assert metadata.schedule is not None
        metadata.schedule.fill(batch.page_table, batch.seq_lens, None if queries else batch.extend_seq_lens)
        return Plan(self.backend_id, batch.forward_mode, rows, kv_rows, metadata)

    def _host_lengths(self, batch: ForwardBatch) -> tuple[int, int, int | None]:
        """New tokens of each request (0: they may differ), of all, and cache rows, without asking the device."""
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE or not batch.batch_size:
            return 0, 0, 0
        kv_rows = None
        if not mode.is_decode and batch.extend_seq_lens is None:
            raise PlanError(f"a batch in mode {mode} needs extend_seq_lens, the new tokens of each request")
        if batch.seq_lens_cpu is not None and (mode.is_decode or batch.extend_seq_lens_cpu is not None):
            kv_rows = Geometry.of(batch, self._page_size).kv_rows  # looks whether all lengths are right
        if mode.is_decode:
            return 1, batch.batch_size, kv_rows
        if batch.extend_seq_lens_cpu is None:
            return 0, batch.num_tokens, kv_rows  # those that no request has come out as padding
        lens: list[int] = batch.extend_seq_lens_cpu.tolist()
        queries = lens[0] if mode in _UNIFORM and min(lens) == max(lens) else 0
        return queries, sum(lens), kv_rows

    def metadata(self, batch: ForwardBatch, rows: int, queries: int) -> Metadata:
        """Memory for a batch's schedule, still to be filled."""
        requests, pages = batch.page_table.shape
        shape = Shape(requests, rows, queries, self._heads, self._page_size, pages, self._invariant)
        configuration = self._choose(queries * self._heads, requests, self._invariant)
        if self._room is not None:
            configuration = fitting(configuration, self._room)
        schedule = Schedule.reserve(shape, configuration, self._multiprocessors, self._device)
        dtype = self._dtype if configuration.half_partials else torch.float32
        partials = self._scratch.partials(schedule.partial_slots, configuration.tile, dtype)
        return Metadata(batch.page_table, schedule.slots, schedule, partials)

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For captured batches of up to ``max_bs`` requests and ``max_num_tokens`` rows."""
        if self._graph is not None:
            raise BackendError(
                f"backend {self.backend_id.name} has its memory for CUDA graphs already, and captured graphs hold its "
                "addresses; call init_cuda_graph_state once, with the most that will be captured"
            )
        self._graph = GraphState(max_bs, max_num_tokens, -(-self._max_context // self._page_size))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captured(forward_batch, in_capture).plan

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Slots and schedule, from the page table and lengths that the batch has when the graph runs."""
        self._captured(forward_batch, False).fill(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _captured(self, batch: ForwardBatch, in_capture: bool) -> Captured:
        if self._graph is None:
            raise BackendError(
                f"backend {self.backend_id.name} has no memory for CUDA graphs; call init_cuda_graph_state first"
            )
        found = self._graph.find(batch)
        if in_capture and (found is None or not found.reads(batch)):
            queries = self._graph.queries(batch)
            metadata = self.metadata(batch, batch.num_tokens, queries)
            plan = Plan(self.backend_id, batch.forward_mode, batch.num_tokens, None, metadata)
            found = self._graph.keep(batch, plan)
            found.fill(batch)
        if found is None:
            raise PlanError(
                f"a {batch.forward_mode} batch of {batch.batch_size} requests and {batch.num_tokens} rows was never "
                "captured; plan it with in_capture=True and capture it first"
            )
        return found

    # Running

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        return self._forward(q, k, v, layer, batch, False, save_kv_cache, extras)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        return self._forward(q, k, v, layer, batch, True, save_kv_cache, extras)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        decode: bool,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=decode)
        metadata: Metadata = plan.metadata
        cache, rows = self._cache(layer, q), plan.query_rows
        if save_kv_cache:
            self._save(layer, metadata, k, v, rows)
        lse = None if extras is None else self._lse(q, extras)
        out = q.new_empty(q.shape[0], q.shape[1], self._rank)
        # Which rows are padding (B5) the plan knows where all requests have equally many, else only the device.
        uniform = metadata.schedule is not None and metadata.schedule.shape.queries > 0
        first = rows if uniform else 0
        if first < q.shape[0]:
            out[first:] = 0
            if lse is not None:
                lse[first:] = float("-inf")
        if metadata.schedule is not None:
            self._attend(q, cache, metadata, out, lse, layer.scale)
        return out

    def _attend(
        self, q: Tensor, cache: LayerCache, metadata: Metadata, out: Tensor, lse: Tensor | None, scale: float
    ) -> None:
        schedule, partials = metadata.schedule, metadata.partials
        assert schedule is not None and partials is not None
        configuration, queries = schedule.configuration, schedule.shape.queries
        merge_after = configuration.merge == "kernel" and queries > 0
        launch_attend(
            q,
            cache,
            metadata.page_table,
            out,
            lse,
            partials.values,
            partials.lse,
            partials.counters,
            schedule.numbers,
            scale,
            programs=schedule.programs,
            tile=configuration.tile,
            step=configuration.step,
            merge_columns=0 if merge_after else configuration.merge_columns,
            invariant=schedule.shape.invariant,
            warps=configuration.warps,
            stages=configuration.stages,
            overlap=merge_after and configuration.overlap,
        )
        if merge_after:
            launch_merge(
                partials.values,
                partials.lse,
                out,
                lse,
                schedule.numbers,
                schedule.shape.rows,
                cache.scale,
                programs=schedule.programs,
                queries=queries,
                tile=configuration.tile,
                parts=configuration.merge_parts,
                columns=configuration.merge_columns,
                invariant=schedule.shape.invariant,
                overlap=configuration.overlap,
            )

    def _cache(self, layer: LayerSpec, q: Tensor) -> LayerCache:
        cache = self._caches.get(layer.layer_id)
        if cache is None:
            raise PoolError(
                f"layer {layer.layer_id} is not an MLA layer of the model that backend {self.backend_id.name} serves"
            )
        if q.shape[1] != self._heads:
            raise BackendError(f"q has {q.shape[1]} heads, but the plan is for {self._heads}")
        return cache

    def _save(self, layer: LayerSpec, metadata: Metadata, k: Tensor | None, v: Tensor | None, rows: int) -> None:
        if k is None or v is not None:
            given = ", ".join(f"{n}={'None' if t is None else tuple(t.shape)}" for n, t in (("k", k), ("v", v)))
            raise BackendError(
                f"layer {layer.layer_id} ({layer.kind}) writes k and no v, but was given {given}; "
                "pass save_kv_cache=False where nothing is to be written"
            )
        if k.shape[0] < rows:
            raise BackendError(f"layer {layer.layer_id} was given {k.shape[0]} rows of k for {rows} planned ones")
        self._pool.write(layer.layer_id, metadata.new_slots, k if k.shape[0] == rows else k[:rows])

    def _lse(self, q: Tensor, extras: ForwardExtras) -> Tensor | None:
        if unknown := extras.asked() - _EXTRAS:
            raise BackendError(
                f"backend {self.backend_id.name} was asked for {', '.join(sorted(unknown))}; "
                f"it knows {', '.join(_EXTRAS)}"
            )
        lse = extras.lse
        if lse is not None and (lse.shape != q.shape[:2] or lse.dtype is not torch.float32):
            raise BackendError(
                f"lse must be float32 of shape {tuple(q.shape[:2])} (tokens, heads), not {lse.dtype} of shape "
                f"{tuple(lse.shape)}"
            )
        return lse
