"""Kernel protocols of the backend and their implementation by FlashInfer's TRT-LLM and CuTe DSL functions.

The kernels need no planning: calls take lengths and page tables directly.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug import BackendError, MLAShape, RaggedCall, Workspace
from attnplug_flashinfer_mla.planner import padded_heads
from attnplug_trtllm_mla.planner import DecodeCall

MAX_REQUESTS = 8192
"""Maximum requests per call, which FlashInfer documents for TRT-LLM's kernels."""
_LN_2 = math.log(2.0)
_MIN_HEADS = 8
_MAX_PARTIAL_ROWS = 256
"""Maximum query rows of one multiprocessor's partial results."""
_STATS_ROWS = 256
_STATS_GUARD = 1 << 20
"""Scratch layout of the launcher if a log-sum-exp is requested: two floats per head and row, with each request's rows
rounded up to ``_STATS_ROWS``, followed by ``_STATS_GUARD`` bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentPages:
    """Cache of one layer: ``rows`` ``[pages, page_size, row_dim]`` in kernel pages, and the scale of stored values."""

    rows: Tensor
    scale: float


class DecodeKernel(Protocol):
    """Latent attention of few queries per request, over block tables."""

    heads: int
    """Query heads of a call: the model's, or more (padding)."""

    def max_requests(self, queries: int, with_lse: bool) -> int:
        """Return the maximum number of requests per call."""
        ...

    def run(self, q: Tensor, pages: LatentPages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
        """Attend with q ``[requests, queries, heads, row_dim]`` in the cache's dtype.

        Writes ``out`` ``[requests, queries, heads, kv_lora_rank]`` bfloat16 and, if given, ``lse``
        ``[requests * queries, heads]`` float32 in natural log.
        """
        ...


class RaggedPrefillKernel(Protocol):
    """MHA over ragged keys and values that are passed as arguments, without a cache."""

    dims: frozenset[tuple[int, int]]
    """Supported (key, value) head dims."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, out: Tensor, lse: Tensor | None) -> None:
        """Attend as ``forward_ragged`` does. Writes ``out`` and, if given, ``lse`` in natural log."""
        ...


@dataclass(frozen=True, slots=True)
class TRTLLMLibrary:
    """FlashInfer's functions in use. ``lse_base``: decode can return natural logarithms."""

    version: str
    decode: Any
    ragged: Any
    lse_base: bool


@cache
def load_library() -> TRTLLMLibrary:
    """Import FlashInfer. Raises whatever its import raises."""
    import flashinfer
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla as decode
    from flashinfer.prefill import trtllm_ragged_attention_deepseek as ragged

    return TRTLLMLibrary(
        version=str(flashinfer.__version__),
        decode=decode,
        ragged=ragged,
        lse_base="return_lse_base" in inspect.signature(decode).parameters,
    )


@dataclass(slots=True, eq=False)
class TRTLLMDecode:
    """``trtllm_batch_decode_with_kv_cache_mla`` by TRT-LLM's kernels.

    ``counters`` are semaphores, zero before and after each call. ``scratch`` may contain anything. Both belong to one
    lane, whose calls run one after the other.
    """

    library: TRTLLMLibrary
    shape: MLAShape
    scratch: Workspace
    counters: Workspace
    processors: int
    heads: int = field(init=False)

    def __post_init__(self) -> None:
        self.heads = kernel_heads(self.shape.heads)

    @property
    def partial_bytes(self) -> int:
        """Scratch bytes of partial results. The launcher does not check that they are available."""
        return self.processors * _MAX_PARTIAL_ROWS * (self.shape.dims.kv_lora_rank + 2) * 4

    def max_requests(self, queries: int, with_lse: bool) -> int:
        if not with_lse:
            return MAX_REQUESTS
        available = self.scratch.buffer.numel() - self.partial_bytes - _STATS_GUARD
        return min(MAX_REQUESTS, max(available // stats_bytes(self.heads, 1, queries), 0))

    def run(self, q: Tensor, pages: LatentPages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
        run_decode(
            self.library,
            self.shape,
            q,
            pages,
            call,
            out,
            lse,
            workspace_buffer=self.scratch.buffer,
            multi_ctas_kv_counter_buffer=self.counters.buffer,
            backend="trtllm-gen",
        )
        if lse is not None and not self.library.lse_base:
            lse.mul_(_LN_2)  # base 2 → natural log (C4)


def kernel_heads(heads: int) -> int:
    """Return ``heads`` padded to a power of two, at least 8, which has a kernel in every version. 65–127 have none."""
    return max(padded_heads(heads), _MIN_HEADS)


def counter_bytes(shape: MLAShape, processors: int) -> int:
    """Return the bytes of semaphores for the largest call: one int32 per head and request."""
    return 4 * 8 * -(-max(MAX_REQUESTS * kernel_heads(shape.heads), processors) // 8)


def run_decode(
    library: TRTLLMLibrary,
    shape: MLAShape,
    q: Tensor,
    pages: LatentPages,
    call: DecodeCall,
    out: Tensor,
    lse: Tensor | None,
    **chosen: Any,
) -> None:
    """Call FlashInfer's decode function. ``chosen`` selects its kernel and passes that kernel's memory."""
    if library.lse_base:
        chosen["return_lse_base"] = "basee"
    library.decode(
        query=q,
        kv_cache=pages.rows,
        qk_nope_head_dim=shape.dims.qk_nope_head_dim,
        kv_lora_rank=shape.dims.kv_lora_rank,
        qk_rope_head_dim=shape.dims.qk_rope_head_dim,
        block_tables=call.block_tables,
        seq_lens=call.seq_lens,
        max_seq_len=call.max_seq_len,
        out=out,
        bmm1_scale=shape.scale * pages.scale,
        bmm2_scale=pages.scale,
        lse=lse,
        return_lse=lse is not None,
        **chosen,
    )


class TRTLLMRagged:
    """``trtllm_ragged_attention_deepseek``: MLA prefill as MHA. Every sequence has queries and keys (C3)."""

    dims = frozenset({(192, 128)})

    def __init__(self, library: TRTLLMLibrary, shape: MLAShape, scratch: Workspace) -> None:
        self._library, self._shape, self._scratch = library, shape, scratch

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, out: Tensor, lse: Tensor | None) -> None:
        q = q.contiguous()  # the kernel ignores its strides
        available = self._scratch.buffer.numel() - _STATS_GUARD if lse is not None else None
        for part in _ragged_chunks(call, self._shape.heads, available):
            queries, keys = part.query_rows, part.kv_rows
            self._library.ragged(
                query=q[queries],
                key=k[keys],
                value=v[keys],
                workspace_buffer=self._scratch.buffer,
                seq_lens=part.kv_indptr.diff(),
                max_q_len=part.max_queries,
                max_kv_len=part.max_keys,
                bmm1_scale=self._shape.scale,
                bmm2_scale=1.0,
                o_sf_scale=1.0,
                batch_size=part.sequences,
                window_left=-1,
                cum_seq_lens_q=part.query_indptr,
                cum_seq_lens_kv=part.kv_indptr,
                enable_pdl=None,
                is_causal=call.causal,
                return_lse=lse is not None,
                out=out[queries],
                lse=None if lse is None else lse[queries],
                skip_all_rows_active_check=True,
            )
        if lse is not None:
            lse.mul_(_LN_2)  # base 2 in every version (C4)


@dataclass(frozen=True, slots=True, eq=False)
class _RaggedChunk:
    """Consecutive sequences of a ragged call that run in one kernel call."""

    sequences: int
    query_rows: slice
    kv_rows: slice
    max_queries: int
    max_keys: int
    query_indptr: Tensor
    kv_indptr: Tensor


def _ragged_chunks(call: RaggedCall, heads: int, available: int | None) -> Iterator[_RaggedChunk]:
    """Split a call so that each chunk's softmax statistics fit ``available`` bytes; ``None`` if none are kept.

    Nearly always there is one chunk.
    """
    count = len(call.query_lens)
    first = query = key = 0
    while first < count:
        last, most = first, 0
        while last < count:
            widest = max(most, call.query_lens[last])
            if available is not None and stats_bytes(heads, last + 1 - first, widest) > available:
                break
            last, most = last + 1, widest
        if last == first:
            raise BackendError(
                f"the log-sum-exp of {call.query_lens[first]} queries takes {stats_bytes(heads, 1, widest)} bytes of "
                f"workspace, but {available} are available; increase trtllm_mla.workspace_mib"
            )
        queries, keys = sum(call.query_lens[first:last]), sum(call.kv_lens[first:last])
        query_indptr, kv_indptr = call.query_indptr[first : last + 1], call.kv_indptr[first : last + 1]
        yield _RaggedChunk(
            sequences=last - first,
            query_rows=slice(query, query + queries),
            kv_rows=slice(key, key + keys),
            max_queries=most,
            max_keys=max(call.kv_lens[first:last]),
            query_indptr=query_indptr - query_indptr[0] if first else query_indptr,
            kv_indptr=kv_indptr - kv_indptr[0] if first else kv_indptr,
        )
        first, query, key = last, query + queries, key + keys


def stats_bytes(heads: int, requests: int, queries: int) -> int:
    """Return the launcher's scratch bytes for the log-sum-exp of ``requests`` with up to ``queries`` queries each."""
    return 8 * heads * requests * -(-queries // _STATS_ROWS) * _STATS_ROWS


def check_scratch(name: str, workspace_mib: int, decode: TRTLLMDecode, max_tokens: int) -> None:
    """Raise ``BackendError`` if the scratch memory is too small for some call."""
    decoding = decode.partial_bytes + stats_bytes(decode.heads, 1, 1)
    needed = max(decoding, stats_bytes(decode.shape.heads, 1, max_tokens))
    least = -(-(needed + _STATS_GUARD) // (1 << 20))
    if workspace_mib < least:
        raise BackendError(
            f"{name}.workspace_mib={workspace_mib} is too small for {decode.processors} multiprocessors and steps of "
            f"{max_tokens} tokens; set {least} or more",
            settings=[f"{name}.workspace_mib"],
        )


def to_float8(rows: Tensor) -> Tensor:
    """Convert to float8_e4m3fn with saturation. Torch's conversion maps values out of range to NaN."""
    return rows.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
