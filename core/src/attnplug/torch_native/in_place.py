"""Decode on a CPU over pages where they lie: whole pages are attended to in place, and only last pages are copied.

Each page answers its own request's query with a partial result and its log-sum-exp; these are merged for each request.
So a cache row is read once, where a copy reads it, writes it and reads it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnplug.contract.geometry import Geometry
from attnplug.machine.hardware import IS_ARM

# Pages are attended to from the first to the last that the batch uses, and the others' results are dropped. This share
# of them must be the batch's own: below it, a copy is cheaper.
_LEAST_SHARE = 0.5
# With smaller pages the work on each page is less than the call for it, and so is that of merging few rows. On Arm the
# small products of single pages are slower.
_SMALLEST_PAGE = 32
_FEWEST_ROWS = 8192 if IS_ARM else 3072

# F.scaled_dot_product_attention keeps the log-sum-exp to itself. This returns it too, [requests, heads, rows].
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class PagesInPlace:
    """Requests with one query each, over pages ``first … last - 1`` of a pool and a copy of each request's last page.

    ``owners`` ``[last - first]`` is the request whose query each page answers. ``tails`` ``[requests, longest]`` are
    the slots of each request's last page, and ``tail_bias`` ``[requests, 1, 1, longest]`` hides what is padding there.
    ``parts`` ``[requests, most]`` numbers each request's partial results: pages, then tails, then nothing.
    """

    first: int
    last: int
    owners: Tensor
    tails: Tensor
    tail_bias: Tensor | None
    parts: Tensor

    @classmethod
    def of(cls, geometry: Geometry) -> PagesInPlace | None:
        """None where a copy is cheaper, or where requests share pages."""
        size, requests = geometry.page_size, geometry.requests
        if geometry.max_new != 1 or size < _SMALLEST_PAGE or not requests or min(geometry.query_lens) != 1:
            return None
        if sum(geometry.kv_lens) < _FEWEST_ROWS:
            return None
        last_rows = np.array(geometry.kv_lens) - 1
        whole = last_rows // size  # a request's last page is a tail, whole or not: no tail is empty
        most = int(whole.max())
        if not most:
            return None
        table = geometry.page_table[:, : most + 1].numpy().astype(np.int64)
        used = np.arange(most) < whole[:, None]
        pages, owners = table[:, :most][used], used.nonzero()[0]
        first, last = int(pages.min()), int(pages.max()) + 1
        if first < 0 or len(pages) * size < _FEWEST_ROWS or len(pages) < _LEAST_SHARE * (last - first):
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
        bias = None
        if ends.min() < ends.max():
            hidden = places > ends[:, None]
            bias = torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0)))[:, None, None]
        return cls(
            first,
            last,
            torch.from_numpy(owner_of.clip(0)),
            torch.from_numpy(tails),
            bias,
            torch.from_numpy(parts),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, last_k: Tensor, last_v: Tensor, scale: float) -> Tensor:
        """``[requests, heads, v_dim]``, all float32.

        q ``[requests, heads, dim]``, k and v the pool's ``[pages, page_size, kv_heads, dim]``, last_k and last_v
        the rows at ``tails``, ``[requests, longest, kv_heads, dim]``.
        """
        rows = q.unflatten(1, (k.shape[2], -1))
        here = slice(self.first, self.last)
        pages, page_sums = _flash(
            rows.index_select(0, self.owners), k[here].transpose(1, 2), v[here].transpose(1, 2), scale=scale
        )
        mask = None if self.tail_bias is None else self.tail_bias.expand(-1, 1, rows.shape[2], -1)
        tails, tail_sums = _flash(rows, last_k.transpose(1, 2), last_v.transpose(1, 2), attn_mask=mask, scale=scale)
        # One more part is nothing: it has no weight, for requests with fewer pages than others.
        nothing = tail_sums.new_full((1, *tail_sums.shape[1:]), float("-inf"))
        sums = torch.cat((page_sums, tail_sums, nothing)).index_select(0, self.parts.view(-1))
        weights = torch.softmax(sums.view(*self.parts.shape, *sums.shape[1:]), 1)
        results = torch.cat((pages, tails, torch.zeros_like(tails[:1]))).index_select(0, self.parts.view(-1))
        merged = (results.view(*self.parts.shape, *results.shape[1:]) * weights.unsqueeze(-1)).sum(1)
        return merged.flatten(1, 2)
