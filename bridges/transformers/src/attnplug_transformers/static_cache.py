"""Decode steps over transformers' ``StaticCache``, without copies and without graph breaks under ``torch.compile``.

A static cache keeps keys and values of a layer as ``[batch, kv_heads, columns, dim]``. Each (request, KV head) pair
runs as a request with one KV head: its rows are contiguous in memory, so the cache is a pool with pages of one row. The
page table lists the columns that a request attends to, and thereby expresses padding and windows. It is computed on the
device in every step, and captured by CUDA graphs along with the backend's plan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from attnplug import (
    CacheLayout,
    Claims,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    MHAPool,
    ModelSpec,
    Role,
)
from attnplug.host import BackendRequest, Limits, Selection
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.layer_call import layer_of
from attnplug_transformers.pages import attention_over, choose, planned, power_of_two, problem_of

T = TypeVar("T")
_FEWEST_COLUMNS = 256
"""Minimum columns of the bridge's own copy of a cache."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of cache layers that share a plan. ``layer`` describes one KV head with its query heads."""

    layer: LayerSpec
    batch: int
    kv_heads: int
    columns: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: LayerSpec, key: Tensor) -> CacheShape:
        """Shape of a layer with keys ``[batch, kv_heads, columns, dim]``."""
        batch, kv_heads, columns, _ = key.shape
        group = layer.num_heads // layer.num_kv_heads
        # The page table implements the window. Sinks differ between KV heads, so the bridge applies them.
        one = replace(layer, num_heads=group, num_kv_heads=1, sliding_window=None, sinks=False)
        return cls(one, batch, kv_heads, columns, key.device, key.dtype)

    @property
    def requests(self) -> int:
        return self.batch * self.kv_heads

    def select(self, request: BackendRequest) -> Selection:
        """Select backends; on a GPU, those whose plan a CUDA graph can capture, if there are any."""
        model = ModelSpec("transformers", "transformers", (self.layer,), self.columns)
        problem = problem_of(model, self.device, self.dtype, 1, CacheLayout.TOKEN_MAJOR)
        if self.device.type == "cuda":
            with suppress(BridgeError):
                return choose(request, problem, plans_in_graphs=True)
        return choose(request, problem)


class CacheLayers:
    """Attention over the cache memory of layers with one shape, and the plan of their current step.

    ``memory`` holds keys ``[batch, kv_heads, columns, dim]`` and values ``[batch, kv_heads, columns, v_dim]`` of each
    layer, contiguous.
    """

    def __init__(self, request: BackendRequest, shape: CacheShape, memory: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.memory = memory
        count, columns, device = shape.requests, shape.columns, shape.device
        self.layers = tuple(replace(shape.layer, layer_id=index) for index in range(len(memory)))
        model = ModelSpec("transformers", "transformers", self.layers, columns)
        selection = shape.select(request)
        assert selection.problem.kv_dtype is not None
        rows = {
            index: (keys.view(-1, 1, keys.shape[3]), values.view(-1, 1, values.shape[3]))
            for index, (keys, values) in enumerate(memory)
        }
        pool = MHAPool.over(self.layers, rows, "slots heads dim", page_size=1, dtype=selection.problem.kv_dtype)
        limits = Limits(count, count, columns)
        self._attention = attention_over(selection, model, pool, device, shape.dtype, limits)
        self._heads = shape.kv_heads
        self._firsts = torch.arange(count, device=device).view(shape.batch, -1, 1) * columns
        self._table = self._firsts.flatten(0, 1).int() + torch.zeros(columns, dtype=torch.int32, device=device)
        self._lens = torch.ones(count, dtype=torch.int32, device=device)
        self._shortest = 0
        self._batch: ForwardBatch | None = None
        self.captured = _plans_in_graphs(self._attention.backend.claims)
        self.step: object = None
        """Identity of the step that the plan is for."""
        if self.captured:
            self._attention.reserve(count, count)
            self._shortest = self._attention.padding_length()
            self._batch = ForwardBatch(self._geometry(captured=True))
            self._attention.capture(self._batch, in_capture=True)

    def _geometry(self, *, captured: bool) -> Geometry:
        count, columns = self._table.shape
        return Geometry(
            ForwardMode.DECODE,
            self._table,
            self._lens,
            1,
            rows=count,
            max_seq_len=columns,
            max_new=1,
            captured=captured,
        )

    def plan(self, position: Tensor, columns: int, valid: Tensor | None, window: int | None) -> None:
        """Plan a step on the device. It may run inside a graph capture if ``captured``.

        Requests attend to those of the first ``columns`` columns that are ``valid`` ``[batch, columns]`` (``None``:
        all), not behind ``position`` (a tensor of one element), and within ``window``.
        """
        column = torch.arange(columns, device=self._table.device)
        seen = column <= position
        if window is not None:
            seen = seen & (column > position - window)
        batch = self._firsts.shape[0]
        visible = seen.expand(batch, -1) if valid is None else seen & valid
        # Visible columns first, in ascending order; entries behind them are not read.
        rank = torch.where(visible, visible.cumsum(1) - 1, columns)
        order = column.new_zeros(batch, columns + 1).scatter_(1, rank, column.expand(batch, -1))[:, None, :columns]
        self._table.view(batch, self._heads, -1)[:, :, :columns] = self._firsts + order
        lens = visible.sum(1, dtype=torch.int32).clamp(min=self._shortest)
        self._lens.view(batch, -1).copy_(lens[:, None])
        if self.captured:
            assert self._batch is not None
            self._attention.refill(self._batch)
        else:
            self._batch = planned(self._attention, self._geometry(captured=False))

    def attend(self, index: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Run a layer: query ``[batch, heads, 1, dim]``; returns ``[batch, 1, heads, v_dim]``."""
        assert self._batch is not None
        layer, heads = self.layers[index], query.shape[1]
        rows = query.reshape(-1, layer.num_heads, query.shape[3])
        lse = extras = None
        if sinks is not None:
            lse = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
            extras = ForwardExtras(lse=lse)
        out = self._attention.attend(rows, None, None, layer, self._batch, save_kv_cache=False, extras=extras)
        out = out.reshape(-1, 1, heads, out.shape[2])
        if lse is not None and sinks is not None:
            # A sink is a key whose value is zero: it scales the output by 1 - weight of the sink.
            share = torch.sigmoid(lse.view(-1, 1, heads, 1) - sinks.view(heads, 1))
            out = (out.float() * share).to(out.dtype)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlace:
    """Index of a layer's memory in the ``CacheLayers`` that plan it."""

    layers: CacheLayers
    index: int


class StaticCaches(threading.local):
    """Registry of the static caches of one thread's models, for one backend request.

    A prefill registers the memory of a cache, layer by layer, and builds the attention over it after the last one.
    Unregistered memory (windows, which transformers moves in every step, and copies by a compiler) is copied to pages
    of the bridge, which all layers of a shape share.
    """

    def __init__(self, request: BackendRequest) -> None:
        self._request = request
        self._registered: list[dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], LayerSpec]]] = []
        self._places: dict[tuple[int, int], LayerPlace] = {}
        self._copies: dict[CacheShape, CacheLayers] = {}
        self._steps: dict[Hashable, object] = {}
        self.breaks_graphs = False
        """True if the backend of a registered cache cannot be captured on its device."""

    def register(self, index: int, key: Tensor, value: Tensor, layer: LayerSpec) -> None:
        """Register the memory of layer ``index`` of a static cache, unless the layer shares another one's."""
        where = key.data_ptr(), value.data_ptr()
        if where in self._places or not (key.is_contiguous() and value.is_contiguous()):
            return
        for *refs, other in self._registered[-1].values() if self._registered else ():
            if _memory_of(*refs) == where:
                if CacheShape.of(other, key) != CacheShape.of(layer, key):
                    raise BridgeError(
                        f"layer {index} shares the cache of another layer, but differs from it: {layer} and {other}; "
                        "use attn_implementation='sdpa'"
                    )
                return
        if not self._registered or index in self._registered[-1]:  # another cache
            self._registered.append({})
        self._registered[-1][index] = weakref.ref(key), weakref.ref(value), layer
        if key.is_cuda and len(self._registered[-1]) == 1:
            served = CacheShape.of(layer, key).select(self._request).choices[Role.DECODE].serving
            self.breaks_graphs = not all(_plans_in_graphs(backend.spec.capabilities) for backend in served)

    @property
    def is_registering(self) -> bool:
        """Return True if memory was registered since the last build."""
        return bool(self._registered)

    def find(self, key: Tensor, value: Tensor) -> LayerPlace | None:
        """Return the place of a layer's memory; ``None`` if it was not registered."""
        self.build()
        return self._places.get((key.data_ptr(), value.data_ptr()))

    def build(self) -> None:
        """Build the attention over all memory that was registered."""
        registered, self._registered = self._registered, []
        for layers in registered:
            self._build(layers)

    def _build(self, registered: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], LayerSpec]]) -> None:
        groups: dict[CacheShape, list[tuple[Tensor, Tensor]]] = {}
        for key_ref, value_ref, layer in registered.values():
            key, value = key_ref(), value_ref()
            if key is not None and value is not None:
                groups.setdefault(CacheShape.of(layer, key), []).append((key, value))
        for shape, pairs in groups.items():
            # .data shares the memory without keeping the cache's own tensor alive; its finalizer removes the place.
            memory = [(key.data, value.data) for key, value in pairs]
            layers = _in_new_thread(partial(CacheLayers, self._request, shape, memory), shape.device)
            for number, (key, value) in enumerate(pairs):
                where = key.data_ptr(), value.data_ptr()
                self._places[where] = LayerPlace(layers, number)
                weakref.finalize(key, self._places.pop, where, None)

    def attend(
        self,
        layer: LayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        valid: Tensor | None,
        sinks: Tensor | None,
        starts_step: bool,
    ) -> Tensor:
        """Run a layer of a decode step; see ``CacheLayers``. ``starts_step``: the first of its shape in this step."""
        step = layer, query.shape[0], key.device
        if starts_step:
            self._steps[step] = object()
        place = self.find(key, value)
        if place is None:
            place = self._copied(layer, key, value)
        layers, current = place.layers, self._steps[step]
        if layers.step is not current:
            layers.plan(position, key.shape[2], valid, layer.sliding_window)
            layers.step = current
        return layers.attend(place.index, query, sinks)

    def _copied(self, layer: LayerSpec, key: Tensor, value: Tensor) -> LayerPlace:
        """Copy keys and values to the bridge's pages; return the place of the copy."""
        columns = key.shape[2]
        shape = CacheShape.of(layer, key)
        shape = replace(shape, columns=power_of_two(max(columns, _FEWEST_COLUMNS)))
        layers = self._copies.get(shape)
        if layers is None:
            layers = self._copies[shape] = _in_new_thread(partial(self._scratch, shape), shape.device)
        for target, source in zip(layers.memory[0], (key, value), strict=True):
            target[:, :, :columns] = source
        return LayerPlace(layers, 0)

    def _scratch(self, shape: CacheShape) -> CacheLayers:
        sizes = shape.batch, shape.kv_heads, shape.columns
        widths = shape.layer.head_dim, shape.layer.v_head_dim
        keys, values = (torch.zeros(*sizes, width, dtype=shape.dtype, device=shape.device) for width in widths)
        return CacheLayers(self._request, shape, [(keys, values)])


def _plans_in_graphs(claims: Claims) -> bool:
    """Return True if a CUDA graph can capture a decode step together with its plan, from lengths on the device."""
    return claims.cuda_graph >= GraphLevel.DECODE and not claims.needs_cpu_seq_lens


def _memory_of(key: weakref.ref[Tensor], value: weakref.ref[Tensor]) -> tuple[int, int] | None:
    tensors = key(), value()
    return None if tensors[0] is None or tensors[1] is None else (tensors[0].data_ptr(), tensors[1].data_ptr())


def _in_new_thread(build: Callable[[], T], device: torch.device) -> T:
    """Run ``build`` in a new thread and return its result.

    The first compiled step runs inside its CUDA graph's memory pool, which serves all allocations of its thread.
    Allocations of another thread outlive the graph. A new thread is not in inference mode, either.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            results.append(build())
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the step runs on another stream
        except BaseException as error:
            errors.append(error)

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise BridgeError("a CUDA graph captures a step whose cache was never used before; run one such step first")
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_caches: list[StaticCaches] = []
"""Caches of each backend request. A compiled step holds its index as a constant."""


def new_caches(request: BackendRequest) -> tuple[int, StaticCaches]:
    """Return new caches, and their index for ``attend_static``."""
    _caches.append(StaticCaches(request))
    return len(_caches) - 1, _caches[-1]


@torch.library.custom_op("attnplug::attend_static", mutates_args=())
def attend_static(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    valid: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    logit_cap: float | None,
    caches: int,
    starts_step: bool,
) -> Tensor:
    """Run one layer of a decode step: query ``[batch, heads, 1, dim]`` to ``[batch, 1, heads, v_dim]``.

    A custom operator, so that ``torch.compile`` does not trace into it. ``caches`` is an index of ``new_caches``.
    """
    layer = layer_of(query, key, value, scale, window, logit_cap, sinks is not None)
    return _caches[caches].attend(layer, query, key, value, position, valid, sinks, starts_step)


@attend_static.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    valid: Tensor | None,
    sinks: Tensor | None,
    window: int | None,
    scale: float,
    logit_cap: float | None,
    caches: int,
    starts_step: bool,
) -> Tensor:
    return query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
