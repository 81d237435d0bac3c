"""A verify of trees: attention over the prefix without a mask, and over the new rows by their trees.

Kernels have no mask for trees. They attend to the prefix, which all new rows see. The new rows of a request, 64 at
most, are attended to with torch. Both parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry, RaggedCall
from attnplug.kernels import split_table, to_device
from attnplug_flashattention.kernels import Softmax
from attnplug_flashattention.parts import Parts
from attnplug_flashattention.planner import GatheredCall, PagedCall
from attnplug_flashattention.tables import fill_parts


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """How a batch of trees runs.

    ``bits`` ``[requests, rows]`` int64 are those of ``Geometry.tree``. ``prefix`` is the call over the rows before the
    new ones, ``None`` if no request has any. ``queries`` are the rows of q that take part in it, ``None``: all.

    A captured plan has memory of its own for all of it, which ``refill`` fills at the start of every replay:
    ``prefix_lens`` ``[requests]`` int32, and ``cut``, the page table, if the kernel's pages are not the manager's.
    """

    bits: Tensor
    prefix: PagedCall | GatheredCall | None
    queries: Tensor | None = None
    prefix_lens: Tensor | None = None
    cut: Parts | None = None

    def refill(self, geometry: Geometry) -> None:
        """From lengths and trees on the device. A padded request has neither prefix nor tree."""
        assert geometry.tree is not None and self.prefix_lens is not None
        torch.sub(geometry.seq_lens, geometry.max_new, out=self.prefix_lens).clamp_(min=0)
        torch.mul(geometry.tree, geometry.seq_lens.unsqueeze(1) > 0, out=self.bits)
        if self.cut is not None:
            fill_parts(geometry.page_table, self.prefix_lens, self.cut)


def plan_tree(geometry: Geometry, bits: Tensor, kernel_page: int | None) -> TreePlan:
    """The plan of an eager batch. ``kernel_page`` is the page size that the kernel reads, ``None`` if it reads none."""
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
    """The plan of a captured shape; ``refill`` fills it inside the graph."""
    requests, device = geometry.requests, geometry.device
    bits = torch.zeros(requests, geometry.max_new, dtype=torch.int64, device=device)
    lens, table, cut = torch.zeros(requests, dtype=torch.int32, device=device), geometry.page_table, None
    kv_lens, longest = lens, table.shape[1] * geometry.page_size
    if kernel_page != geometry.page_size:
        cut = Parts.empty(requests, longest, 1, geometry.page_size, kernel_page, device)
        table, kv_lens = cut.page_table, cut.kv_lens
    call = PagedCall(table, kv_lens, longest, geometry.max_new, causal=False)
    return TreePlan(bits, call, prefix_lens=lens, cut=cut)


def attend_nodes(q: Tensor, k: Tensor, v: Tensor, bits: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
    """Attention of new rows to those new rows of their own request that their bits name.

    q ``[requests * rows, heads, dim]``, k and v ``[requests * rows, kv_heads, …]``. Returns ``[requests * rows, heads,
    v_dim]`` and log-sum-exps ``[requests * rows, heads]``, both float32.
    """
    requests, rows = bits.shape
    keys, values = (tensor.float().unflatten(0, (requests, rows)).transpose(1, 2) for tensor in (k, v))
    queries = q.float().unflatten(0, (requests, rows)).transpose(1, 2).unflatten(1, (keys.shape[1], -1))
    logits = torch.einsum("rhgnd,rhmd->rhgnm", queries, keys) * softmax.scale
    if softmax.cap is not None:
        logits = softmax.cap * torch.tanh(logits / softmax.cap)
    # Values that a row does not see may be anything. Without weight, a NaN would still get into the result. Such a row
    # of values becomes zeros, and whoever does see it gets NaN.
    broken = ~values.isfinite().all(-1)
    values = values.masked_fill(broken.unsqueeze(-1), 0.0)
    logits = logits.masked_fill(broken[:, :, None, None], float("nan"))
    hidden = (bits.unsqueeze(-1) >> torch.arange(rows, device=bits.device)) & 1 == 0
    logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    sums = logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(sums == float("-inf"), 0.0, sums).unsqueeze(-1))
    out = torch.einsum("rhgnm,rhmd->rhgnd", weights, values)
    return out.flatten(1, 2).transpose(1, 2).flatten(0, 1), sums.flatten(1, 2).transpose(1, 2).flatten(0, 1)
