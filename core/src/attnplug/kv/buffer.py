"""Memory of one layer's cache rows in one dtype and any layout: writes, reads and copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.problem import DType
from attnplug.kv.layout import PageLayout

_FEW_SLOTS = 64
"""Up to this many slots, min and max of a list are faster than torch's: 3 µs instead of 8, in every layer of a step."""
BLOCK = 4
"""Rows per block in :meth:`PagedBuffer.read_blocks`. A row of 1 KB costs a third less so; larger blocks gain little."""


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a ``DType``, or of a part of a row: ``torch_dtype("bfloat16")``."""
    found: torch.dtype = getattr(torch, dtype)
    return found


class RowKernel(Protocol):
    """Kernel that writes rows ``[tokens, heads, width]`` to slots ``[tokens]``, except to those outside the pool."""

    def write(self, slots: Tensor, rows: Tensor, /) -> None: ...


class PagedBuffer:
    """Rows ``[heads, dim]`` at flat slots ``page * page_size + offset``.

    ``pages`` is the memory that kernels read: ``[pages, page_size, heads, dim]`` with any strides. It keeps its address
    and its content; memory from ``allocate`` is zero until written. Rows are stored rounded to its dtype.
    """

    scale = 1.0

    def __init__(self, pages: Tensor) -> None:
        self.layout = layout = PageLayout.of(pages)
        self.pages = pages
        self.nbytes = pages.numel() * pages.element_size()
        # torch has no index operations for float8 on the CPU, so they run on bytes.
        self._cells = pages.view(torch.uint8) if pages.element_size() == 1 else pages
        # index_copy_ and index_select by flat slot are much faster than indexing by (page, offset).
        self._flat = self._cells.view(-1, layout.heads, layout.dim) if layout.tokens_evenly_spaced else None
        self._blocks: Tensor | None = None
        if self._flat is not None and self._flat.is_contiguous() and not layout.page_size % BLOCK:
            self._blocks = self._flat.view(-1, BLOCK * layout.heads * layout.dim)
        self._device, self._on_host = pages.device, pages.is_cpu
        self._slots, self._row = layout.num_pages * layout.page_size, (layout.heads, layout.dim)
        self.kernel = row_kernel(pages)
        """Kernel that writes rows with one launch; ``None`` if there is none for this device."""

    @classmethod
    def allocate(cls, layout: PageLayout, *, dtype: DType, device: torch.device | str) -> PagedBuffer:
        """Allocate a buffer. Its memory is zero until written."""
        return cls(layout.view(torch.zeros(layout.elements, dtype=torch_dtype(dtype), device=device)))

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        """Buffers that together hold the rows, and are moved together."""
        return (self,)

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None:
        """Raise PoolError for rows whose shape ``write`` cannot store, before anything is written."""
        if slots.dim() != 1 or rows.shape != (slots.shape[0], *self._row):
            raise PoolError(
                f"{name} of shape {list(rows.shape)} cannot be written to slots of shape {list(slots.shape)}; "
                f"give [tokens, {self._row[0]}, {self._row[1]}] and [tokens]"
            )

    def check_targets(self, slots: Tensor) -> bool:
        """Raise PoolError for slots that ``write`` cannot store to, before anything is written.

        Returns True if some of the rows may be padding. Only a CPU can tell without synchronising.
        """
        return self._check_slots(slots, padding=True)

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Store ``rows`` ``[tokens, heads, dim]`` at ``slots`` ``[tokens]``, but not where a slot is -1.

        Call both checks first; ``padded`` is the result of ``check_targets``. Does not synchronise with the device and
        can be captured: padding is detected when it runs. On a CPU the check refuses slots behind the pool's last; on a
        GPU nothing outside the pool is written for them.
        """
        if self.kernel is not None:
            self.kernel.write(slots, rows)
            return
        # torch takes microseconds for a conversion that does nothing, twice per layer.
        if slots.dtype is not torch.int64:
            slots = slots.to(torch.int64)
        cells = rows if rows.dtype is self.pages.dtype else rows.to(self.pages.dtype)
        if cells.dtype is not self._cells.dtype:
            cells = cells.view(self._cells.dtype)
        if padded and slots.numel():
            slots, cells = self._without_padding(slots, cells)
        self._scatter(slots, cells)

    def _scatter(self, slots: Tensor, cells: Tensor) -> None:
        if self._flat is not None:
            self._flat.index_copy_(0, slots, cells)
        else:
            self._cells[self._page_and_offset(slots)] = cells

    def _without_padding(self, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """Replace padding, keeping the number of slots and cells. This needs no synchronisation with the device.

        Padding repeats the write of the first other row. If there is none, it writes the content of slot 0 to slot 0.
        """
        live = slots >= 0
        first = live.to(torch.uint8).argmax().view(1)
        exists = live.index_select(0, first)
        target = slots.index_select(0, first).clamp(min=0)
        stored = self._cells[self._page_and_offset(target)]
        cell = torch.where(exists.view(1, 1, 1), cells.index_select(0, first), stored)
        return torch.where(live, slots, target), torch.where(live.view(-1, 1, 1), cells, cell)

    def read(self, slots: Tensor) -> Tensor:
        """Return rows ``[*slots.shape, heads, dim]`` in the stored dtype."""
        self._check_device(slots)
        if self._flat is not None:
            try:
                rows = self._flat.index_select(0, slots.reshape(-1))
            except IndexError:
                self._check_slots(slots)  # only now: on the hot path index_select's own check suffices
                raise
            cells = rows.view(*slots.shape, *self._row)
        else:
            self._check_slots(slots)
            cells = self._cells[self._page_and_offset(slots)]
        return cells if cells.dtype is self.pages.dtype else cells.view(self.pages.dtype)

    def read_blocks(self, blocks: Tensor, blank: Tensor | None) -> Tensor | None:
        """Return rows ``[requests, count * BLOCK, heads, dim]`` of blocks ``[requests, count]``, as stored.

        Block ``i`` is slots ``BLOCK * i … BLOCK * i + 3``. Rows ``blank``, counted over all requests, are zeroed.
        Returns ``None`` if the caller has to use ``read``: for rows that are not contiguous, or for a block outside the
        pool, which ``read`` then reports.
        """
        if self._blocks is None:
            return None
        try:
            rows = self._blocks.index_select(0, blocks.view(-1))
        except IndexError:
            return None
        if blank is not None:
            rows.view(-1, *self._row).index_fill_(0, blank, 0.0)
        return rows.view(blocks.shape[0], -1, *self._row)

    def move_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages; all are read before any is written. ``targets`` are distinct."""
        self._cells.index_copy_(0, targets, self._cells.index_select(0, sources))

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows between slots, as stored; all are read before any is written. Equal targets have equal sources."""
        flat = self._flat
        rows = self._cells[self._page_and_offset(sources)] if flat is None else flat.index_select(0, sources)
        self._scatter(targets, rows)

    def _page_and_offset(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(torch.int64)
        page = slots.div(self.layout.page_size, rounding_mode="floor")
        # A negative index counts from the end, so slot -1 would read the last page. An index behind the end is caught
        # on the device, as in index_copy_.
        return page.masked_fill_(slots < 0, self.layout.num_pages), slots.remainder(self.layout.page_size)

    def _check_device(self, slots: Tensor) -> None:
        if not (self._on_host and slots.is_cpu) and slots.device != self._device:  # comparing devices takes longer
            raise PoolError(f"slots on {slots.device} cannot index a cache on {self._device}; move them there")

    def _check_slots(self, slots: Tensor, *, padding: bool = False) -> bool:
        """Raise PoolError for slots outside the pool, except -1 with ``padding``. Return True if there may be any."""
        self._check_device(slots)
        if not self._on_host:
            return padding  # a check would wait for the device, which checks bounds itself
        count = slots.numel()
        if not count:
            return False
        bounds: list[int] = (slots.flatten() if count <= _FEW_SLOTS else torch.stack(slots.aminmax())).tolist()
        low, high = min(bounds), max(bounds)
        if low < -padding or high >= self._slots:
            unless = ", and -1 for padding" if padding else ""
            raise PoolError(f"slots {low} to {high} were given, and the cache holds 0 to {self._slots - 1}{unless}")
        return low < 0


def row_kernel(pages: Tensor) -> RowKernel | None:
    """Return a Triton kernel that writes rows; ``None`` where torch operations do so."""
    if pages.device.type != "cuda" or not pages.is_floating_point() or pages.element_size() == 1:
        return None
    return triton_writer(pages, 1.0)


def triton_writer(pages: Tensor, scale: float) -> RowKernel | None:
    """Return a Triton kernel that writes rows, in fp8 divided by ``scale``; ``None`` if Triton is not installed."""
    try:
        from attnplug.kv.triton_rows import RowWriter
    except ImportError:
        return None
    return RowWriter(pages, PageLayout.of(pages), scale)


def join_rows(keys: PagedBuffer, values: PagedBuffer) -> PagedBuffer | None:
    """Return a CPU buffer whose rows ``[heads, 2 * dim]`` hold a key and its value; ``None`` if they are not adjacent.

    vLLM's caches are of this kind. torch copies whole rows, which are contiguous, 8 times as fast as both halves.
    """
    k, v = keys.pages, values.pages
    plain = type(keys) is PagedBuffer and k.is_cpu
    is_adjacent = v.data_ptr() - k.data_ptr() == k.shape[-1] * k.element_size() and k.stride(2) == 2 * k.shape[-1]
    if not plain or k.shape != v.shape or k.stride() != v.stride() or not is_adjacent:
        return None
    return PagedBuffer(k.as_strided((*k.shape[:3], 2 * k.shape[-1]), k.stride()))


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of one page to another, in every layer: ``PageCopy(source=3, target=7)``."""

    source: int
    target: int


def settle_copies(copies: Iterable[PageCopy]) -> tuple[list[int], list[int]]:
    """Return sources and targets whose simultaneous copy has the effect of ``copies`` made in order.

    A host orders copies by when requests were extended, so a target can be the source of a later copy (a copied
    request is forked and extended), and a freed source a later target. ``[1 → 2, 2 → 3]`` becomes ``[1 → 2, 1 → 3]``.
    """
    origin: dict[int, int] = {}
    for copy in copies:
        origin[copy.target] = origin.get(copy.source, copy.source)
    moved = [(source, target) for target, source in origin.items() if source != target]
    return [source for source, _ in moved], [target for _, target in moved]


def copy_pages(buffers: Iterable[PagedBuffer], copies: Sequence[PageCopy]) -> None:
    """Apply ``copies`` to each of ``buffers`` ``[pages, ...]`` as if in sequence, with one indexed operation each."""
    buffers = tuple(buffers)
    if not copies or not buffers:
        return
    limit = min(buffer.layout.num_pages for buffer in buffers)
    outside = sorted({page for copy in copies for page in (copy.source, copy.target) if not 0 <= page < limit})
    if outside:
        raise PoolError(f"pages {outside} cannot be copied: the pool holds pages 0 to {limit - 1}")
    device = buffers[0].pages.device
    sources, targets = (torch.tensor(pages, dtype=torch.int64, device=device) for pages in settle_copies(copies))
    for buffer in buffers:
        buffer.move_pages(sources, targets)


def move_rows(buffers: Sequence[PagedBuffer], sources: Tensor, targets: Tensor) -> None:
    """Copy rows in each of ``buffers``, which hold the same slots on one device; see ``KVPools.move_rows``."""
    if targets.dim() != 1 or sources.shape != targets.shape:
        raise PoolError(
            f"rows cannot be moved from slots of shape {list(sources.shape)} to slots of shape {list(targets.shape)}; "
            "give [n] and [n]"
        )
    buffers[0]._check_device(sources)
    padded = buffers[0]._check_slots(targets, padding=True)
    if not targets.numel():
        return
    if padded:
        sources, targets = _without_skipped(sources, targets)
    buffers[0]._check_slots(sources)
    sources, targets = sources.to(torch.int64), targets.to(torch.int64)
    for buffer in buffers:
        buffer.move_rows(sources, targets)


def _without_skipped(sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Replace skipped moves, keeping their number. This needs no synchronisation with the device.

    A skipped move repeats the first one that is not skipped. If there is none, it moves slot 0 to itself.
    """
    live = targets >= 0
    first = live.to(torch.uint8).argmax().view(1)
    target = targets.index_select(0, first)
    source = sources.index_select(0, first).masked_fill(target < 0, 0)
    return torch.where(live, sources, source), torch.where(live, targets, target.clamp(min=0))
