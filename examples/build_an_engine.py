"""For people who build an engine: your own cache, page table and lengths, and any installed backend.

Runs one attention layer: a prefill of two requests, then eight decode steps. Every result is compared with float64.
``docs/hosting.md`` explains each part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, LayerSpec, MHAPool, ModelSpec, Problem
from attnplug.host import (
    BackendRequest,
    HostContext,
    KVPools,
    Limits,
    ModelAttention,
    WorkspaceOwner,
    build_selection,
    load_registry,
    select,
)

HEADS, KV_HEADS, DIM, PAGE, PAGES = 8, 2, 64, 16, 32
LAYER = LayerSpec(0, AttentionKind.MHA, HEADS, KV_HEADS, DIM, DIM, scale=DIM**-0.5)
MODEL = ModelSpec("mine", "llama", (LAYER,), context_length=PAGES * PAGE)


def build(cache: Tensor) -> ModelAttention:
    """Select a backend and build it over the engine's own memory ``[2, pages, page, kv_heads, dim]``."""
    problem = Problem(MODEL, device="cpu", dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32, page_size=PAGE)
    selection = select(load_registry(), BackendRequest("auto"), problem)  # SelectionError has every reason
    pool = MHAPool.over(MODEL.layers, {0: cache}, "kv pages tokens heads dim", page_size=PAGE, dtype=DType.FLOAT32)
    context = HostContext(
        model=MODEL,
        device=cache.device,
        dtype=torch.float32,
        kv_dtype=DType.FLOAT32,
        page_size=PAGE,
        limits=Limits(max_requests=2, max_tokens=64, max_context=PAGES * PAGE),
        pools=KVPools(mha=pool),
        workspace=WorkspaceOwner(),
    )
    return ModelAttention(build_selection(selection, context), context.pools)


def reference(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one request in float64: q ``[queries, heads, dim]``, keys ``[rows, kv_heads, dim]``."""
    keys, values = (rows.double().repeat_interleave(HEADS // KV_HEADS, 1) for rows in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * LAYER.scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), values)


def main() -> None:
    torch.manual_seed(0)
    attention = build(torch.zeros(2, PAGES, PAGE, KV_HEADS, DIM))
    page_table = torch.tensor([[4, 7], [9, 2]], dtype=torch.int32)  # two pages per request
    rows: list[tuple[Tensor, Tensor]] = [(torch.empty(0, KV_HEADS, DIM),) * 2] * 2
    worst = 0.0
    for step in range(9):
        new = [12, 5] if step == 0 else [1, 1]
        mode = ForwardMode.EXTEND if step == 0 else ForwardMode.DECODE
        lengths = [len(keys) + count for (keys, _), count in zip(rows, new, strict=True)]
        batch = ForwardBatch(Geometry.of_lengths(mode, page_table, new, lengths, PAGE))
        attention.plan(batch)  # once per step, for all layers
        q, k, v = (torch.randn(sum(new), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = attention.attend(q, k, v, LAYER, batch)  # once per layer: writes k and v, and attends
        parts = zip(rows, k.split(new), v.split(new), strict=True)
        rows = [(torch.cat([keys, k]), torch.cat([values, v])) for (keys, values), k, v in parts]
        wanted = torch.cat([reference(part, *pair) for part, pair in zip(q.split(new), rows, strict=True)])
        worst = max(worst, float((out - wanted).abs().max()))
    print(f"9 steps on {attention.backend.backend_id.name}; largest difference from float64: {worst:.1e}")
    assert worst < 1e-5


if __name__ == "__main__":
    main()
