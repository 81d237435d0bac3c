"""The seam: what the backend asks of kernels, and FlashInfer's entry points to those of TRT-LLM and of CuTe DSL.

The library plans nothing: a call takes lengths and page tables as they are.
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

MOST_REQUESTS = 8192
"""The most requests of one call; FlashInfer names it as the limit of TRT-LLM's kernels."""
_LN_2 = math.log(2.0)
_FEWEST_HEADS = 8
_PARTIAL_ROWS = 256
"""The most query rows for which a multiprocessor keeps partial results."""
_STATS_ROWS = 256
_STATS_GUARD = 1 << 20
"""How the launcher divides scratch memory if a log-sum-exp is asked for: two floats per head and row, with each
request's rows rounded up to ``_STATS_ROWS``, and then ``_STATS_GUARD`` bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """One layer's rows ``[pages, page_size, row_dim]`` in kernel pages, each to be multiplied by ``scale``."""

    rows: Tensor
    scale: float


class DecodeKernel(Protocol):
    """Latent attention of a few queries per request, over page tables."""

    heads: int
    """Heads that it takes: as many as the model has, or more."""

    def most_requests(self, queries: int, with_lse: bool) -> int:
        """Requests that one call has room for."""
        ...

    def run(self, q: Tensor, pages: Pages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
        """q ``[requests, queries, heads, row_dim]`` in the cache's type; fills ``out`` ``[requests, queries, heads,
        kv_lora_rank]`` in bfloat16 and ``lse`` ``[requests * queries, heads]``, natural log."""
        ...


class RaggedKernel(Protocol):
    """Plain attention over rows that are passed in."""

    dims: frozenset[tuple[int, int]]
    """Widths of keys and values that it takes."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, out: Tensor, lse: Tensor | None) -> None:
        """Like ``forward_ragged`` of the protocol; fills ``out``, and ``lse`` in natural log."""
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of FlashInfer in use. ``lse_base`` says whether decode can be asked for natural logarithms."""

    version: str
    decode: Any
    ragged: Any
    lse_base: bool


@cache
def load_library() -> Library:
    """Import FlashInfer. Raises whatever its import raises."""
    import flashinfer
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla as decode
    from flashinfer.prefill import trtllm_ragged_attention_deepseek as ragged

    return Library(
        version=str(flashinfer.__version__),
        decode=decode,
        ragged=ragged,
        lse_base="return_lse_base" in inspect.signature(decode).parameters,
    )


@dataclass(slots=True, eq=False)
class TRTLLMDecode:
    """``trtllm_batch_decode_with_kv_cache_mla`` by TRT-LLM's kernels.

    ``counters`` are the semaphores, zero on first use and left zero by every call. ``scratch`` may hold anything. Both
    belong to one lane, whose calls run one after the other.
    """

    library: Library
    shape: MLAShape
    scratch: Workspace
    counters: Workspace
    processors: int
    heads: int = field(init=False)

    def __post_init__(self) -> None:
        self.heads = kernel_heads(self.shape.heads)

    @property
    def partial_bytes(self) -> int:
        """Scratch for partial results, which the launcher uses without checking that it is there."""
        return self.processors * _PARTIAL_ROWS * (self.shape.dims.kv_lora_rank + 2) * 4

    def most_requests(self, queries: int, with_lse: bool) -> int:
        if not with_lse:
            return MOST_REQUESTS
        room = self.scratch.buffer.numel() - self.partial_bytes - _STATS_GUARD
        return min(MOST_REQUESTS, max(room // stats_bytes(self.heads, 1, queries), 0))

    def run(self, q: Tensor, pages: Pages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
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
            lse.mul_(_LN_2)  # it returns base 2 (C4)


def kernel_heads(heads: int) -> int:
    """Heads padded to a number that has a kernel in every version: a power of two from 8 on. 65 to 127 are refused."""
    return max(padded_heads(heads), _FEWEST_HEADS)


def counter_bytes(shape: MLAShape, processors: int) -> int:
    """Bytes for the semaphores of the largest call: one per head and request."""
    return 4 * 8 * -(-max(MOST_REQUESTS * kernel_heads(shape.heads), processors) // 8)


def run_decode(
    library: Library,
    shape: MLAShape,
    q: Tensor,
    pages: Pages,
    call: DecodeCall,
    out: Tensor,
    lse: Tensor | None,
    **chosen: Any,
) -> None:
    """The one FlashInfer function that has several kernels; ``chosen`` says which, and brings its memory."""
    if library.lse_base:
        chosen["return_lse_base"] = "basee"
    library.decode(
        query=q,
        kv_cache=pages.rows,
        qk_nope_head_dim=shape.dims.qk_nope_head_dim,
        kv_lora_rank=shape.dims.kv_lora_rank,
        qk_rope_head_dim=shape.dims.qk_rope_head_dim,
        block_tables=call.tables,
        seq_lens=call.lens,
        max_seq_len=call.longest,
        out=out,
        bmm1_scale=shape.scale * pages.scale,
        bmm2_scale=pages.scale,
        lse=lse,
        return_lse=lse is not None,
        **chosen,
    )


class TRTLLMRagged:
    """``trtllm_ragged_attention_deepseek``: MLA as MHA, without empty sequences of queries or keys (C3)."""

    dims = frozenset({(192, 128)})

    def __init__(self, library: Library, shape: MLAShape, scratch: Workspace) -> None:
        self._library, self._shape, self._scratch = library, shape, scratch

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, out: Tensor, lse: Tensor | None) -> None:
        q = q.contiguous()  # the kernel does not look at its strides
        room = self._scratch.buffer.numel() - _STATS_GUARD if lse is not None else None
        for part in _parts(call, self._shape.heads, room):
            queries, keys = part.query_rows, part.kv_rows
            self._library.ragged(
                query=q[queries],
                key=k[keys],
                value=v[keys],
                workspace_buffer=self._scratch.buffer,
                seq_lens=part.kv_indptr.diff(),
                max_q_len=part.most_queries,
                max_kv_len=part.most_keys,
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
class _Part:
    """Consecutive sequences of a ragged call, as a call of their own."""

    sequences: int
    query_rows: slice
    kv_rows: slice
    most_queries: int
    most_keys: int
    query_indptr: Tensor
    kv_indptr: Tensor


def _parts(call: RaggedCall, heads: int, room: int | None) -> Iterator[_Part]:
    """As few calls as ``room`` bytes for statistics allow, nearly always one. ``None``: no statistics are kept."""
    count = len(call.query_lens)
    first = query = key = 0
    while first < count:
        last, most = first, 0
        while last < count:
            widest = max(most, call.query_lens[last])
            if room is not None and stats_bytes(heads, last + 1 - first, widest) > room:
                break
            last, most = last + 1, widest
        if last == first:
            raise BackendError(
                f"the log-sum-exp of {call.query_lens[first]} queries takes {stats_bytes(heads, 1, widest)} bytes of "
                f"workspace, and there are {room}; set trtllm_mla.workspace_mib to more"
            )
        queries, keys = sum(call.query_lens[first:last]), sum(call.kv_lens[first:last])
        query_indptr, kv_indptr = call.query_indptr[first : last + 1], call.kv_indptr[first : last + 1]
        yield _Part(
            sequences=last - first,
            query_rows=slice(query, query + queries),
            kv_rows=slice(key, key + keys),
            most_queries=most,
            most_keys=max(call.kv_lens[first:last]),
            query_indptr=query_indptr - query_indptr[0] if first else query_indptr,
            kv_indptr=kv_indptr - kv_indptr[0] if first else kv_indptr,
        )
        first, query, key = last, query + queries, key + keys


def stats_bytes(heads: int, requests: int, queries: int) -> int:
    """What the launcher takes for the log-sum-exp of this many requests with up to this many queries."""
    return 8 * heads * requests * -(-queries // _STATS_ROWS) * _STATS_ROWS


def check_scratch(name: str, workspace_mib: int, decode: TRTLLMDecode, max_tokens: int) -> None:
    """Refuse scratch memory that is enough for some calls but not for all."""
    decoding = decode.partial_bytes + stats_bytes(decode.heads, 1, 1)
    needed = max(decoding, stats_bytes(decode.shape.heads, 1, max_tokens))
    least = -(-(needed + _STATS_GUARD) // (1 << 20))
    if workspace_mib < least:
        raise BackendError(
            f"{name}.workspace_mib={workspace_mib} is too little for {decode.processors} multiprocessors and steps of "
            f"{max_tokens} tokens; give {least} or more",
            settings=[f"{name}.workspace_mib"],
        )


def to_float8(rows: Tensor) -> Tensor:
    """Rows in e4m3, saturated: torch would turn values that are too large into NaN."""
    return rows.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
