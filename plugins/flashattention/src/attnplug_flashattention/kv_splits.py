"""Page tables and lengths of KV splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_TILE = 128
"""Keys per kernel tile. Splits end at tile boundaries if the page size allows it, so that no tile is partly used."""


@dataclass(frozen=True, slots=True, eq=False)
class KVSplits:
    """Page table of a batch in kernel pages, with each request's KV cut into ``count`` splits.

    Row ``request * count + split`` of ``page_table`` ``[requests * count, width]`` int32 lists the split's pages, of
    ``kernel_page`` rows each. ``kv_lens`` ``[requests * count]`` int32 are the rows per split; 0 for an empty one.
    ``page_size`` is the page size of the batch's own table.
    """

    page_table: Tensor
    kv_lens: Tensor
    count: int
    page_size: int
    kernel_page: int

    @classmethod
    def empty(
        cls, requests: int, longest: int, count: int, page_size: int, kernel_page: int, device: torch.device
    ) -> KVSplits:
        """Allocate for requests of up to ``longest`` rows; ``fill_splits`` fills it."""
        width = pages_per_split(-(-longest // kernel_page), count, kernel_page)
        table = torch.zeros(requests * count, max(width, 1), dtype=torch.int32, device=device)
        kv_lens = torch.zeros(requests * count, dtype=torch.int32, device=device)
        return cls(table, kv_lens, count, page_size, kernel_page)


def pages_per_split(pages: int, count: int, kernel_page: int) -> int:
    """Return the pages per split (the last may have fewer), in whole key tiles if there are several splits."""
    if count == 1:
        return pages
    step = max(1, KEY_TILE // kernel_page)
    return -(-pages // (count * step)) * step
