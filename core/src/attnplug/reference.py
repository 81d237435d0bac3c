"""Attention in float64, written to be read: what a backend's result is compared with.

It never sees a cache, a page or a plan, shares no code with any backend, and is as slow as it looks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    first_position: int,
    window: int | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of one request's queries over all its rows so far.

    q ``[queries, heads, dim]``, the first of them at ``first_position``; k ``[rows, kv_heads, dim]``,
    v ``[rows, kv_heads, v_dim]``. Returns the output ``[queries, heads, v_dim]`` and the natural log-sum-exp
    ``[queries, heads]``, both float64.
    """
    q, k, v = (tensor.detach().cpu().double() for tensor in (q, k, v))
    queries, heads, _ = q.shape
    rows, kv_heads, _ = k.shape
    q = q.unflatten(1, (kv_heads, heads // kv_heads))  # head 0 and its neighbours share KV head 0, and so on
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    out = torch.zeros(queries, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((queries, heads), float("-inf"), dtype=torch.float64)
    for query in range(queries):
        position = first_position + query
        oldest = 0 if window is None else max(0, position - window + 1)
        newest = min(position, rows - 1)
        logits = q[query] @ k[:, oldest : newest + 1].mT * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        largest = logits.amax(-1, keepdim=True)
        weights = torch.exp(logits - largest)
        total = weights.sum(-1, keepdim=True)
        out[query] = (weights @ v[:, oldest : newest + 1] / total).flatten(0, 1)
        lse[query] = (largest + total.log()).flatten()
    return out, lse
