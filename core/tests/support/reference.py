"""Attention, full and linear, in float64, written to be read: the reference for a backend's results.

It never sees a cache, a page or a plan, shares no code with any backend, and is as slow as it looks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.contract.linear import LinearInputs


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


def recurrence_float64(inputs: LinearInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one request's tokens in turn, by the equations of ``LinearInputs``.

    ``state`` ``[heads, key_dim, value_dim]`` is the state before them. Returns the output ``[tokens, heads,
    value_dim]`` and the state after them, both float64.
    """
    q, k, v, log_decay = (t.detach().cpu().double() for t in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    beta = None if inputs.beta is None else inputs.beta.detach().cpu().double()
    tokens, heads, _ = v.shape
    of_key_head = torch.arange(heads) * q.shape[1] // heads
    out = torch.zeros_like(v)
    for token in range(tokens):
        query, key = q[token, of_key_head], k[token, of_key_head]
        if inputs.normalize:
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        decay = (log_decay if log_decay.dim() == 1 else log_decay[token]).exp()
        state = state * decay.reshape(heads, -1, 1)
        write = v[token]
        if beta is not None:
            write = (write - torch.einsum("hk,hkv->hv", key, state)) * beta[token, :, None]
        state = state + torch.einsum("hk,hv->hkv", key, write)
        out[token] = scale * torch.einsum("hk,hkv->hv", query, state)
    return out, state


def convolution_float64(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool
) -> tuple[Tensor, Tensor]:
    """Convolve one request's rows ``[tokens, channels]`` in turn. ``state`` ``[channels, width]`` holds the newest
    rows. Returns the output and the new state, both float64."""
    x, weight = x.detach().cpu().double(), weight.detach().cpu().double()
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        state = torch.cat([state[:, 1:], row[:, None]], 1)
        out[token] = (state * weight).sum(1)
        if bias is not None:
            out[token] += bias.detach().cpu().double()
    return out * torch.sigmoid(out) if silu else out, state
