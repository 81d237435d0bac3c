"""The seam to FlashInfer: what the backend asks of kernels, and the only code that imports the library.

A kernel is planned for one call and one shape of layers, and then run once per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnplug import LayerSpec, MHAPool
from attnplug.kernels import check_rows
from attnplug_flashinfer.planner import PagedCall
from attnplug_flashinfer.schedule import PageCounts, Schedule, UniformBatch
from attnplug_flashinfer.shapes import LayerShape
from attnplug_flashinfer_mla.kernels import naming

FA2 = "fa2"
"""The kernel of all batches but long extends."""
_LN_2 = math.log(2.0)
_ALIGNED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """One layer's keys and values ``[pages, page_size, kv_heads, dim]``, of any strides that the kernels read."""

    shape: LayerShape
    keys: Tensor
    values: Tensor
    scales: Mapping[str, float]
    """Additional arguments of a call over an fp8 cache."""

    @classmethod
    def of(cls, pool: MHAPool, layer: LayerSpec) -> Cache:
        keys, values = pool.keys(layer.layer_id), pool.values(layer.layer_id)
        check_rows(keys, f"the keys of layer {layer.layer_id}", "FlashInfer")
        check_rows(values, f"the values of layer {layer.layer_id}", "FlashInfer")
        names = ("k_scale", "v_scale") if keys.dtype is torch.float8_e4m3fn else ()
        scales = dict(zip(names, map(float, pool.scales(layer.layer_id)), strict=False))
        return cls(LayerShape.of(layer), keys, values, scales)


@dataclass(frozen=True, slots=True)
class CacheType:
    """What the kernels of a backend have in common."""

    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class GraphBuffers:
    """Memory at fixed addresses for a captured call: its lengths, in pages, and its page indices."""

    counts: PageCounts
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of FlashInfer in use, and CUDA's events, which say how far a stream has come."""

    prefill: Any
    decode: Any
    event: Any


@cache
def load_library() -> Library:
    """Import FlashInfer. Raises whatever its import raises."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return Library(BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper, torch.cuda.Event)


class FlashInferKernels:
    """Makes the kernels of one lane. ``scratch`` gives at least so many bytes, which the wrappers of a lane share.

    Long extends run on ``prefill``, fa2 or fa3. All other batches run on fa2, whose module FlashInfer compiles once for
    each type and width of heads, with or without window and cap.
    """

    def __init__(
        self, library: Library, kind: CacheType, scratch: Callable[[int], Tensor], processors: int, prefill: str
    ) -> None:
        self._library, self._kind, self._scratch = library, kind, scratch
        self._processors, self.prefill = processors, prefill

    def eager(self, shape: LayerShape, kernel: str) -> FlashInferEager:
        workspace = self._scratch(shape.eager_scratch(self._processors))
        return FlashInferEager(self._library, shape, self._kind, workspace, kernel)

    def captured(self, shape: LayerShape, batch: UniformBatch, buffers: GraphBuffers) -> FlashInferCaptured:
        workspace = self._scratch(shape.captured_scratch(self._processors, batch.requests, batch.queries))
        return FlashInferCaptured(self._library, shape, self._kind, workspace, batch, buffers)


class FlashInferEager:
    """``BatchPrefillWithPagedKVCacheWrapper``, planned anew for every batch and then run once per layer.

    Its fa2 kernel is also what FlashInfer decodes with on tensor cores.
    """

    def __init__(self, library: Library, shape: LayerShape, kind: CacheType, workspace: Tensor, kernel: str) -> None:
        self._shape, self._kind = shape, kind
        self._wrapper = library.prefill(workspace, kv_layout="NHD", backend=kernel)
        # A plan's arrays stay in page-locked memory until the stream has copied them. Planning again before that would
        # overwrite them.
        self._sent = library.event()

    @property
    def ready(self) -> bool:
        """Whether it can be planned without waiting for what an earlier plan sent to the device."""
        return bool(self._sent.query())

    def plan(self, call: PagedCall) -> None:
        lengths = call.lengths
        with naming(f"a paged call of {len(lengths.kv_lens)} requests and {int(lengths.qo_indptr[-1])} rows"):
            self._wrapper.plan(
                qo_indptr=lengths.qo_indptr,
                paged_kv_indptr=lengths.kv_indptr,
                paged_kv_indices=call.kv_indices,
                paged_kv_last_page_len=call.last_page_lens,
                head_dim_qk=self._shape.dim,
                causal=call.causal,
                seq_lens=lengths.kv_lens,
                max_token_per_sequence=call.most_queries,
                **_of_both(self._shape, self._kind),
            )
        self._sent.record()

    def run(self, q: Tensor, cache: Cache, out: Tensor | None, lse: Tensor | None) -> Tensor:
        """q ``[rows, heads, dim]`` → the same shape, in ``out`` if given, which is contiguous; ``lse`` natural log."""
        return _run(self._wrapper, q, cache, out, lse)


class FlashInferCaptured:
    """``BatchDecodeWithPagedKVCacheWrapper`` on tensor cores, for graphs of decode and of uniform verify.

    The wrapper for prefill would take tiles for the longest request that a captured batch could have, and scratch for
    as many as it could have of these. This one is told that every request has as many queries.
    """

    def __init__(
        self,
        library: Library,
        shape: LayerShape,
        kind: CacheType,
        workspace: Tensor,
        batch: UniformBatch,
        buffers: GraphBuffers,
    ) -> None:
        self._shape, self._kind, self._batch, self._buffers = shape, kind, batch, buffers
        self._wrapper = library.decode(
            workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.counts.kv_indptr,
            paged_kv_indices_buffer=buffers.kv_indices,
            paged_kv_last_page_len_buffer=buffers.counts.last_page_lens,
            backend=FA2,
        )

    def plan(self, kv_lens: Tensor) -> Schedule | None:
        """Plan it once, for ``kv_lens`` ``[requests]`` on the host. Returns the work list, for callers that fill it
        themselves; ``None`` if it is not one that this plugin knows."""
        requests, queries, page_size = self._batch.requests, self._batch.queries, self._kind.page_size
        pages = -(-kv_lens // page_size)
        kv_indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
        with naming(f"a captured batch of {requests} requests and {queries} rows each"):
            self._wrapper.plan(
                indptr=kv_indptr,
                indices=self._buffers.kv_indices[: int(kv_indptr[-1])],
                last_page_len=kv_lens - (pages - 1) * page_size,
                head_dim=self._shape.dim,
                seq_lens=kv_lens,
                q_len_per_req=queries,
                **_of_both(self._shape, self._kind),
            )
        return Schedule.of(list(self._wrapper._plan_info), self._wrapper._int_workspace_buffer, self._batch)

    def run(self, q: Tensor, cache: Cache, out: Tensor | None, lse: Tensor | None) -> Tensor:
        return _run(self._wrapper, q, cache, out, lse)


def _of_both(shape: LayerShape, kind: CacheType) -> dict[str, Any]:
    """What both wrappers are planned with, by the same names."""
    return {
        "num_qo_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "page_size": kind.page_size,
        "sm_scale": shape.scale,
        "window_left": shape.window_left,
        "logits_soft_cap": shape.cap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.kv_dtype,
    }


def _run(wrapper: Any, q: Tensor, cache: Cache, out: Tensor | None, lse: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # without, the library would fill one with zeros
    wrapper.run(_readable(q), (cache.keys, cache.values), out=out, lse=lse, return_lse=lse is not None, **cache.scales)
    if lse is not None:
        lse.mul_(_LN_2)  # it counts in powers of two (C4)
    return out


def _readable(q: Tensor) -> Tensor:
    """``q``, or a copy if the kernels cannot read it: columns are adjacent, and rows lie at multiples of 16 bytes."""
    *outer, column = q.stride()
    places = [stride * q.element_size() for stride in outer] + [q.data_ptr()]
    if column == 1 and not any(place % _ALIGNED for place in places):
        return q
    return q.clone(memory_format=torch.contiguous_format)
