"""float64 reference implementations of full and linear attention.

They know no cache, page or plan, and share no code with any backend. ``Rules`` can also describe mistakes: a diagnosis
compares with their results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug.linear import LinearInputs

Parents = tuple[int, ...]
"""Parent of each new row of a request, an earlier row; -1 for a root."""


@dataclass(frozen=True)
class Rules:
    """Mask of one request: the keys that each query sees. The fields following ``parents`` describe mistakes."""

    scale: float
    window: int | None = None
    cap: float | None = None
    parents: Parents | None = None
    aligned: str = "last"
    """``last``: the last query sees the last key. ``first``: the first query sees the first key. ``none``: no mask."""
    hidden: int = 0
    """Number of newest keys that each query misses."""
    longest: int | None = None
    """Number of leading keys that are seen; all others are missed."""
    masked: float = float("-inf")
    """Value that the mask writes over logits."""
    interleaved: bool = False
    """Query head h uses KV head ``h % kv_heads``."""


def attention(q: Tensor, k: Tensor, v: Tensor, rules: Rules, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of one request's queries to all its rows.

    q ``[queries, heads, dim]``, k ``[rows, kv_heads, dim]``, v ``[rows, kv_heads, v_dim]``; sinks ``[heads]``. Returns
    ``[queries, heads, v_dim]`` and the natural log-sum-exp ``[queries, heads]``, without sinks, both float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    (queries, heads, _), (rows, kv_heads, _) = q.shape, k.shape
    heads_first = _grouped(q, kv_heads, rules)
    logits = torch.einsum("ngxd,mgd->gxnm", heads_first, k) * rules.scale
    if rules.cap is not None:
        logits = rules.cap * torch.tanh(logits / rules.cap)
    logits = logits.masked_fill(~_visible(queries, rows, rules).to(q.device), rules.masked)
    sums = logits.logsumexp(-1)
    total = sums
    if sinks is not None:
        extra = _grouped(sinks.double().view(1, heads, 1), kv_heads, rules)[0, :, :, 0, None]
        total = torch.logaddexp(sums, extra.expand_as(sums))
    weights = torch.exp(logits - total.unsqueeze(-1)).nan_to_num(0.0)
    out = torch.einsum("gxnm,mgd->ngxd", weights, v)
    return _flat(out, rules), _flat(sums.permute(2, 0, 1).unsqueeze(-1), rules).squeeze(-1)


def _grouped(q: Tensor, kv_heads: int, rules: Rules) -> Tensor:
    """``[queries, heads, dim]`` → ``[queries, kv_heads, heads per KV head, dim]``."""
    each = q.shape[1] // kv_heads
    grouped: Tensor = q.unflatten(1, (each, kv_heads) if rules.interleaved else (kv_heads, each))
    return grouped.transpose(1, 2) if rules.interleaved else grouped


def _flat(out: Tensor, rules: Rules) -> Tensor:
    return (out.transpose(1, 2) if rules.interleaved else out).flatten(1, 2)


def _visible(queries: int, rows: int, rules: Rules) -> Tensor:
    """Boolean mask ``[queries, rows]``: True if the query sees the row."""
    key, query = torch.arange(rows), torch.arange(queries)[:, None]
    before = rows - queries
    if rules.parents is not None:
        seen = torch.zeros(queries, rows, dtype=torch.bool)
        seen[:, :before] = True
        for row in range(queries):
            for other in ancestors(rules.parents, row):
                seen[row, before + other] = True
        return seen
    newest = {"last": before + query, "first": query, "none": torch.full_like(query, rows - 1)}[rules.aligned]
    seen = key <= newest - rules.hidden
    if rules.window is not None:
        seen = seen & (key > newest - rules.window)
    return seen if rules.longest is None else seen & (key < rules.longest)


def ancestors(parents: Parents, row: int) -> list[int]:
    """The row and its ancestors, in ascending order."""
    found = []
    while row >= 0:
        found.append(row)
        row = parents[row]
    return found[::-1]


def tree_bits(trees: tuple[Parents, ...], device: torch.device) -> Tensor:
    """Tree masks as in ``Geometry.tree``: ``[requests, rows]`` int64. Bit 63 is the sign."""
    bits = [[sum(1 << seen for seen in ancestors(tree, row)) for row in range(len(tree))] for tree in trees]
    signed = [[number - (1 << 64) if number >> 63 else number for number in row] for row in bits]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def entries(
    values: Tensor,
    gates: Tensor,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    frequencies: Tensor,
    *,
    overlap: bool,
) -> Tensor:
    """Compute a request's compressed entries by the equations of ``CompressorInputs``; ``[entries, dim]`` float64.

    ``values`` and ``gates`` cover all tokens of the request. ``bias`` is ``[ratio, series * dim]``.
    """
    ratio, dim, rope = len(bias), len(norm), 2 * len(frequencies)
    count = len(values) // ratio
    terms, gate = (each[: count * ratio].double().unflatten(0, (count, ratio)) for each in (values, gates))
    gate = gate + bias.double()
    if overlap:  # the first window has no previous one
        before = torch.cat((torch.zeros_like(terms[:1]), terms[:-1]))[..., :dim]
        gates_before = torch.cat((torch.full_like(gate[:1], float("-inf")), gate[:-1]))[..., :dim]
        terms, gate = torch.cat((before, terms[..., dim:]), 1), torch.cat((gates_before, gate[..., dim:]), 1)
    pooled = (gate.softmax(1) * terms).sum(1)
    made: Tensor = pooled / (pooled.square().mean(1, keepdim=True) + eps).sqrt() * norm.double()
    angles = torch.arange(0, count * ratio, ratio, device=made.device)[:, None] * frequencies.double()
    even, odd = made[:, dim - rope :: 2].clone(), made[:, dim - rope + 1 :: 2].clone()
    made[:, dim - rope :: 2] = even * angles.cos() - odd * angles.sin()
    made[:, dim - rope + 1 :: 2] = even * angles.sin() + odd * angles.cos()
    return made


def recurrence(inputs: LinearInputs, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Process one request's tokens one by one, by the equations of ``LinearInputs``.

    ``state`` ``[heads, key_dim, value_dim]`` is the state before them. Returns the output ``[tokens, heads,
    value_dim]`` and the state after them, both float64.
    """
    q, k, v, log_decay = (t.double() for t in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
    beta = None if inputs.beta is None else inputs.beta.double()
    tokens, heads, _ = v.shape
    of_key_head = torch.arange(heads) * q.shape[1] // max(heads, 1)
    out = torch.zeros_like(v)
    for token in range(tokens):
        query, key = q[token, of_key_head], k[token, of_key_head]
        if inputs.normalize:
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        decay = (log_decay if log_decay.dim() == 1 else log_decay[token]).exp()
        state = state * decay.reshape(heads, -1, 1)
        write = v[token]
        if beta is not None:
            write = (write - (key.unsqueeze(2) * state).sum(1)) * beta[token, :, None]
        state = state + key.unsqueeze(2) * write.unsqueeze(1)
        out[token] = scale * (query.unsqueeze(2) * state).sum(1)
    return out, state


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Convolve one request's rows ``[tokens, channels]``, each with those before it. ``state`` ``[channels, width]``
    holds the newest rows. Returns the output and the new state, both float64."""
    rows, width = torch.cat([state.T, x.double()]), state.shape[1]
    windows = rows.unfold(0, width, 1)[1:]  # [tokens, channels, width]
    out = (windows * weight.double()).sum(2)
    if bias is not None:
        out = out + bias.double()
    return out * torch.sigmoid(out) if silu else out, rows[len(rows) - width :].T
