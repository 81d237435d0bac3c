"""In-place decode on a CPU: whole pages are read where they are; only each request's last page is copied.

Each page gives a partial result and its log-sum-exp for its request's query; these are merged per request. So a cache
row is read once, while a gather reads it, writes it and reads it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.machine.hardware import IS_ARM
from attnplug.torch_native.planner import padding_bias

# All pages between the batch's first and last one are computed, and results of foreign pages are dropped. A gather is
# faster if less than this share of them belongs to the batch.
_MIN_SHARE = 0.5
# With smaller pages or fewer rows, call overhead exceeds the work. On Arm the small products per page are slower.
_MIN_PAGE_SIZE = 32
_MIN_ROWS = 8192 if IS_ARM else 3072

# Unlike F.scaled_dot_product_attention it also returns the log-sum-exp, [requests, heads, rows].
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class PagesInPlace:
    """Plan of requests with one query each, over pages ``first … last - 1`` of a pool and copies of their last pages.

    ``owners`` ``[last - first]`` is the request of each page. ``tails`` ``[requests, longest]`` are the slots of each
    request's last page; ``tail_bias`` ``[requests, 1, 1, longest]`` masks their padding. ``parts`` ``[requests, most]``
    are indices of each request's partial results: pages, then tails, then an empty result as padding.
    """

    first: int
    last: int
    owners: Tensor
    tails: Tensor
    tail_bias: Tensor | None
    parts: Tensor

    @classmethod
    def of(cls, geometry: Geometry) -> PagesInPlace | None:
        """Plan a batch; ``None`` if a gather is faster or requests share pages."""
        size, requests = geometry.page_size, geometry.requests
        if geometry.max_new != 1 or size < _MIN_PAGE_SIZE or not requests or min(geometry.query_lens) != 1:
            return None
        if sum(geometry.kv_lens) < _MIN_ROWS:
            return None
        last_rows = np.array(geometry.kv_lens) - 1
        whole = last_rows // size  # the last page is always a tail, even a full one, so that no tail is empty
        most = int(whole.max())
        if not most:
            return None
        table = geometry.page_table[:, : most + 1].numpy().astype(np.int64)
        used = np.arange(most) < whole[:, None]
        pages, owners = table[:, :most][used], used.nonzero()[0]
        first, last = int(pages.min()), int(pages.max()) + 1
        if first < 0 or len(pages) * size < _MIN_ROWS or len(pages) < _MIN_SHARE * (last - first):
            return None
        owner_of = np.full(last - first, -1)
        owner_of[pages - first] = owners
        if np.count_nonzero(owner_of >= 0) < len(pages):
            return None
        parts = np.full((requests, most + 1), last - first + requests)
        parts[:, :most][used] = pages - first
        parts[:, most] = last - first + np.arange(requests)
        ends = last_rows % size
        places = np.arange(int(ends.max()) + 1)
        tails = table[np.arange(requests), whole][:, None] * size + np.minimum(places, ends[:, None])
        owners_of, slots, indices = map(torch.from_numpy, (owner_of.clip(0), tails, parts))
        bias = padding_bias(ends, len(places)) if ends.min() < ends.max() else None
        return cls(first, last, owners_of, slots, bias, indices)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, last_k: Tensor, last_v: Tensor, scale: float) -> Tensor:
        """Return ``[requests, heads, v_dim]``; all tensors are float32.

        q ``[requests, heads, dim]``, k and v the pool's ``[pages, page_size, kv_heads, dim]``, last_k and last_v the
        rows at ``tails``, ``[requests, longest, kv_heads, dim]``.
        """
        rows = q.unflatten(1, (k.shape[2], -1))
        span = slice(self.first, self.last)
        pages, page_sums = _flash(
            rows.index_select(0, self.owners), k[span].transpose(1, 2), v[span].transpose(1, 2), scale=scale
        )
        mask = None if self.tail_bias is None else self.tail_bias.expand(-1, 1, rows.shape[2], -1)
        tails, tail_sums = _flash(rows, last_k.transpose(1, 2), last_v.transpose(1, 2), attn_mask=mask, scale=scale)
        # The empty result pads requests with fewer pages; its weight is 0.
        empty = tail_sums.new_full((1, *tail_sums.shape[1:]), float("-inf"))
        sums = torch.cat((page_sums, tail_sums, empty)).index_select(0, self.parts.view(-1))
        weights = torch.softmax(sums.view(*self.parts.shape, *sums.shape[1:]), 1)
        results = torch.cat((pages, tails, torch.zeros_like(tails[:1]))).index_select(0, self.parts.view(-1))
        merged = (results.view(*self.parts.shape, *results.shape[1:]) * weights.unsqueeze(-1)).sum(1)
        return merged.flatten(1, 2)
