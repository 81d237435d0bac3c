"""FlashInfer's paged wrappers. Only this module imports FlashInfer.

A kernel is planned for one call and one layer shape, and then run once per layer.
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
from attnplug_flashinfer.planner import FlashInferPagedCall
from attnplug_flashinfer.shapes import FlashInferLayerShape
from attnplug_flashinfer.work_list import PageCounts, PagedWorkList, UniformPagedBatch
from attnplug_flashinfer_mla.kernels import explain_plan_errors

FA2 = "fa2"
"""Kernel of all batches except long extends."""
_LN_2 = math.log(2.0)
_ALIGNED = 16


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayerCache:
    """Keys and values of one layer, ``[pages, page_size, kv_heads, dim]``. The memory belongs to the pool.

    Columns are contiguous; other strides are multiples of 16 bytes.
    """

    shape: FlashInferLayerShape
    keys: Tensor
    values: Tensor
    scales: Mapping[str, float]
    """Scale arguments of a call over an fp8 cache; empty for other dtypes."""

    @classmethod
    def of(cls, pool: MHAPool, layer: LayerSpec) -> PagedLayerCache:
        keys, values = pool.keys(layer.layer_id), pool.values(layer.layer_id)
        check_rows(keys, f"the keys of layer {layer.layer_id}", "FlashInfer")
        check_rows(values, f"the values of layer {layer.layer_id}", "FlashInfer")
        names = ("k_scale", "v_scale") if keys.dtype is torch.float8_e4m3fn else ()
        scales = dict(zip(names, map(float, pool.scales(layer.layer_id)), strict=False))
        return cls(FlashInferLayerShape.of(layer), keys, values, scales)


@dataclass(frozen=True, slots=True)
class KernelDTypes:
    """Page size and dtypes, which all kernels of a backend share."""

    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PagedGraphBuffers:
    """Static buffers of a captured call: page counts and ``kv_indices`` ``[max_pages]`` int32, on the device."""

    counts: PageCounts
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class FlashInferLibrary:
    """FlashInfer's wrapper classes in use, and the CUDA event class (replaced in tests)."""

    prefill: Any
    decode: Any
    event: Any


@cache
def load_library() -> FlashInferLibrary:
    """Import FlashInfer. Raises whatever its import raises."""
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return FlashInferLibrary(BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper, torch.cuda.Event)


class FlashInferKernels:
    """Factory of the kernels of one lane.

    ``scratch(n)`` returns a buffer of at least ``n`` bytes, which all wrappers of the lane share. Long extends run on
    the kernel ``prefill``, fa2 or fa3. All other batches run on fa2, which FlashInfer compiles once per dtype and head
    dim, with or without window and logit cap.
    """

    def __init__(
        self,
        library: FlashInferLibrary,
        dtypes: KernelDTypes,
        scratch: Callable[[int], Tensor],
        processors: int,
        prefill: str,
    ) -> None:
        self._library, self._dtypes, self._scratch = library, dtypes, scratch
        self._processors, self.prefill = processors, prefill

    def eager(self, shape: FlashInferLayerShape, kernel: str) -> FlashInferEager:
        workspace = self._scratch(shape.eager_scratch(self._processors))
        return FlashInferEager(self._library, shape, self._dtypes, workspace, kernel)

    def captured(
        self, shape: FlashInferLayerShape, batch: UniformPagedBatch, buffers: PagedGraphBuffers
    ) -> FlashInferCaptured:
        workspace = self._scratch(shape.captured_scratch(self._processors, batch.requests, batch.queries))
        return FlashInferCaptured(self._library, shape, self._dtypes, workspace, batch, buffers)


class FlashInferEager:
    """``BatchPrefillWithPagedKVCacheWrapper``, planned for every batch and run once per layer.

    Its fa2 kernel is also FlashInfer's tensor-core decode kernel.
    """

    def __init__(
        self,
        library: FlashInferLibrary,
        shape: FlashInferLayerShape,
        dtypes: KernelDTypes,
        workspace: Tensor,
        kernel: str,
    ) -> None:
        self._shape, self._dtypes = shape, dtypes
        self._wrapper = library.prefill(workspace, kv_layout="NHD", backend=kernel)
        # The wrapper keeps a plan's arrays in pinned memory until the stream has copied them. Planning again before
        # that would overwrite them.
        self._sent = library.event()

    @property
    def ready(self) -> bool:
        """True if planning need not wait for the previous plan's host-to-device copy."""
        return bool(self._sent.query())

    def plan(self, call: FlashInferPagedCall) -> None:
        lengths = call.lengths
        with explain_plan_errors(
            f"a paged call of {len(lengths.kv_lens)} requests and {int(lengths.qo_indptr[-1])} rows"
        ):
            self._wrapper.plan(
                qo_indptr=lengths.qo_indptr,
                paged_kv_indptr=lengths.kv_indptr,
                paged_kv_indices=call.kv_indices,
                paged_kv_last_page_len=call.last_page_lens,
                head_dim_qk=self._shape.dim,
                causal=call.causal,
                seq_lens=lengths.kv_lens,
                max_token_per_sequence=call.max_queries,
                **_plan_arguments(self._shape, self._dtypes),
            )
        self._sent.record()

    def run(self, q: Tensor, cache: PagedLayerCache, out: Tensor | None, lse: Tensor | None) -> Tensor:
        """Attend with q ``[rows, heads, dim]``. Returns the same shape, in ``out`` (contiguous) if given.

        Writes ``lse`` ``[rows, heads]`` float32 in natural log if given.
        """
        return _run(self._wrapper, q, cache, out, lse)


class FlashInferCaptured:
    """``BatchDecodeWithPagedKVCacheWrapper`` on tensor cores, for CUDA graphs of decode and uniform verify.

    The prefill wrapper would size tiles and scratch for the longest request that a captured batch could contain. This
    one takes the number of queries per request.
    """

    def __init__(
        self,
        library: FlashInferLibrary,
        shape: FlashInferLayerShape,
        dtypes: KernelDTypes,
        workspace: Tensor,
        batch: UniformPagedBatch,
        buffers: PagedGraphBuffers,
    ) -> None:
        self._shape, self._dtypes, self._batch, self._buffers = shape, dtypes, batch, buffers
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

    def plan(self, kv_lens: Tensor) -> PagedWorkList | None:
        """Plan once, for host lengths ``kv_lens`` ``[requests]``.

        Returns the device arrays of the work list, for callers that fill them; ``None`` for an unknown layout.
        """
        requests, queries, page_size = self._batch.requests, self._batch.queries, self._dtypes.page_size
        pages = -(-kv_lens // page_size)
        kv_indptr = torch.cat([pages.new_zeros(1), pages.cumsum(0, dtype=torch.int32)])
        with explain_plan_errors(f"a captured batch of {requests} requests and {queries} rows each"):
            self._wrapper.plan(
                indptr=kv_indptr,
                indices=self._buffers.kv_indices[: int(kv_indptr[-1])],
                last_page_len=kv_lens - (pages - 1) * page_size,
                head_dim=self._shape.dim,
                seq_lens=kv_lens,
                q_len_per_req=queries,
                **_plan_arguments(self._shape, self._dtypes),
            )
        return PagedWorkList.of(list(self._wrapper._plan_info), self._wrapper._int_workspace_buffer, self._batch)

    def run(self, q: Tensor, cache: PagedLayerCache, out: Tensor | None, lse: Tensor | None) -> Tensor:
        return _run(self._wrapper, q, cache, out, lse)


def _plan_arguments(shape: FlashInferLayerShape, dtypes: KernelDTypes) -> dict[str, Any]:
    """Return the plan arguments that both wrappers share."""
    return {
        "num_qo_heads": shape.heads,
        "num_kv_heads": shape.kv_heads,
        "page_size": dtypes.page_size,
        "sm_scale": shape.scale,
        "window_left": shape.window_left,
        "logits_soft_cap": shape.cap,
        "q_data_type": dtypes.dtype,
        "kv_data_type": dtypes.kv_dtype,
    }


def _run(wrapper: Any, q: Tensor, cache: PagedLayerCache, out: Tensor | None, lse: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # the library's own would be zero-filled
    wrapper.run(_aligned(q), (cache.keys, cache.values), out=out, lse=lse, return_lse=lse is not None, **cache.scales)
    if lse is not None:
        lse.mul_(_LN_2)  # base 2 → natural log (C4)
    return out


def _aligned(q: Tensor) -> Tensor:
    """Return ``q``, or a contiguous copy if its columns are strided or its rows are not 16-byte aligned."""
    *outer, column = q.stride()
    places = [stride * q.element_size() for stride in outer] + [q.data_ptr()]
    if column == 1 and not any(place % _ALIGNED for place in places):
        return q
    return q.clone(memory_format=torch.contiguous_format)
