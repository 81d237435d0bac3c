"""The seam to DeepGEMM: its scores of fp8 index keys in pages. Only this module imports the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attnplug import IndexKeyPool
from attnplug_flashmla.plugin import PAGE
from attnplug_flashmla.sparse_planner import Tokens

_LARGEST = 448.0
_SMALLEST = 1e-4


@dataclass(frozen=True, slots=True)
class DeepGEMM:
    """The functions of DeepGEMM in use."""

    scores: Callable[..., Tensor]
    schedule: Callable[..., Tensor]
    multiprocessors: Callable[[], int]


@cache
def load_deep_gemm() -> DeepGEMM:
    """Import DeepGEMM. Raises whatever its import raises."""
    import deep_gemm

    library: Any = deep_gemm
    return DeepGEMM(library.fp8_fp4_paged_mqa_logits, library.get_paged_mqa_logits_metadata, library.get_num_sms)


def score_keys_in_fp8(
    q: Tensor, weights: Tensor, pool: IndexKeyPool, layer_id: int, scale: float, tokens: Tokens
) -> Tensor:
    """As ``scoring.score_keys``. Every token is a request of its own; the scales of queries are positive, so they go
    through relu and into the weights."""
    library, keys = load_deep_gemm(), pool.keys(layer_id)
    queries = q.float()
    scales = queries.abs().amax(-1).clamp_(min=_SMALLEST).div_(_LARGEST)
    lens = tokens.visible.unsqueeze(1)
    scores = library.scores(
        q=(queries / scales.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).unsqueeze(1),
        kv_cache=keys.view(-1, PAGE, 1, keys.shape[-1]),
        weights=weights * scales * scale,
        context_lens=lens,
        block_table=tokens.table.index_select(0, tokens.owner),
        schedule_meta=library.schedule(lens, PAGE, library.multiprocessors()),
        max_context_len=tokens.longest,
    )
    # Past a token's last key the kernel leaves what was there.
    return scores.masked_fill_(torch.arange(tokens.longest, device=q.device) >= lens, float("-inf"))
