"""Memory for requests that are cut into parts: the page table and the lengths of every part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_TILE = 128
"""Keys that a kernel loads at a time: parts end with a tile, unless pages do not, so that none is loaded in vain."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Where the requests of a batch, each cut into ``count`` parts, have their pages.

    Row ``request * count + part`` of ``page_table`` ``[requests * count, width]`` int32 names the part's pages, each of
    ``kernel_page`` rows; ``kv_lens`` ``[requests * count]`` int32 says how many rows it has, 0 if none is left for it.
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
    """Pages in all but the last part of a request of ``pages``: equally many, and whole key tiles where it is cut."""
    if count == 1:
        return pages
    step = max(1, KEY_TILE // kernel_page)
    return -(-pages // (count * step)) * step
