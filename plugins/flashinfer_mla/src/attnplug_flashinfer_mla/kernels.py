"""Kernel protocols of the backend and their FlashInfer implementation. Only this module imports FlashInfer.

A kernel is planned for one call and then run once per layer. Planning it again discards the previous call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from attnplug import BackendError, MLAShape, RaggedCall
from attnplug.kernels import on_host
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.planner import MLAPagedCall
from attnplug_flashinfer_mla.work_list import MLAWorkList

_LN_2 = math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class LatentCache:
    """Cache of one layer, ``rows`` ``[pages, page_size, row_dim]``, with views of its latent and rope columns.

    Made once per layer, so that calls do not slice. The memory belongs to the pool.
    """

    rows: Tensor
    latent: Tensor
    rope: Tensor
    scales: Mapping[str, float] = field(default_factory=dict)
    """Scale arguments of a call over an fp8 cache; empty for other dtypes."""

    @classmethod
    def of(cls, rows: Tensor, kv_lora_rank: int, scale: float) -> LatentCache:
        scales = {"ckv_scale": scale, "kpe_scale": scale} if rows.dtype is torch.float8_e4m3fn else {}
        return cls(rows, rows[..., :kv_lora_rank], rows[..., kv_lora_rank:], scales)


@dataclass(frozen=True, slots=True, eq=False)
class MLAGraphBuffers:
    """Static buffers of a captured call: ``lengths`` and ``kv_indices`` ``[max_pages]`` int32, on the device."""

    lengths: CallLengths
    kv_indices: Tensor


class PagedKernel(Protocol):
    """Planned latent attention over a paged cache."""

    @property
    def ready(self) -> bool:
        """True if planning need not wait for the previous plan's host-to-device copy."""
        ...

    def plan(self, call: MLAPagedCall) -> None: ...

    def work_list(self) -> MLAWorkList:
        """Return the device arrays of the planned call's work list, for callers that fill them."""
        ...

    def run(self, q: Tensor, q_rope: Tensor | None, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        """Attend with q ``[rows, heads, row_dim]``.

        Writes ``out`` ``[rows, heads, kv_lora_rank]`` and, if given, ``lse`` ``[rows, heads]`` float32 in natural log.
        With ``q_rope`` ``[rows, heads, qk_rope_head_dim]``, q is ``[rows, heads, kv_lora_rank]``.
        """
        ...


class RaggedKernel(Protocol):
    """Planned MHA over ragged keys and values that are passed as arguments, without a cache."""

    @property
    def ready(self) -> bool: ...

    def plan(self, call: RaggedCall) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Attend with q ``[query_rows, heads, qk_dim]`` to k and v ``[kv_rows, heads, dim]``.

        Writes ``out`` ``[query_rows, heads, v_dim]`` and, if given, ``lse`` ``[query_rows, heads]`` in natural log.
        """
        ...


class MLAKernelFactory(Protocol):
    """Factory of the kernels of one lane. With ``decode``, every request has one query token."""

    def paged(self, *, decode: bool, graph: MLAGraphBuffers | None = None) -> PagedKernel: ...

    def ragged(self) -> RaggedKernel: ...


@dataclass(frozen=True, slots=True)
class FlashInferMLALibrary:
    """FlashInfer's classes in use, and its features, which are probed by signature and not by version.

    ``metadata`` is the class that wraps a plan's arrays in newer versions, where separate arguments are deprecated;
    ``None`` in older ones. ``reads_fp8``: paged calls take an fp8 cache with its scales. ``ragged_natural_log``: ragged
    calls can return natural logarithms.
    """

    version: str
    paged: Any
    ragged: Any
    metadata: Any
    reads_fp8: bool
    ragged_natural_log: bool


@cache
def load_library() -> FlashInferMLALibrary:
    """Import FlashInfer. Raises whatever its import raises."""
    import flashinfer
    from flashinfer import mla
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper as Ragged

    paged = mla.BatchMLAPagedAttentionWrapper
    return FlashInferMLALibrary(
        version=str(flashinfer.__version__),
        paged=paged,
        ragged=Ragged,
        metadata=getattr(mla, "MLAPlanMetadata", None),
        reads_fp8="ckv_scale" in inspect.signature(paged.run).parameters,
        ragged_natural_log="lse_base" in inspect.signature(Ragged.run).parameters,
    )


class FlashInferMLAKernels:
    """FlashInfer's wrappers for one model and lane. All of them share ``workspace``, the lane's scratch buffer."""

    def __init__(self, shape: MLAShape, workspace: Tensor, kernel: str) -> None:
        self._library, self._shape, self._workspace = load_library(), shape, workspace
        self._kernel = kernel
        if kernel == "cutlass" and self._library.metadata is None:
            raise BackendError(
                f"kernel=cutlass requires flashinfer-python 0.7 or newer, not {self._library.version}; use kernel=auto"
            )

    def paged(self, *, decode: bool, graph: MLAGraphBuffers | None = None) -> PagedKernel:
        if self._kernel == "cutlass" and decode:
            return CutlassPaged(self._library, self._shape, self._workspace)
        return FlashInferPaged(self._library, self._shape, self._workspace, self._without_cutlass(), graph)

    def ragged(self) -> RaggedKernel:
        return FlashInferRagged(self._library, self._shape, self._workspace, self._without_cutlass())

    def _without_cutlass(self) -> str:
        return "fa2" if self._kernel == "cutlass" else self._kernel


class FlashInferPaged:
    """``BatchMLAPagedAttentionWrapper``, called by the convention that the installed version does not deprecate."""

    def __init__(
        self,
        library: FlashInferMLALibrary,
        shape: MLAShape,
        workspace: Tensor,
        kernel: str,
        graph: MLAGraphBuffers | None,
    ) -> None:
        self._library, self._shape = library, shape
        reserved: dict[str, Any] = {}
        if graph is not None:
            reserved = {
                "use_cuda_graph": True,
                "qo_indptr": graph.lengths.qo_indptr,
                "kv_indptr": graph.lengths.kv_indptr,
                "kv_indices": graph.kv_indices,
                "kv_len_arr": graph.lengths.kv_lens,
            }
        self._wrapper = library.paged(workspace, backend=kernel, **reserved)
        # The wrapper keeps a plan's arrays in pinned memory until the stream has copied them. We pass lengths on the
        # host, so planning does not wait for the device, and planning too early would overwrite arrays that are still
        # being copied.
        self._sent = torch.cuda.Event()

    @property
    def ready(self) -> bool:
        return bool(self._sent.query())

    def plan(self, call: MLAPagedCall) -> None:
        lengths = call.lengths
        arrays: dict[str, Any] = {
            "qo_indptr": lengths.qo_indptr,
            "kv_indptr": lengths.kv_indptr,
            "kv_indices": call.kv_indices,
            "kv_len_arr": lengths.kv_lens,
        }
        if self._library.metadata is not None:
            arrays = {
                "metadata": self._library.metadata.csr(**arrays),
                "query_layout": "split",  # two slices of one tensor are accepted
                "kv_cache_layout": "packed",
                "lse_mode": "basee",
            }
        with explain_plan_errors(
            f"a paged call of {len(lengths.kv_lens)} requests and {int(lengths.qo_indptr[-1])} rows"
        ):
            self._plan(call, arrays)
        self._sent.record()

    def _plan(self, call: MLAPagedCall, arrays: dict[str, Any]) -> None:
        shape = self._shape
        self._wrapper.plan(
            **arrays,
            num_heads=call.heads,
            head_dim_ckv=shape.dims.kv_lora_rank,
            head_dim_kpe=shape.dims.qk_rope_head_dim,
            page_size=shape.page_size,
            causal=call.causal,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def work_list(self) -> MLAWorkList:
        return MLAWorkList.of(list(self._wrapper._plan_info), self._wrapper._int_workspace_buffer)

    def run(self, q: Tensor, q_rope: Tensor | None, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        query = self._split_query(q) if q_rope is None else (_aligned(q), _aligned(q_rope))
        if self._library.metadata is not None:
            if lse is None:  # run must request the LSE if the plan did
                lse = q.new_empty(q.shape[:2], dtype=torch.float32)
            self._wrapper.run(
                query=query,
                kv_cache=cache.rows,
                out=out,
                lse=lse,
                return_lse=True,
                return_lse_base_on_e=True,
                **cache.scales,
            )
        else:
            self._wrapper.run(
                q_nope=query[0],
                q_pe=query[1],
                ckv_cache=cache.latent,
                kpe_cache=cache.rope,
                out=out,
                lse=lse,
                return_lse=lse is not None,
                return_lse_base_on_e=True,
                **cache.scales,
            )

    def _split_query(self, q: Tensor) -> tuple[Tensor, Tensor]:
        dims = self._shape.dims
        return q.narrow(2, 0, dims.kv_lora_rank), q.narrow(2, dims.kv_lora_rank, dims.qk_rope_head_dim)


def _aligned(part: Tensor) -> Tensor:
    """Return ``part``, or a contiguous copy if it is misaligned.

    The kernels load 16 bytes at a time and assume a column stride of 1 without checking it.
    """
    row, head, column = part.stride()
    size = part.element_size()
    if column == 1 and not any(place % 16 for place in (part.data_ptr(), row * size, head * size)):
        return part
    return part.clone(memory_format=torch.contiguous_format)


class CutlassPaged:
    """Decode by the wrapper's CUTLASS kernel, which reads the page table directly and returns no log-sum-exp.

    Requires a FlashInfer that plans it (0.7 or newer): older ones copied the layer's whole cache at every call.
    """

    ready = True

    def __init__(self, library: FlashInferMLALibrary, shape: MLAShape, workspace: Tensor) -> None:
        self._library, self._shape = library, shape
        self._wrapper = library.paged(workspace, backend="cutlass")

    def plan(self, call: MLAPagedCall) -> None:
        shape = self._shape
        wanted = 128 // shape.page_size
        page_table = torch.nn.functional.pad(call.page_table, (0, -call.page_table.shape[1] % wanted))
        self._wrapper.plan(
            metadata=self._library.metadata.dense(
                cum_seq_lens_q=call.lengths.qo_indptr,
                block_tables=page_table,
                seq_lens=call.lengths.kv_lens,
                max_q_len=1,
            ),
            num_heads=shape.heads,
            head_dim_ckv=shape.dims.kv_lora_rank,
            head_dim_kpe=shape.dims.qk_rope_head_dim,
            page_size=shape.page_size,
            causal=False,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
        )

    def work_list(self) -> MLAWorkList:
        raise BackendError("kernel=cutlass does not support CUDA graphs; use kernel=auto")

    def run(self, q: Tensor, q_rope: Tensor | None, cache: LatentCache, out: Tensor, lse: Tensor | None) -> None:
        if lse is not None:
            raise BackendError("kernel=cutlass returns no log-sum-exp; use kernel=auto")
        if q_rope is not None:  # only this kernel requires a joined query
            q = torch.cat((q, q_rope), -1)
        self._wrapper.run(query=q, kv_cache=cache.rows, out=out)


class FlashInferRagged:
    """``BatchPrefillWithRaggedKVCacheWrapper``: MLA prefill as MHA, with different key and value dims."""

    def __init__(self, library: FlashInferMLALibrary, shape: MLAShape, workspace: Tensor, kernel: str) -> None:
        self._library, self._shape, self._device = library, shape, workspace.device
        self._wrapper = library.ragged(workspace, kv_layout="NHD", backend=kernel)
        self._sent = torch.cuda.Event()

    @property
    def ready(self) -> bool:
        return bool(self._sent.query())

    def plan(self, call: RaggedCall) -> None:
        width, v_width = self._shape.ragged_dims
        with explain_plan_errors(f"a ragged call of {call.query_rows} query rows and {call.kv_rows} keys"):
            self._plan(call, width, v_width)
        self._sent.record()

    def _plan(self, call: RaggedCall, width: int, v_width: int) -> None:
        shape = self._shape
        self._wrapper.plan(
            qo_indptr=on_host(tuple(accumulate(call.query_lens, initial=0)), self._device, np.int32),
            kv_indptr=on_host(tuple(accumulate(call.kv_lens, initial=0)), self._device, np.int32),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.heads,
            head_dim_qk=width,
            head_dim_vo=v_width,
            causal=call.causal,
            sm_scale=shape.scale,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        if lse is None:
            self._wrapper.run(q, k, v, out=out)
        elif self._library.ragged_natural_log:
            self._wrapper.run(q, k, v, out=out, lse=lse, return_lse=True, lse_base="ln")
        else:
            self._wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
            lse.mul_(_LN_2)  # base 2 → natural log (C4)


@contextmanager
def explain_plan_errors(call: str) -> Iterator[None]:
    """Re-raise FlashInfer's errors as ``BackendError`` that names the planned call. Its own name only its buffers."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise BackendError(f"flashinfer cannot plan {call}: {error}") from error
