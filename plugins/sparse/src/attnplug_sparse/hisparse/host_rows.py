"""All latent rows of a model in host memory, which GPU kernels read and write directly."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from attnplug import PoolError
from attnplug.kernels import CacheKey, PageCopy, settle_copies
from attnplug_sparse.hisparse.addresses import HostSlots, LogicalSlots, host_slots


class HostRows:
    """Pages of the page table in host memory: ``[layers, pages * page_size, row_bytes]``, as stored.

    With a ``ratio`` above 1 it holds entries, ``page_size // ratio`` per page. For a GPU the memory is pinned and
    mapped. All accesses are ordered by the device's stream.
    """

    def __init__(
        self,
        layers: int,
        *,
        num_pages: int,
        page_size: int,
        row_nbytes: int,
        device: torch.device | str,
        ratio: int = 1,
    ) -> None:
        self.num_pages, self.page_size, self.page_rows = num_pages, page_size, page_size // ratio
        self.device = torch.device(device)
        shape = (layers, num_pages * self.page_rows, row_nbytes)
        try:
            self.cells: Tensor = _aligned(layers * shape[1] * row_nbytes).view(shape)
            """``[layers, rows, row_bytes]`` uint8."""
            if self.device.type == "cuda":
                _pin(self, self.cells)
        except RuntimeError as error:
            raise PoolError(
                f"{num_pages} pages of {page_size} tokens take {layers * shape[1] * row_nbytes / 2**30:.1f} GiB of "
                f"host memory, which cannot be allocated and pinned: {error}; lower `num_pages`",
                settings=["num_pages"],
            ) from error

    @property
    def nbytes(self) -> int:
        return self.cells.numel()

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        if not copies:
            return
        outside = sorted({p for copy in copies for p in (copy.source, copy.target) if not 0 <= p < self.num_pages})
        if outside:
            raise PoolError(f"pages {outside} cannot be copied: the pool holds pages 0 to {self.num_pages - 1}")
        offsets = torch.arange(self.page_rows)
        sources, targets = (
            (torch.tensor(pages).unsqueeze(1) * self.page_rows + offsets).flatten().to(self.device)
            for pages in settle_copies(copies)
        )
        self._move(sources, targets)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer between slots of the page table; see ``KVPools.move_rows``. Entries are refused."""
        if self.page_rows != self.page_size:
            raise PoolError("entries in host memory cannot be moved: an entry is made of tokens in their order")
        if targets.dim() != 1 or sources.shape != targets.shape:
            raise PoolError(f"rows cannot be moved from {list(sources.shape)} to {list(targets.shape)} slots; give [n]")
        if targets.numel():
            self._move(sources, targets)

    def _move(self, sources: Tensor, targets: Tensor) -> None:
        source, target = host_slots(LogicalSlots(sources)), host_slots(LogicalSlots(targets))
        if self.device.type == "cuda":
            from attnplug_sparse.hisparse.triton_rows import move

            move(self.cells, source, target)
            return
        live = target.slots.cpu() >= 0
        self.cells[:, target.slots.cpu()[live]] = self.cells[:, source.slots.cpu()[live]]

    def read(self, number: int, slots: HostSlots) -> Tensor:
        """Return rows of a layer on the device, ``[*slots.shape, row_bytes]``. Not for CUDA, which has kernels."""
        return self.cells[number][slots.slots.cpu()].to(self.device)

    def write(self, number: int, slots: HostSlots, rows: Tensor) -> None:
        """Store rows of a layer ``[n, row_bytes]``, except where a slot is -1. Not for CUDA, which has kernels."""
        live = slots.slots >= 0
        self.cells[number][slots.slots[live].cpu()] = rows[live].cpu()


_PORTABLE_AND_MAPPED = 3
_ALIGNMENT = 4096


def _aligned(nbytes: int) -> Tensor:
    """Allocate page-aligned zeros: a GPU reads whole lines of 128 bytes."""
    memory = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % _ALIGNMENT :][:nbytes]


def _pin(owner: HostRows, memory: Tensor) -> None:
    """Pin existing memory. torch's own pinned memory is rounded up to a power of two."""
    address = memory.data_ptr()
    register = torch.cuda.cudart().cudaHostRegister
    torch.cuda.check_error(int(register(address, memory.numel(), _PORTABLE_AND_MAPPED)))
    weakref.finalize(owner, _unpin, address).atexit = False


def _unpin(address: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


HOST_ROWS: Final[CacheKey[HostRows]] = CacheKey("host rows", HostRows)
"""Key of the rows in host memory in ``KVPools``."""
HOST_ENTRIES: Final[CacheKey[HostRows]] = CacheKey("host entries", HostRows)
"""Key of the entries in host memory."""
