"""Filling the work list of a captured call on the device: by a kernel on CUDA, elsewhere torch does the same."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug_flashinfer.schedule import PageCounts, Schedule, UniformBatch, divided


def fill_schedule(schedule: Schedule, batch: UniformBatch, kv_lens: Tensor, width: int, counts: PageCounts) -> None:
    """Divide the work on ``kv_lens`` ``[requests]`` int32 of up to ``width`` pages each, and fill ``counts``.

    The chunks are the shortest of which all fit into the list. A padded request, of length 0, has no items: merging
    gives zeros for its rows.
    """
    if kv_lens.device.type == "cuda":
        from attnplug_flashinfer.triton_kernels import launch_fill_schedule

        launch_fill_schedule(schedule, batch, kv_lens, width, counts)
        return
    rows = kv_lens.long().clamp(max=width * batch.page_size)
    pages = -(-rows // batch.page_size)
    counts.kv_indptr[0] = 0
    counts.kv_indptr[1:] = pages.cumsum(0)
    counts.last_page_lens.copy_(rows - (pages - 1).clamp(min=0) * batch.page_size)
    tiles = batch.tiles(schedule.tile_rows)
    seen = pages.clamp(max=batch.most_seen(schedule.tile_rows))
    low, high = batch.least_chunk, max(int(seen.max()), batch.least_chunk)
    while low < high:
        middle = (low + high) // 2
        if int((-(-seen // middle)).sum()) * tiles > schedule.room:
            low = middle + 1
        else:
            high = middle
    wanted = divided(schedule, batch, -(-seen // low))
    for array, numbers in zip(schedule.arrays(), (*wanted, torch.tensor([low * batch.page_size])), strict=True):
        array[: len(numbers)] = numbers
