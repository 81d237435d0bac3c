"""Padded requests of CUDA graphs: a slot table row of their own, with pages if the backend wants a length."""

from __future__ import annotations

import torch

from attnplug import PoolError
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable


def reserve_padding(name: str, length: int, table: SlotTable, allocator: PageAllocator, context: int) -> None:
    """Reserve pages for ``length`` tokens of the padded requests of backend ``name``.

    They must fit into the context and leave at least one page. Raises PoolError.
    """
    needed, off = -(-length // table.page_size), "or turn graphs off by `disable_cuda_graph`"
    if length > context:
        raise PoolError(
            f"padded requests of {name} in CUDA graphs have {length} tokens, and the context holds {context}; "
            f"give a `context_length` of {length} or more, {off}",
            settings=["context_length", "disable_cuda_graph"],
        )
    if needed >= allocator.free_pages:
        raise PoolError(
            f"padded requests of {name} in CUDA graphs take {needed} of {allocator.free_pages} free pages, and none is "
            f"left for others; give `num_pages` of {needed + 1} or more, {off}",
            settings=["num_pages", "disable_cuda_graph"],
        )
    if needed:
        mirror = table.mirror()
        mirror[table.max_requests, :needed] = torch.tensor(
            allocator.allocate(needed), dtype=torch.int32, device=mirror.device
        )
