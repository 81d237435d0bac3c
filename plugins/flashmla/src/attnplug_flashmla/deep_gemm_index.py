"""Index scores of paged fp8 keys by DeepGEMM. Only this module imports DeepGEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnplug_flashmla.plugin import PAGE
from attnplug_sparse.index import ScoreInputs

_FP8_MAX = 448.0
_MIN_AMAX = 1e-4


@dataclass(frozen=True, slots=True)
class DeepGEMM:
    """DeepGEMM's functions in use."""

    scores: Callable[..., Tensor]
    schedule: Callable[..., Tensor]
    multiprocessors: Callable[[], int]


@cache
def load_deep_gemm() -> DeepGEMM:
    """Import DeepGEMM. Raises whatever its import raises."""
    import deep_gemm

    library: Any = deep_gemm
    return DeepGEMM(library.fp8_fp4_paged_mqa_logits, library.get_paged_mqa_logits_metadata, library.get_num_sms)


def score_in_fp8(inputs: ScoreInputs) -> Tensor:
    """Return scores ``[rows, width]`` float32, for ``SparseIndex``. Every token is a request of its own.

    Query scales are positive, so they commute with relu and are multiplied into the weights.
    """
    library, keys, queries = load_deep_gemm(), inputs.keys, inputs.q.float()
    scales = queries.abs().amax(-1).clamp_(min=_MIN_AMAX).div_(_FP8_MAX)
    lens = inputs.seen.unsqueeze(1).contiguous()
    return library.scores(
        q=(queries / scales.unsqueeze(-1)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).unsqueeze(1),
        kv_cache=keys.view(-1, PAGE, 1, keys.shape[-1]),
        weights=inputs.weights * scales * inputs.scale,
        context_lens=lens,
        block_table=inputs.page_table.index_select(0, inputs.owners),
        schedule_meta=library.schedule(lens, PAGE, library.multiprocessors()),
        max_context_len=inputs.width,
    )
