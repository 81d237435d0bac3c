"""TokenSpeed's kernels for ``trtllm_mla``'s backend. Only this module imports the library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnplug import MLAShape, RaggedCall, Workspace
from attnplug_trtllm_mla.kernels import MAX_REQUESTS, LatentPages, to_float8
from attnplug_trtllm_mla.planner import DecodeCall

_LN_2 = math.log(2.0)
_RAGGED_DIMS = (192, 128)


@dataclass(frozen=True, slots=True)
class TokenSpeedLibrary:
    """TokenSpeed's functions in use."""

    decode: Any
    prefill: Any
    warm_up: Any


@cache
def load_library() -> TokenSpeedLibrary:
    """Import the library. Raises the ImportError that it stores in an attribute if a dependency is missing."""
    import tokenspeed_mla

    error: ImportError | None = getattr(tokenspeed_mla, "_IMPORT_ERROR", None)
    if error is not None:
        raise error
    return TokenSpeedLibrary(
        tokenspeed_mla.tokenspeed_mla_decode,
        tokenspeed_mla.tokenspeed_mla_prefill,
        tokenspeed_mla.warmup_compile_prefill,
    )


class TokenSpeedDecode:
    """``tokenspeed_mla_decode``. It takes up to 128 heads. ``scratch`` may contain anything."""

    def __init__(self, library: TokenSpeedLibrary, shape: MLAShape, scratch: Workspace) -> None:
        self._library, self._shape, self._scratch = library, shape, scratch
        self.heads = shape.heads

    def max_requests(self, queries: int, with_lse: bool) -> int:
        return MAX_REQUESTS

    def run(self, q: Tensor, pages: LatentPages, call: DecodeCall, out: Tensor, lse: Tensor | None) -> None:
        result = self._library.decode(
            query=q,
            kv_cache=pages.rows,
            workspace_buffer=self._scratch.buffer.view(torch.int8),
            kv_lora_rank=self._shape.dims.kv_lora_rank,
            qk_rope_head_dim=self._shape.dims.qk_rope_head_dim,
            block_tables=call.block_tables,
            seq_lens=call.seq_lens,
            max_seq_len=call.max_seq_len,
            softmax_scale=self._shape.scale * pages.scale,
            output_scale=pages.scale,
            out=out,
            causal_mask=True,
            return_lse=lse is not None,
        )
        if lse is not None:
            lse.copy_(result[1].flatten(0, 1)).mul_(_LN_2)  # base 2 → natural log (C4)


class TokenSpeedRagged:
    """``tokenspeed_mla_prefill``. Its kernel for these dims takes fp8 only and returns natural logarithms."""

    dims = frozenset({_RAGGED_DIMS})

    def __init__(self, library: TokenSpeedLibrary, shape: MLAShape) -> None:
        self._library, self._shape = library, shape

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: RaggedCall, out: Tensor, lse: Tensor | None) -> None:
        _, sums = self._library.prefill(
            query=to_float8(q),
            key=to_float8(k),
            value=to_float8(v),
            seq_lens=call.kv_indptr.diff(),
            cum_seq_lens=call.kv_indptr,
            max_seq_len=max(call.kv_lens),
            batch_size=len(call.kv_lens),
            softmax_scale=self._shape.scale,
            is_causal=call.causal,
            return_lse=True,  # always: ``warm_up`` compiles this variant
            cum_seq_lens_q=call.query_indptr,
            max_seq_len_q=max(call.query_lens),
            out=out,
        )
        if lse is not None:
            lse.copy_(sums)

    def warm_up(self) -> None:
        """Compile the prefill kernels, which would delay the first prefill by minutes."""
        width, v_width = _RAGGED_DIMS
        self._library.warm_up(q_dtype=torch.float8_e4m3fn, d_qk=width, d_v=v_width)
