"""Stage for one backend at one point: caches of random rows in random pages, a batch, and the chain of timed calls.

A step is planned once and every call writes its new rows, as in an engine. Decodes and verifies run in a CUDA graph if
the backend claims it, with a page table for the longest context and lengths on the device only. In a graph each call
depends on the previous result, so that no two overlap. MLA decodes and verifies are absorbed; the up-projections are
not part of a backend. MLA prefills take the requested path, or the policy's, up-projections included. Extends of one
token are decodes of a mixed batch, which is absorbed if the backend can. If a host absorbs MLA itself, its queries come
in two parts, it has written the new rows, and its index has selected the rows of sparse layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnplug.contract.backend import AttentionBackend, ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.context import HostContext, Limits
from attnplug.contract.geometry import Geometry, TypicalLens
from attnplug.contract.inputs import IndexInputs, SelectedPositions
from attnplug.declare.model import IndexerDims, LayerSpec, MLADims, ModelSpec
from attnplug.declare.problem import ExtendPath, ForwardMode, GraphLevel, Role
from attnplug.host import MLAWeights, installed_format
from attnplug.kv.buffer import torch_dtype
from attnplug.kv.pools import CacheKey, KeyedCache, KVPools, MHAPool, MLAPool
from attnplug.kv.workspace import WorkspaceOwner
from attnplug.layers.model_attention import ModelAttention
from attnplug.machine.runtime import runtime_of
from attnplug.wrappers.forwarding import planner_claims
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_sparse.selection import select_rows
from attnplug_tune.clock import Chain
from attnplug_tune.shapes import Task

Forward = Callable[..., Tensor]
Build = Callable[[HostContext], AttentionBackend]
"""Builds the backend under test. The context's pools are filled."""

CALLS = 20
"""Calls of a chain: the layers of a model of medium depth."""
FEW_CALLS = 4
"""Calls of a slow chain: prefills, and decodes over very large caches."""
_LONG_BYTES = 2 << 30
"""Size of a cache that takes half a millisecond to read."""
_LONG_PAIRS = 1 << 25
"""Pairs of a query row and a KV row that take a millisecond or more: a single call is timed."""
_FILL_ROWS = 1 << 15
_SELECTED_ROWS = 256
"""Tokens whose rows are drawn at once."""
_LINKED = 8
"""Output elements that the next call depends on."""
ROTATED_BYTES = 4 << 30
"""Total size up to which each call of a chain has its own cache. A larger cache does not fit L2 anyway."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that all stages of a run share."""

    device: torch.device
    max_context: int
    """Longest context of captured batches."""


def cache_bytes(task: Task) -> int:
    """Bytes of one layer's cache at a point."""
    shape = task.shape
    pages = sum(-(-length // shape.page_size) for length in task.point.lengths)
    row = installed_format(shape.kv_dtype).token_nbytes(task.layer)
    if (index := _own_index(task.layer)) is not None:
        row += index.head_dim * torch_dtype(shape.dtype).itemsize
    return pages * shape.page_size * row


def _own_index(layer: LayerSpec) -> IndexerDims | None:
    """Return the layer's index; None if it has none, or shares one as all layers do whose rows a host selects."""
    return None if layer.indexer is None or layer.indexer.shares is not None else layer.indexer


def stage_bytes(task: Task) -> int:
    """Bytes of a stage without the backend's own memory: caches, queries, new rows and outputs."""
    cache = cache_bytes(task)
    layer, shape = task.layer, task.shape
    width = layer.num_heads * (2 * max(shape.head_dim, layer.head_dim) + layer.v_head_dim + shape.value_dim)
    return cache * _layers(cache) + task.point.rows * width * torch_dtype(shape.dtype).itemsize


def _layers(cache: int) -> int:
    return min(CALLS, max(1, ROTATED_BYTES // cache))


class Stage:
    """A backend built over filled caches, and the calls of its chain."""

    def __init__(self, task: Task, setup: Setup, build: Build) -> None:
        self.task, self.device = task, setup.device
        self.last: Tensor | None = None
        """Output of the last call."""
        self.ran = False
        """True once the backend's calls ran. A test's clock may skip them."""
        shape, self.page_size = task.shape, task.shape.page_size
        self.dtype = torch_dtype(shape.dtype)
        self.lengths = task.point.lengths
        cache = cache_bytes(task)
        self.calls = FEW_CALLS if cache > _LONG_BYTES or task.point.role is Role.PREFILL else CALLS
        if task.point.rows * max(self.lengths) > _LONG_PAIRS:
            self.calls = 1
        self.layers = tuple(replace(task.layer, layer_id=number) for number in range(min(_layers(cache), self.calls)))
        self.context = max(setup.max_context, *self.lengths)
        self.page_table = self._page_table()
        self.pools = self._pools()
        self._fill()
        rows, requests = task.point.rows, len(self.lengths)
        self.attention = ModelAttention(
            build(
                HostContext(
                    model=ModelSpec("measured", "measured", self.layers, self.context),
                    device=self.device,
                    dtype=self.dtype,
                    kv_dtype=shape.kv_dtype,
                    page_size=self.page_size,
                    limits=Limits(requests, rows, self.context),
                    pools=self.pools,
                    workspace=WorkspaceOwner(),
                )
            ),
            self.pools,
        )
        self.q = self._random(rows, task.layer.num_heads, shape.head_dim)
        self._first = self.q
        """Tensor of the next call that ``link`` makes dependent on the previous result."""

    # Memory

    def _random(self, *dims: int) -> Tensor:
        return torch.randn(*dims, dtype=self.dtype, device=self.device)

    def _page_table(self) -> Tensor:
        """``[requests, pages]`` int32 in random order, the same for every backend."""
        counts = [-(-length // self.page_size) for length in self.lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        start = 0
        for request, count in enumerate(counts):
            table[request, :count] = order[start : start + count]
            start += count
        self._pages = sum(counts)
        return table.to(self.device)

    def _pools(self) -> KVPools:
        shape, device, pages, size = self.task.shape, self.device, self._pages, self.page_size
        dtype, caches = installed_format(shape.kv_dtype), dict[CacheKey[KeyedCache], KeyedCache]()
        if self.task.layer.mla is None:
            return KVPools(mha=MHAPool(self.layers, num_pages=pages, page_size=size, dtype=dtype, device=device))
        if _own_index(self.task.layer) is not None:
            keys = IndexKeyPool(self.layers, num_pages=pages, page_size=size, dtype=shape.dtype, device=device)
            caches[INDEX_KEYS] = keys
        mla = MLAPool(self.layers, num_pages=pages, page_size=size, dtype=dtype, device=device)
        return KVPools(mla=mla, caches=caches)

    def _fill(self) -> None:
        """Fill all caches with random rows. The values affect a GPU's power draw, and so its clock."""
        total = self._pages * self.page_size
        block = min(total, _FILL_ROWS)
        shape, dims, indexer = self.task.shape, self.task.layer.mla, _own_index(self.task.layer)
        heads = 1 if dims is not None else shape.num_kv_heads
        keys, values = (self._random(block, heads, width) for width in (shape.head_dim, shape.value_dim))
        index = None if indexer is None else self._random(block, indexer.head_dim)
        for start in range(0, total, block):
            slots = torch.arange(start, min(start + block, total), device=self.device)
            count = slots.shape[0]
            for layer in self.layers:
                if self.pools.mha is not None:
                    self.pools.mha.write(layer.layer_id, slots, keys[:count], values[:count])
                elif self.pools.mla is not None:
                    self.pools.mla.write(layer.layer_id, slots, keys[:count])
                if index is not None:
                    self.pools.cache(INDEX_KEYS).write(layer.layer_id, slots, index[:count])

    # Batches

    @property
    def captured(self) -> bool:
        """True if the chain runs in a CUDA graph."""
        point = self.task.point
        needed = GraphLevel.UNIFORM if point.tokens > 1 else GraphLevel.DECODE
        runs = runtime_of(self.device).graph is not None and point.role is not Role.PREFILL
        return runs and self.attention.graph_level >= needed

    def batch(self, *, captured: bool) -> ForwardBatch:
        """Batch of the point. A captured one has a page table for the longest context, and lengths on the device only.

        It still carries typical lengths, because an engine captures a batch for each length range.
        """
        point = self.task.point
        mode = ForwardMode.DECODE if point.tokens == 1 else ForwardMode.TARGET_VERIFY
        if point.role is Role.PREFILL:
            mode = ForwardMode.MIXED if 1 in point.query_lens else ForwardMode.EXTEND
        geometry = Geometry.of_lengths(mode, self.page_table, point.query_lens, self.lengths, self.page_size)
        if not captured:
            return ForwardBatch(geometry)
        width = math.ceil(self.context / self.page_size)
        table = torch.zeros(point.requests, width, dtype=torch.int32, device=self.device)
        table[:, : self.page_table.shape[1]] = self.page_table
        bounded = replace(geometry, page_table=table, max_seq_len=self.context, host=None, captured=True)
        return ForwardBatch(replace(bounded, typical=TypicalLens.of(self.lengths)))

    # Chains

    def chain(self, side: str) -> Chain:
        """Chain of the backend's calls, planned."""
        captured, attention = self.captured, self.attention
        batch = self.batch(captured=captured)
        if captured:
            attention.reserve(batch.batch_size, batch.num_tokens)
            attention.capture(batch, in_capture=True)
        else:
            path = ExtendPath.ABSORBED if self.task.shape.hosted else self.task.shape.path
            attention.plan(batch, path)
        call = self._call(batch)

        def run() -> None:
            if captured:
                attention.refill(batch)
            for number in range(self.calls):
                self.last = call(self.layers[number % len(self.layers)])
                if captured:
                    self.link(self.last)
            self.ran = True

        return Chain(
            side,
            self.task,
            self.calls,
            run,
            captured=captured,
            replan=(lambda: attention.capture(batch)) if captured else None,
            host_counts=self.task.point.role is not Role.PREFILL,
            planned_by=", ".join(batch.plan.attention.planner_names()) if batch.plan is not None else "",
        )

    def link(self, out: Tensor) -> None:
        """Make the next call depend on this result, as layers do. Otherwise kernels with programmatic dependent launch
        could overlap. The queries do not change."""
        self._first[0, 0, :_LINKED].add_(out[0, 0, :_LINKED], alpha=0)

    def links(self) -> Chain:
        """Chain of the links alone. Their time is subtracted from that of a captured chain."""
        other = self.q[-1:].clone()

        def run() -> None:
            for _ in range(self.calls):
                self.link(other)

        return Chain("links", self.task, self.calls, run, captured=True)

    def _call(self, batch: ForwardBatch) -> Callable[[LayerSpec], Tensor]:
        attention, layer, shape, rows = self.attention, self.task.layer, self.task.shape, batch.geometry.rows
        selects = self._selects(batch)
        if layer.mla is None:
            k, v = (self._random(rows, layer.num_kv_heads, width) for width in (layer.head_dim, layer.v_head_dim))
            sinks = torch.randn(layer.num_heads, device=self.device) if layer.sinks else None
            extras = None if sinks is None else ForwardExtras(sinks=sinks)
            return lambda each: attention.attend(self.q, k, v, each, batch, extras=extras)
        new = self._random(rows, 1, shape.head_dim)
        absorbed = batch.plan is not None and batch.plan.extend is None
        if absorbed and (shape.hosted or self.task.point.role is not Role.PREFILL):
            backend = attention.backend
            forward = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
            if shape.hosted:
                return self._hosted(forward, batch, layer.mla)
            return lambda each: forward(self.q, new, None, each, batch, extras=selects(each))
        # A prefill takes queries that are not absorbed; the policy's path transforms them.
        queries, flat = self._random(rows, layer.num_heads, layer.head_dim), new.squeeze(1)
        rank, nope = layer.mla.kv_lora_rank, layer.mla.qk_nope_head_dim
        weights = MLAWeights(
            self._random(layer.num_heads, nope, rank) * rank**-0.5,
            self._random(layer.num_heads, rank, layer.v_head_dim) * rank**-0.5,
        )

        def prefill(each: LayerSpec) -> Tensor:
            extras = selects(each)
            selected = None if extras is None else extras.selected
            return attention.attend_mla(queries, flat, each, weights, batch, selected=selected)

        return prefill

    def _hosted(self, forward: Forward, batch: ForwardBatch, dims: MLADims) -> Callable[[LayerSpec], Tensor]:
        """Calls with queries laid out as in vLLM: the latent part comes heads-first from a matmul, the rotary part is
        the tail of the query projection. They are concatenated for a backend without the extra ``q_rope``."""
        rows, heads, nope = batch.geometry.rows, self.task.layer.num_heads, dims.qk_nope_head_dim
        latent = self._first = self._random(heads, rows, dims.kv_lora_rank).transpose(0, 1)
        rope = self._random(rows, heads, nope + dims.qk_rope_head_dim)[..., nope:]
        assert batch.plan is not None
        extras = ForwardExtras(selected=self._selected())
        if "q_rope" in planner_claims(self.attention.backend, batch.plan.attention).extras:
            extras = replace(extras, q_rope=rope)
            return lambda each: forward(latent, None, None, each, batch, save_kv_cache=False, extras=extras)
        return lambda each: forward(
            torch.cat((latent, rope), -1), None, None, each, batch, save_kv_cache=False, extras=extras
        )

    def _selected(self) -> SelectedPositions | None:
        """Random rows for a sparse layer whose rows the host selects, in random order as from a top-k; else None."""
        indexer, point = self.task.layer.indexer, self.task.point
        if indexer is None:
            return None
        chosen = []
        for new, length in zip(point.query_lens, self.lengths, strict=True):
            for visible in torch.arange(length - new + 1, length + 1, device=self.device).split(_SELECTED_ROWS):
                scores = torch.rand(len(visible), length, device=self.device)
                scores.masked_fill_(torch.arange(length, device=self.device) >= visible[:, None], -1.0)
                best, rows = scores.topk(min(indexer.topk, length))
                chosen.append(pad(rows.int().masked_fill(best < 0, -1), (0, indexer.topk - rows.shape[1]), value=-1))
        return SelectedPositions(torch.cat(chosen))

    def _selects(self, batch: ForwardBatch) -> Callable[[LayerSpec], ForwardExtras | None]:
        """Row selection of a sparse layer, which precedes its attention."""
        indexer, rows = self.task.layer.indexer, batch.geometry.rows
        if indexer is None:
            return lambda each: None
        index = IndexInputs(
            self._random(rows, indexer.heads, indexer.head_dim),
            self._random(rows, indexer.head_dim),
            torch.rand(rows, indexer.heads, device=self.device),
        )
        return lambda each: ForwardExtras(selected=select_rows(self.attention, index, each, batch))
