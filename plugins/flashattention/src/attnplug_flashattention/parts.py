"""Memory for requests that are cut into parts: the page table and the lengths of every part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_TILE = 128
"""Keys that a kernel loads at a time. Parts end with a tile, where pages allow it, so no tile is loaded in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The pages of a batch's requests, each cut into ``count`` parts.

    Row ``request * count + part`` of ``page_table`` ``[requests * count, width]`` int32 names the part's pages, of
    ``kernel_page`` rows each. ``kv_lens`` ``[requests * count]`` int32 says how many rows the part has: 0 if none is
    left for it.
    """

    page_table: Tensor
    kv_lens: Tensor
    count: int
    page_size: int
    kernel_page: int

    @classmethod
    def empty(
        cls, requests: int, longest: int, count: int, page_size: int, kernel_page: int, device: torch.device
    ) -> Parts:
        """Memory for requests of up to ``longest`` rows."""
        width = pages_a_part(-(-longest // kernel_page), count, kernel_page)
        table = torch.zeros(requests * count, max(width, 1), dtype=torch.int32, device=device)
        kv_lens = torch.zeros(requests * count, dtype=torch.int32, device=device)
        return cls(table, kv_lens, count, page_size, kernel_page)


def pages_a_part(pages: int, count: int, kernel_page: int) -> int:
    """Pages in every part but the last: equally many, and whole key tiles if the request is cut at all."""
    if count == 1:
        return pages
    step = max(1, KEY_TILE // kernel_page)
    return -(-pages // (count * step)) * step
