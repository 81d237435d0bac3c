"""Attention for continuous batching, over the memory of transformers' ``PagedAttentionCache``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnplug import CacheLayout, ForwardBatch, ForwardExtras, ForwardMode, Geometry, LayerSpec, MHAPool, ModelSpec
from attnplug.host import BackendRequest, Limits, ModelAttention
from attnplug_transformers.blocks import BlockCache, LayerGroup, read_gathered
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.layer_call import read_call
from attnplug_transformers.pages import PageStore, attention_over, choose_and_build, planned, problem_of

PAGED_ARGUMENTS = frozenset(
    {
        "block_table",
        "cache",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "max_seqlen_k",
        "max_seqlen_q",
        "read_index",
        "write_index",
    }
)


@dataclass(slots=True, eq=False)
class PlannedLayers:
    """Planned batch of a group's layers in one step. ``slots``: slots of all rows, for layers whose rows are copied."""

    attention: ModelAttention
    batch: ForwardBatch
    slots: Tensor | None = None


@dataclass(slots=True, eq=False)
class PagedGroup:
    """Layers of one type in a cache, and their current step."""

    blocks: LayerGroup
    over: ModelAttention | None = None
    """Attention over the cache's own memory, for layers without a window."""
    layers: dict[int, LayerSpec] = field(default_factory=dict)
    lengths: object = None
    """``cu_seq_lens_q`` of the step, which identifies it: transformers makes a new object for each step, and keeping
    this one prevents its id from being reused."""
    seen: set[int] = field(default_factory=set)
    planned: PlannedLayers | None = None

    def of_step(
        self, index: int, lengths: object, attention: ModelAttention, plan: Callable[[], PlannedLayers]
    ) -> PlannedLayers:
        """Return the plan of this step, made by the group's first layer. No layer runs twice in a step."""
        planned = self.planned
        if planned is None or self.lengths is not lengths or index in self.seen or planned.attention is not attention:
            planned = self.planned = plan()
            self.lengths, self.seen = lengths, set()
        self.seen.add(index)
        return planned


class PagedBatches:
    """Attention over the caches of continuous batching, for one backend request."""

    def __init__(self, request: BackendRequest, store: PageStore) -> None:
        self._request = request
        self._store = store
        self._caches: WeakKeyDictionary[BlockCache, dict[int, PagedGroup]] = WeakKeyDictionary()

    def attend(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        dropout: float,
        scaling: float | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """Attend: query ``[1, heads, tokens, dim]`` with the tokens of all requests in sequence. Returns
        ``[1, tokens, heads, v_dim]``."""
        _check(query, mask, others)
        cache: BlockCache = others["cache"]
        index: int = module.layer_idx  # type: ignore[assignment]
        group = self._group(cache, index)
        window = group.blocks.window
        call = read_call(module, query, key, value, dropout, scaling, window, others, PAGED_ARGUMENTS)
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        if window is not None:
            return self._attend_window(cache, group, index, call.layer, query, key, value, extras, others)
        attention = self._over(cache, group, call.layer, query)
        layer = group.layers[index]
        if replace(call.layer, layer_id=index) != layer:
            raise BridgeError(
                f"layer {index} is {replace(call.layer, layer_id=index)}, but another that shares its blocks is "
                f"{layer}; such models are not supported in continuous batching"
            )
        step = group.of_step(
            index,
            others["cu_seq_lens_q"],
            attention,
            lambda: PlannedLayers(attention, planned(attention, _geometry(group.blocks, others))),
        )
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return attention.attend(q, k, v, layer, step.batch, extras=extras).unsqueeze(0)

    def _group(self, cache: BlockCache, index: int) -> PagedGroup:
        groups = self._caches.setdefault(cache, {})
        if index not in groups:
            group = PagedGroup(LayerGroup.of(cache, index))
            groups |= dict.fromkeys(group.blocks.layers, group)
        return groups[index]

    @torch.inference_mode(False)  # the backend's allocations outlive this call
    def _over(self, cache: BlockCache, group: PagedGroup, layer: LayerSpec, query: Tensor) -> ModelAttention:
        """Attention over the cache's own blocks. Built once, because they do not move."""
        if group.over is not None:
            return group.over
        blocks = group.blocks
        group.layers = {index: replace(layer, layer_id=index) for index in blocks.layers}
        tensors = blocks.tensors(cache)
        pairs = list(tensors.values())
        widths = tuple(rows.shape[-1] for rows in pairs[0])
        if widths != (layer.head_dim, layer.v_head_dim):
            raise BridgeError(
                f"layer {blocks.layers[0]} has keys and values of {layer.head_dim} and {layer.v_head_dim} each, but "
                f"transformers' continuous batching allocates {widths[0]} and {widths[1]}: it does not support this "
                "model; use generate()"
            )
        rows, dense = pairs[0][0].shape[0] * blocks.page_size, all(t.is_contiguous() for pair in pairs for t in pair)
        model = ModelSpec("transformers", "transformers", tuple(group.layers.values()), rows)
        layout = CacheLayout.TOKEN_MAJOR if dense else CacheLayout.STRIDED
        problem = problem_of(model, query.device, query.dtype, blocks.page_size, layout)
        assert problem.kv_dtype is not None
        pool = MHAPool.over(
            model.layers, tensors, "pages tokens heads dim", page_size=blocks.page_size, dtype=problem.kv_dtype
        )
        most = cache.max_batch_tokens
        limits = Limits(most, most, rows)
        group.over = choose_and_build(
            self._request,
            problem,
            lambda selection: attention_over(selection, model, pool, query.device, query.dtype, limits),
        )
        return group.over

    def _attend_window(
        self,
        cache: BlockCache,
        group: PagedGroup,
        index: int,
        layer: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extras: ForwardExtras | None,
        others: Mapping[str, object],
    ) -> Tensor:
        """Attend in a layer with a window. Its cache is a ring buffer and not a sequence of pages, so transformers
        gathers its rows and they are copied to pages of the bridge."""
        keys, values = read_gathered(cache, key, value, index, others)
        starts_q, starts_k, most_new, most = _lengths(group.blocks, others)
        pages = self._store.pages(layer, query, Limits(starts_q.shape[0] - 1, query.shape[2], most))

        def plan() -> PlannedLayers:
            requests = starts_q.shape[0] - 1
            number = torch.arange(keys.shape[0], device=query.device)
            owner = torch.searchsorted(starts_k[1:].contiguous(), number, right=True)
            live, owner = owner < requests, owner.clamp(max=requests - 1)
            firsts = pages.table[owner, 0].long() * pages.page_size
            geometry = Geometry(
                ForwardMode.EXTEND,
                pages.table[:requests],
                starts_k.diff().int(),
                pages.page_size,
                rows=query.shape[2],
                max_seq_len=most,
                max_new=most_new,
                new_lens=starts_q.diff().int(),
            )
            slots = torch.where(live, firsts + number - starts_k[owner], -1)
            return PlannedLayers(pages.attention, pages.planned(geometry), slots)

        step = group.of_step(index, others["cu_seq_lens_q"], pages.attention, plan)
        assert step.slots is not None
        pages.pool.write(layer.layer_id, step.slots, keys, values)
        q = query[0].transpose(0, 1)
        out = pages.attention.attend(q, None, None, layer, step.batch, save_kv_cache=False, extras=extras)
        return out.unsqueeze(0)


def _check(query: Tensor, mask: object, others: Mapping[str, object]) -> None:
    if mask is not None:
        raise BridgeError("continuous batching passed a mask along with lengths; backends read only lengths")
    if others.get("block_table") is not None:
        raise BridgeError(
            "continuous batching passed a block table, which is for flash attention's own kernel; turn it off: "
            "ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise BridgeError(
            "continuous batching captures CUDA graphs, in which a step cannot be planned; turn them off: "
            "ContinuousBatchingConfig(use_cuda_graph=False)"
        )


def _lengths(blocks: LayerGroup, others: Mapping[str, object]) -> tuple[Tensor, Tensor, int, int]:
    """Start offsets of each request's queries and rows, ``[requests + 1]`` int64, and the maxima of both."""
    given: Any = others
    rows, most = given["cu_seq_lens_k"], given.get("max_length_k", given.get("max_seqlen_k"))
    if isinstance(rows, dict):
        rows, most = rows[blocks.layer_type], most[blocks.layer_type]
    most_new = given.get("max_length_q", given.get("max_seqlen_q"))
    return given["cu_seq_lens_q"].long(), rows.long(), int(most_new), int(most)


def _geometry(blocks: LayerGroup, others: Mapping[str, object]) -> Geometry:
    """Geometry with a page table made from the read indices: a request's rows fill one block after another.

    A step without older rows has no read indices. The rows of its requests are those that it writes.
    """
    given: Any = others
    starts_q, starts_k, most_new, most = _lengths(blocks, others)
    written = given["write_index"][blocks.index]
    read = given["read_index"][blocks.index]
    read = read if read.numel() else written
    count = -(-most // blocks.page_size)
    firsts = starts_k[:-1, None] + torch.arange(count, device=read.device) * blocks.page_size
    table = read[firsts.clamp(max=read.numel() - 1)].div(blocks.stride, rounding_mode="floor").int()
    new_lens, rows = starts_q.diff().int(), written.numel()
    slots = written.div(blocks.stride, rounding_mode="floor") * blocks.page_size + written % blocks.stride
    uniform = rows == new_lens.numel() and most_new == 1
    return Geometry(
        ForwardMode.DECODE if uniform else ForwardMode.EXTEND,
        table,
        starts_k.diff().int(),
        blocks.page_size,
        rows=rows,
        max_seq_len=most,
        max_new=most_new,
        new_lens=None if uniform else new_lens,
        slots=slots,
    )
