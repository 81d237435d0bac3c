"""Tree attention for target verify.

FlashAttention has no tree mask. The kernel attends to the prefix, which all new rows see; torch attends to the new rows
of a request, 64 at most. Both results are merged by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, RaggedCall
from attnplug.kernels import split_table, to_device
from attnplug_flashattention.kernels import SoftmaxParams
from attnplug_flashattention.kv_splits import KVSplits
from attnplug_flashattention.planner import GatheredCall, PagedCall
from attnplug_flashattention.tables import fill_splits


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """Plan of a batch of trees.

    ``bits`` ``[requests, rows]`` int64 are those of ``Geometry.tree``. ``prefix`` is the call over the rows before the
    new ones, ``None`` if no request has any. ``queries`` int64 are the rows of q in that call; ``None`` for all.

    A captured plan owns static buffers, which ``refill`` fills at the start of every replay: ``bits``, ``prefix_lens``
    ``[requests]`` int32 and, if the kernel's page size differs from the batch's, the page table in ``splits``.
    """

    bits: Tensor
    prefix: PagedCall | GatheredCall | None
    queries: Tensor | None = None
    prefix_lens: Tensor | None = None
    splits: KVSplits | None = None

    def refill(self, geometry: Geometry) -> None:
        """Fill the static buffers from device lengths and trees. A padded request has neither prefix nor tree."""
        assert geometry.tree is not None and self.prefix_lens is not None
        torch.sub(geometry.seq_lens, geometry.max_new, out=self.prefix_lens).clamp_(min=0)
        torch.mul(geometry.tree, geometry.seq_lens.unsqueeze(1) > 0, out=self.bits)
        if self.splits is not None:
            fill_splits(geometry.page_table, self.prefix_lens, self.splits)


def plan_tree(geometry: Geometry, bits: Tensor, kernel_page: int | None) -> TreePlan:
    """Plan an eager batch. ``kernel_page`` is the kernel's page size; ``None`` if rows are gathered."""
    rows, prefixes = geometry.max_new, [total - geometry.max_new for total in geometry.kv_lens]
    having = [request for request, prefix in enumerate(prefixes) if prefix]
    if not having:
        return TreePlan(bits, None)
    live, lens, queries = geometry.only(having), [prefixes[request] for request in having], None
    if len(having) < geometry.requests:
        first = to_device([request * rows for request in having], geometry.device)
        queries = (first.unsqueeze(1) + torch.arange(rows, device=geometry.device)).flatten()
    call = RaggedCall.of(0, [rows] * len(lens), lens, causal=False, device=geometry.device, lane=geometry.lane)
    if kernel_page is None:
        slots = live.span_slots(range(live.requests), [0] * live.requests, lens)
        return TreePlan(bits, GatheredCall(slots, call), queries)
    ratio = geometry.page_size // kernel_page
    table = live.page_table if ratio == 1 else split_table(live.page_table, ratio)
    return TreePlan(bits, PagedCall(table, live.seq_lens - rows, max(lens), rows, causal=False, ragged=call), queries)


def capture_tree(geometry: Geometry, kernel_page: int) -> TreePlan:
    """Plan a captured batch shape. ``refill`` fills the plan inside the graph."""
    requests, device = geometry.requests, geometry.device
    bits = torch.zeros(requests, geometry.max_new, dtype=torch.int64, device=device)
    lens, table, splits = torch.zeros(requests, dtype=torch.int32, device=device), geometry.page_table, None
    kv_lens, longest = lens, table.shape[1] * geometry.page_size
    if kernel_page != geometry.page_size:
        splits = KVSplits.empty(requests, longest, 1, geometry.page_size, kernel_page, device)
        table, kv_lens = splits.page_table, splits.kv_lens
    call = PagedCall(table, kv_lens, longest, geometry.max_new, causal=False)
    return TreePlan(bits, call, prefix_lens=lens, splits=splits)


def attend_nodes(q: Tensor, k: Tensor, v: Tensor, bits: Tensor, softmax: SoftmaxParams) -> tuple[Tensor, Tensor]:
    """Attend from new rows to the new rows of their own request that ``bits`` select.

    q ``[requests * rows, heads, dim]``, k and v ``[requests * rows, kv_heads, …]``. Returns ``[requests * rows, heads,
    v_dim]`` and log-sum-exps ``[requests * rows, heads]``, both float32.
    """
    requests, rows = bits.shape
    keys, values = (tensor.float().unflatten(0, (requests, rows)).transpose(1, 2) for tensor in (k, v))
    queries = q.float().unflatten(0, (requests, rows)).transpose(1, 2).unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("rhgnd,rhmd->rhgnm", queries, keys) * softmax.scale
    if softmax.cap is not None:
        logits = softmax.cap * torch.tanh(logits / softmax.cap)
    # Hidden values may be NaN, and NaN with weight zero would still reach the result. So broken rows of values become
    # zeros, and logits of queries that do see them become NaN.
    broken = ~values.isfinite().all(-1)
    values = values.masked_fill(broken.unsqueeze(-1), 0.0)
    logits = logits.masked_fill(broken[:, :, None, None], float("nan"))
    hidden = (bits.unsqueeze(-1) >> torch.arange(rows, device=bits.device)) & 1 == 0
    logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    sums = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(sums == float("-inf"), 0.0, sums).unsqueeze(-1))
    out = torch.einsum("rhgnm,rhmd->rhgnd", weights, values)
    return out.flatten(1, 2).transpose(1, 2).flatten(0, 1), sums.flatten(1, 2).transpose(1, 2).flatten(0, 1)
