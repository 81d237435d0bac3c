"""The backend: pool, kernels and plans brought together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import (
    BackendContext,
    BackendId,
    Captures,
    Claims,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    GraphLimits,
    LayerSpec,
    MLALayers,
    Plan,
    PlanError,
    PlannedBackend,
)
from attnplug_triton_mla.attention import LayerCache, launch_attend
from attnplug_triton_mla.configurations import Configuration, Room, choose, fitting, most_partials
from attnplug_triton_mla.options import TritonMLAOptions
from attnplug_triton_mla.planner import Schedule, Shape
from attnplug_triton_mla.scratch import Partials, Scratch
from attnplug_triton_mla.triton_merge import launch_merge

_UNIFORM = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True, slots=True, eq=False)
class Metadata:
    """What a plan holds: where new rows are written, ``[rows]`` int64, and how the batch is divided, if it has rows."""

    new_slots: Tensor
    schedule: Schedule | None = None
    partials: Partials | None = None

    def fill(self, batch: ForwardBatch) -> None:
        """From the page table and lengths that the batch has on the device."""
        if self.schedule is not None:
            new_lens = None if self.schedule.shape.queries else batch.extend_seq_lens
            self.schedule.fill(batch.page_table, batch.seq_lens, new_lens)


class TritonMLABackend(PlannedBackend):
    """MLA by Triton kernels: one schedule for every kind of batch, made on the device from the lengths there.

    A plan takes nothing from the host but shapes, one launch fills it, and a captured one follows whatever lengths its
    graph finds. The page table is read where the batch has it.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        choose: Callable[..., Configuration] = choose,
        multiprocessors: int | None = None,
    ) -> None:
        options: TritonMLAOptions = context.options if context.options is not None else TritonMLAOptions()
        self.backend_id = BackendId(context.name)
        self._layers = MLALayers(context)
        pool, rank = self._layers.pool, self._layers.kv_lora_rank
        self._page_size, self._device, self._dtype = context.page_size, context.device, context.dtype
        self._invariant, self._choose = options.batch_invariant, choose
        self._fp8 = context.kv_dtype is DType.FLOAT8_E4M3
        self._caches = {i: LayerCache(pool.rows(i), pool.scale(i), rank) for i in pool.layer_ids}
        self._room: Room | None = None
        if multiprocessors is None:
            properties = torch.cuda.get_device_properties(self._device)
            multiprocessors = properties.multi_processor_count
            cache = next(iter(self._caches.values())).pages
            self._room = Room(
                10 * properties.major + properties.minor,
                properties.shared_memory_per_block_optin,  # type: ignore[attr-defined] # torch's stub leaves it out
                cache.shape[-1] * context.dtype.itemsize,
                cache.shape[-1] * cache.element_size(),
            )
        self._multiprocessors = multiprocessors
        self._scratch = Scratch(context.name, context.workspace, self._device, rank, most_partials(multiprocessors))
        self._captures: Captures[Plan] = Captures(self.backend_id)
        self.claims = Claims(cuda_graph=GraphLevel.ALWAYS, needs_cpu_seq_lens=False)

    # Planning

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        queries, rows, kv_rows = self._host_lengths(batch)
        metadata = self._metadata(batch, rows, queries)
        metadata.fill(batch)
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

    def _metadata(self, batch: ForwardBatch, rows: int, queries: int) -> Metadata:
        """Memory for a batch's schedule, still to be filled."""
        if not rows:
            return Metadata(torch.empty(0, dtype=torch.int64, device=self._device))
        requests, pages = batch.page_table.shape
        heads = self._layers.heads
        shape = Shape(requests, rows, queries, heads, self._page_size, pages, self._invariant)
        tokens = pages * self._page_size
        configuration = self._choose(queries * heads, requests, tokens, fp8=self._fp8, invariant=self._invariant)
        if self._room is not None:
            configuration = fitting(configuration, self._room)
        schedule = Schedule.reserve(shape, configuration, self._multiprocessors, self._device)
        partials = self._scratch.partials(schedule.partial_slots, configuration.tile)
        return Metadata(schedule.slots, schedule, partials)

    # CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For captured batches of up to ``max_bs`` requests and ``max_num_tokens`` rows; each shape has its own."""
        self._captures.reserve(GraphLimits(max_bs, max_num_tokens, level=GraphLevel.ALWAYS))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        """The plan of a captured shape, always the same: what changes from replay to replay is made in the graph."""
        return self._captures.find(forward_batch, in_capture, self._capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Slots and schedule, from the page table and lengths that the batch has when the graph runs."""
        metadata: Metadata = self._captures.find(forward_batch, False, self._capture).metadata
        metadata.fill(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padded requests have no rows: nothing is read or written for them."""
        return 0

    def _capture(self, batch: ForwardBatch) -> Plan:
        mode, rows = batch.forward_mode, batch.num_tokens
        queries = rows // batch.batch_size if mode.is_decode or mode in _UNIFORM else 0
        metadata = self._metadata(batch, rows, queries)
        metadata.fill(batch)
        return Plan(self.backend_id, mode, rows, None, metadata)

    # Running

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
        metadata: Metadata = plan.metadata
        self._layers.check(layer, q)
        cache, rows = self._caches[layer.layer_id], plan.query_rows
        if save_kv_cache:
            self._layers.save(layer, metadata.new_slots, k, v, rows)
        lse = self._layers.lse(q, extras)
        out = q.new_empty(q.shape[0], q.shape[1], self._layers.kv_lora_rank)
        schedule, partials = metadata.schedule, metadata.partials
        # Which rows are padding (B5) the plan knows where all requests have equally many, else only the device.
        first = rows if schedule is not None and schedule.shape.queries else 0
        if first < q.shape[0]:
            out[first:] = 0
            if lse is not None:
                lse[first:] = float("-inf")
        if schedule is not None and partials is not None:
            launch_attend(q, cache, batch.page_table, out, lse, partials, schedule, layer.scale)
            if schedule.merged_by_kernel:
                launch_merge(partials, out, lse, schedule, cache.scale)
        return out
