"""Continuous batching: backends over the memory of ``PagedAttentionCache``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnplug import CacheLayout, ForwardBatch, ForwardExtras, ForwardMode, Geometry, LayerSpec, MHAPool, ModelSpec
from attnplug.host import BackendRequest, Limits, ModelAttention
from attnplug_transformers.blocks import LayerGroup, read_gathered
from attnplug_transformers.calls import Call, read_call
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.pages import PageStore, attention_over, choose, planned, problem_of

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
class Group:
    """A cache's layers of one kind: attention over its blocks, and the batch of the step that runs."""

    attention: ModelAttention
    layers: dict[int, LayerSpec]
    blocks: LayerGroup
    lengths: Tensor | None = None
    """``cu_seq_lens_q`` of the step. transformers makes a new one for each, and it is kept so that it stays unique."""
    seen: set[int] = field(default_factory=set)
    batch: ForwardBatch | None = None


class PagedBatches:
    """Attention over the caches of continuous batching, for one choice of backends."""

    def __init__(self, request: BackendRequest, store: PageStore) -> None:
        self._request = request
        self._store = store
        self._groups: WeakKeyDictionary[Any, dict[int, Group]] = WeakKeyDictionary()
        self._lock = Lock()

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
        """q ``[1, heads, tokens, dim]``, with the requests' tokens one after the other; returns ``[1, tokens, heads,
        v_dim]``."""
        if mask is not None:
            raise BridgeError("continuous batching gave a mask along with lengths; backends read lengths only")
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BridgeError(
                "continuous batching captures CUDA graphs, in which a step cannot be planned; turn them off: "
                "ContinuousBatchingConfig(use_cuda_graph=False)"
            )
        cache: Any = others["cache"]
        index: int = module.layer_idx  # type: ignore[assignment]
        blocks = LayerGroup.of(cache, index)
        call = read_call(module, query, key, value, dropout, scaling, blocks.window, others, PAGED_ARGUMENTS)
        if others.get("block_table") is not None:
            raise BridgeError("continuous batching gave a block table; set ContinuousBatchingConfig(max_blocks_per_request=0)")
        if blocks.window is not None:
            return self._attend_window(cache, blocks, call, query, key, value, others, index)
        group = self._group(cache, blocks, call.layer, query)
        layer = group.layers[index]
        if replace(call.layer, layer_id=index) != layer:
            raise BridgeError(
                f"layer {index} differs from others that share its cache ({call.layer} and {layer}); such models are "
                "not supported in continuous batching"
            )
        batch = _batch_of(group, index, others)
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return group.attention.attend(*rows, layer, batch, extras=extras).unsqueeze(0)

    def _group(self, cache: Any, blocks: LayerGroup, layer: LayerSpec, query: Tensor) -> Group:
        with self._lock:
            groups = self._groups.setdefault(cache, {})
            if blocks.index not in groups:
                groups[blocks.index] = self._build(cache, blocks, layer, query)
            return groups[blocks.index]

    def _build(self, cache: Any, blocks: LayerGroup, layer: LayerSpec, query: Tensor) -> Group:
        layers = {index: replace(layer, layer_id=index) for index in blocks.layers}
        rows = blocks.num_pages * blocks.page_size
        model = ModelSpec("transformers", "transformers", tuple(layers.values()), rows)
        layout = CacheLayout.TOKEN_MAJOR if blocks.dense else CacheLayout.STRIDED
        problem = problem_of(model, query.device, query.dtype, blocks.page_size, layout)
        selection = choose(self._request, problem)
        assert problem.kv_dtype is not None
        pool = MHAPool.over(
            model.layers, blocks.tensors, "pages tokens heads dim", page_size=blocks.page_size, dtype=problem.kv_dtype
        )
        most = cache.max_batch_tokens
        attention = attention_over(selection, model, pool, query.device, query.dtype, Limits(most, most, rows))
        return Group(attention, layers, blocks)

    def _attend_window(
        self,
        cache: Any,
        blocks: LayerGroup,
        call: Call,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        others: Mapping[str, object],
        index: int,
    ) -> Tensor:
        """Layers with a window keep a ring, which is no sequence of pages: transformers reads it, and its rows are
        attended to in pages of our own."""
        keys, values = read_gathered(cache, key, value, index, others)
        queries, rows, most_new, most = _lengths(blocks, others)
        requests = queries.shape[0] - 1
        pages = self._store.pages(call.layer, query, Limits(requests, query.shape[2], most))
        new_lens, lens = queries.diff(), rows.diff()
        number = torch.arange(keys.shape[0], device=query.device)
        owner = torch.searchsorted(rows[1:].contiguous(), number, right=True)
        live = owner < requests
        owner = owner.clamp(max=requests - 1)
        firsts = pages.table[owner, 0].long() * pages.page_size
        pages.pool.write(pages.layer.layer_id, torch.where(live, firsts + number - rows[owner], -1), keys, values)
        geometry = Geometry(
            ForwardMode.EXTEND,
            pages.table[:requests],
            lens.int(),
            pages.page_size,
            rows=query.shape[2],
            max_seq_len=most,
            max_new=most_new,
            new_lens=new_lens.int(),
        )
        batch = pages.planned(geometry)
        extras = None if call.sinks is None else ForwardExtras(sinks=call.sinks)
        q = query[0].transpose(0, 1)
        out = pages.attention.attend(q, None, None, pages.layer, batch, save_kv_cache=False, extras=extras)
        return out.unsqueeze(0)


def _batch_of(group: Group, index: int, others: Mapping[str, object]) -> ForwardBatch:
    """The batch of this step, planned by the first of the group's layers. No layer runs twice in a step."""
    queries = others["cu_seq_lens_q"]
    if group.batch is None or group.lengths is not queries or index in group.seen:
        assert isinstance(queries, Tensor)
        group.batch = planned(group.attention, _geometry(group.blocks, others))
        group.lengths, group.seen = queries, set()
    group.seen.add(index)
    return group.batch


def _lengths(blocks: LayerGroup, others: Mapping[str, object]) -> tuple[Tensor, Tensor, int, int]:
    """Where each request's queries and rows begin ``[requests + 1]`` int64, and bounds of how many there are."""
    given: Any = others
    rows, most = given["cu_seq_lens_k"], given.get("max_length_k", given.get("max_seqlen_k"))
    if isinstance(rows, dict):
        rows, most = rows[blocks.layer_type], most[blocks.layer_type]
    most_new = given.get("max_length_q", given.get("max_seqlen_q"))
    return given["cu_seq_lens_q"].long(), rows.long(), int(most_new), int(most)


def _geometry(blocks: LayerGroup, others: Mapping[str, object]) -> Geometry:
    """The page table, from the indices of cache rows: a request's rows fill one block after the other.

    A step that reads no older rows has no indices to read by. Its requests' rows are those that it writes.
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
