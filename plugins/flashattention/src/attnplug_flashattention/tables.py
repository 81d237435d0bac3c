"""Device-side planning: page tables of KV splits in kernel pages, and write slots.

Each function is one Triton kernel on CUDA, which a graph can capture, and plain torch on other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashattention.kv_splits import KEY_TILE, KVSplits


def fill_splits(page_table: Tensor, kv_lens: Tensor, splits: KVSplits) -> None:
    """Fill ``splits`` from ``page_table`` ``[requests, pages]`` int32, in pages of ``splits.page_size``, and lengths.

    Table entries behind a request's last page are not read. Elements that belong to no page are not written.
    """
    if page_table.device.type == "cuda":
        from attnplug_flashattention.triton_kernels import launch_fill_splits

        launch_fill_splits(page_table, kv_lens, splits)
        return
    size, count = splits.kernel_page, splits.count
    ratio = splits.page_size // size
    width = min(page_table.shape[1] * ratio, splits.page_table.shape[1] * count)
    lens = kv_lens.long().clamp(max=width * size)
    pages = (lens + size - 1) // size
    step = max(1, KEY_TILE // size) if count > 1 else 1
    per = (pages + count * step - 1) // (count * step) * step
    part, column = torch.arange(count)[:, None], torch.arange(splits.page_table.shape[1])
    page = part * per[:, None, None] + column
    live = (column < per[:, None, None]) & (page < pages[:, None, None])
    request = torch.arange(len(lens))[:, None, None]
    found = page_table[request, torch.where(live, page // ratio, 0)].long() * ratio + page % ratio
    target = splits.page_table.unflatten(0, (-1, count))
    target.copy_(torch.where(live, found, target))
    rows = per[:, None] * size
    splits.kv_lens.unflatten(0, (-1, count)).copy_((lens[:, None] - part.T * rows).clamp(min=0).minimum(rows))


def fill_slots(page_table: Tensor, kv_lens: Tensor, page_size: int, slots: Tensor) -> None:
    """Fill ``slots`` ``[requests * queries]`` int64 with the write slots of the new rows, each request's last ones.

    The slot is -1 for a position before the request's first row or beyond the table's last column. Padded requests of a
    captured batch have length 0, so all of their slots are -1.
    """
    if page_table.device.type == "cuda":
        from attnplug_flashattention.triton_kernels import launch_fill_slots

        launch_fill_slots(page_table, kv_lens, page_size, slots)
        return
    requests, width = page_table.shape
    queries = slots.shape[0] // max(requests, 1)
    position = kv_lens.long()[:, None] - queries + torch.arange(queries)
    exists = (position >= 0) & (position < width * page_size)
    page = page_table.gather(1, torch.where(exists, position // page_size, 0)).long()
    slots.copy_(torch.where(exists, page * page_size + position % page_size, -1).flatten())
