"""Page tables in a kernel's page size, requests cut into parts, and write slots, made on the tables' own device.

On a GPU each function is one kernel, which a graph can capture. Elsewhere it is plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashattention.parts import KEY_TILE, Parts


def fill_parts(page_table: Tensor, kv_lens: Tensor, parts: Parts) -> None:
    """Fill ``parts`` from ``page_table`` ``[requests, pages]`` in the manager's pages and ``kv_lens`` ``[requests]``.

    Entries of the table after a request's last page are not read. Places that belong to no page keep what they hold.
    """
    if page_table.device.type == "cuda":
        from attnplug_flashattention.triton_kernels import launch_fill_parts

        launch_fill_parts(page_table, kv_lens, parts)
        return
    size, count = parts.kernel_page, parts.count
    ratio = parts.page_size // size
    width = min(page_table.shape[1] * ratio, parts.page_table.shape[1] * count)
    lens = kv_lens.long().clamp(max=width * size)
    pages = (lens + size - 1) // size
    step = max(1, KEY_TILE // size) if count > 1 else 1
    per = (pages + count * step - 1) // (count * step) * step
    part, column = torch.arange(count)[:, None], torch.arange(parts.page_table.shape[1])
    page = part * per[:, None, None] + column
    live = (column < per[:, None, None]) & (page < pages[:, None, None])
    request = torch.arange(len(lens))[:, None, None]
    found = page_table[request, torch.where(live, page // ratio, 0)].long() * ratio + page % ratio
    target = parts.page_table.unflatten(0, (-1, count))
    target.copy_(torch.where(live, found, target))
    rows = per[:, None] * size
    parts.kv_lens.unflatten(0, (-1, count)).copy_((lens[:, None] - part.T * rows).clamp(min=0).minimum(rows))


def fill_slots(page_table: Tensor, kv_lens: Tensor, page_size: int, slots: Tensor) -> None:
    """Fill ``slots`` ``[requests * queries]`` int64 with the places of the new rows: the last rows of each request.

    The slot is -1 for a row before the request's first, and for a row past the table's last column. Padded requests of
    a captured batch have length 0, so all of their slots are -1.
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
