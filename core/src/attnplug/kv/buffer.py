"""The memory of one layer's cache rows: plain writes and reads, whatever the storage type, scale and layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.problem import DType
from attnplug.kv.layout import PageLayout
from attnplug.kv.page_copy import PageCopy, settle_copies

_TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT8_E4M3: torch.float8_e4m3fn,
    DType.FP8_DS_MLA: torch.uint8,
}

_FLOAT8_MAX = 448.0


_FEW_SLOTS = 64
"""Up to so many slots a list finds their bounds sooner than torch does: 3 µs instead of 8, in every layer of a step."""


BLOCK = 4
"""Rows that :meth:`PagedBuffer.read_blocks` reads at once. More gain little: a row of 1 KB costs a third less so."""


class RowKernel(Protocol):
    """Writes rows ``[tokens, heads, dim]`` by one launch."""

    def write(self, slots: Tensor, rows: Tensor) -> None: ...


class PairKernel(Protocol):
    """Writes keys and values at once; see ``pair_kernel``."""

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None: ...


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's name for ``dtype``: that of its memory, if a row has several types."""
    return _TORCH_DTYPES[dtype]


class PagedBuffer:
    """Rows ``[heads, dim]`` at flat slots ``page * page_size + offset``.

    ``pages`` is the memory, ``[pages, page_size, heads, dim]`` of any strides, which kernels read. It keeps its address
    and its content: only ``allocate`` makes memory that is zero until written. In fp8 a row is stored as
    ``row / scale``, saturated at ±448 (a NaN stays one), and read back as float32. Other types store what is written,
    rounded, and have the scale 1.
    """

    def __init__(self, pages: Tensor, scale: float = 1.0) -> None:
        self._float8 = pages.dtype == torch.float8_e4m3fn
        if not (math.isfinite(scale) and scale > 0):
            raise PoolError(f"a cache scale of {scale} cannot be divided by; give a finite number above 0")
        if scale != 1.0 and not self._float8:
            shown = str(pages.dtype).removeprefix("torch.")
            raise PoolError(f"a cache in {shown} takes no scale, {scale} was given; leave it out or use fp8")
        self.layout = layout = PageLayout.of(pages)
        self.scale = scale
        self.pages = pages
        self.nbytes = pages.numel() * pages.element_size()
        # torch has no index operations for float8 on the CPU, so these go through the bytes.
        self._cells = pages.view(torch.uint8) if self._float8 else pages
        # index_copy_ and index_select by flat slot are much faster than indexing by (page, offset).
        self._flat = self._cells.view(-1, layout.heads, layout.dim) if layout.tokens_evenly_spaced else None
        self._blocks: Tensor | None = None
        if self._flat is not None and self._flat.is_contiguous() and not self._float8 and not layout.page_size % BLOCK:
            self._blocks = self._flat.view(-1, BLOCK * layout.heads * layout.dim)
        self._device, self._on_host = pages.device, pages.is_cpu
        self._slots, self._row = layout.num_pages * layout.page_size, (layout.heads, layout.dim)
        # As a tensor: by a number torch divides on a GPU as it multiplies with its inverse, which rounds twice.
        self._divisor = torch.tensor(scale, dtype=torch.float32, device=pages.device)
        self.kernel = _row_kernel(pages, layout, scale)
        """What writes rows by one launch, where there is such."""

    @classmethod
    def allocate(
        cls, layout: PageLayout, *, dtype: DType, device: torch.device | str, scale: float = 1.0
    ) -> PagedBuffer:
        """A buffer over new memory, zero until written."""
        return cls(layout.view(torch.zeros(layout.elements, dtype=torch_dtype(dtype), device=device)), scale)

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        """What is moved to move a row."""
        return (self,)

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None:
        """Refuse rows whose shape ``write`` cannot store, before anything is written."""
        if slots.dim() != 1 or rows.shape != (slots.shape[0], *self._row):
            raise PoolError(
                f"{name} of shape {list(rows.shape)} cannot be written to slots of shape {list(slots.shape)}; "
                f"give [tokens, {self.layout.heads}, {self.layout.dim}] and [tokens]"
            )

    def check_targets(self, slots: Tensor) -> bool:
        """Refuse slots that ``write`` cannot store to, before anything is written.

        Returns whether some of the rows may be padding; only a CPU can tell without waiting.
        """
        return self._check_slots(slots, padding=True)

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Store ``rows`` ``[tokens, heads, dim]`` at ``slots`` ``[tokens]``, but not where a slot is -1.

        Call both checks first: ``padded`` is what ``check_targets`` returned. Waits for no device and can be captured:
        which rows are padding is looked up when it runs. A slot past the pool's last is found by the check on a CPU;
        on a GPU nothing outside of the pool is written for it.
        """
        if self.kernel is not None:
            self.kernel.write(slots, rows)
            return
        # torch takes microseconds to find that there is nothing to convert, twice in every layer.
        if slots.dtype is not torch.int64:
            slots = slots.to(torch.int64)
        cells = rows if rows.dtype is self._cells.dtype and not self._float8 else self._encode(rows)
        if padded and slots.numel():
            slots, cells = self._without_padding(slots, cells)
        self._scatter(slots, cells)

    def _scatter(self, slots: Tensor, cells: Tensor) -> None:
        if self._flat is not None:
            self._flat.index_copy_(0, slots, cells)
        else:
            self._cells[self._page_and_offset(slots)] = cells

    def _without_padding(self, slots: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """As many slots and cells, none of them padding: then no number has to come back from the device.

        Padding repeats the write of the first other row. If there is none, it leaves slot 0 as it is.
        """
        live = slots >= 0
        first = live.to(torch.uint8).argmax().view(1)
        exists = live.index_select(0, first)
        target = slots.index_select(0, first).clamp(min=0)
        there = self._cells[self._page_and_offset(target)]
        cell = torch.where(exists.view(1, 1, 1), cells.index_select(0, first), there)
        return torch.where(live, slots, target), torch.where(live.view(-1, 1, 1), cells, cell)

    def read(self, slots: Tensor) -> Tensor:
        """Rows ``[*slots.shape, heads, dim]`` in the stored type, or float32 when that is fp8."""
        self._check_device(slots)
        if self._flat is not None:
            try:
                rows = self._flat.index_select(0, slots.reshape(-1))
            except IndexError:
                self._check_slots(slots)  # only now: on the hot path index_select's own look is enough
                raise
            cells = rows.view(*slots.shape, *self._row)
        else:
            self._check_slots(slots)
            cells = self._cells[self._page_and_offset(slots)]
        return cells.view(torch.float8_e4m3fn).to(torch.float32).mul_(self.scale) if self._float8 else cells

    def read_blocks(self, blocks: Tensor, blank: Tensor | None) -> Tensor | None:
        """Rows ``[requests, count * BLOCK, heads, dim]`` as stored, of blocks ``[requests, count]``.

        Block ``i`` is slots ``BLOCK * i … BLOCK * i + 3``. Rows ``blank``, counted over all requests, are zero instead.
        ``None`` where ``read`` has to do it: in fp8, where rows lie apart, or where a block is outside of the pool,
        which ``read`` then says.
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
        """Copy whole pages, all at once; ``targets`` are distinct."""
        self._cells.index_copy_(0, targets, self._cells.index_select(0, sources))

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows between slots of this pool, all at once and as stored. Equal targets have equal sources."""
        if self._flat is not None:
            self._scatter(targets, self._flat.index_select(0, sources))
        else:
            self._scatter(targets, self._cells[self._page_and_offset(sources)])

    def _encode(self, rows: Tensor) -> Tensor:
        if not self._float8:
            return rows.to(self.pages.dtype)
        # torch's own cast turns overflow into NaN before pytorch/pytorch#178817 (CPU) and saturates after it.
        saturated = (rows.to(torch.float32) / self._divisor).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX)
        return saturated.to(torch.float8_e4m3fn).view(torch.uint8)

    def _page_and_offset(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        slots = slots.to(torch.int64)
        page = slots.div(self.layout.page_size, rounding_mode="floor")
        # Indexing counts negative numbers from the end, so slot -1 would read the last page; past the end it
        # is caught on the device, as index_copy_ would.
        return page.masked_fill_(slots < 0, self.layout.num_pages), slots.remainder(self.layout.page_size)

    def _check_device(self, slots: Tensor) -> None:
        if not (self._on_host and slots.is_cpu) and slots.device != self._device:  # devices take longer to compare
            raise PoolError(f"slots on {slots.device} cannot index a cache on {self._device}; move them there")

    def _check_slots(self, slots: Tensor, *, padding: bool = False) -> bool:
        """Refuse slots outside of the pool, except -1 if there may be ``padding``; returns whether there may be."""
        self._check_device(slots)
        if not self._on_host:
            return padding  # to look would be to wait for the device, which minds the bounds itself
        count = slots.numel()
        if not count:
            return False
        bounds: list[int] = (slots.flatten() if count <= _FEW_SLOTS else torch.stack(slots.aminmax())).tolist()
        low, high = min(bounds), max(bounds)
        if low < -padding or high >= self._slots:
            unless = ", and -1 for padding" if padding else ""
            raise PoolError(f"slots {low} to {high} were asked for, and the cache holds 0 to {self._slots - 1}{unless}")
        return low < 0


def _row_kernel(pages: Tensor, layout: PageLayout, scale: float) -> RowKernel | None:
    """One kernel that writes rows, where there is a GPU that Triton knows; None where torch's operations do it."""
    if pages.device.type != "cuda":
        return None
    if pages.element_size() == 1 and torch.cuda.get_device_capability(pages.device) < (8, 9):
        return None  # Triton does not convert to this type there
    try:
        from attnplug.kv.triton_rows import RowWriter
    except ImportError:
        return None
    writer: RowKernel = RowWriter(pages, layout, scale)
    return writer


def pair_kernel(keys: PagedBuffer, values: PagedBuffer) -> PairKernel | None:
    """One kernel that writes rows of keys and values, where one writes each."""
    if keys.kernel is None or values.kernel is None:
        return None
    from attnplug.kv.triton_rows import PairWriter, RowWriter

    assert isinstance(keys.kernel, RowWriter) and isinstance(values.kernel, RowWriter)
    return PairWriter(keys.kernel, values.kernel)


def copy_pages(buffers: Iterable[PagedBuffer], copies: Sequence[PageCopy]) -> None:
    """Make ``copies`` in each of ``buffers``, as if one after another, with one indexed operation per buffer."""
    buffers = tuple(buffers)
    if not copies or not buffers:
        return
    limit = min(buffer.layout.num_pages for buffer in buffers)
    outside = sorted({page for copy in copies for page in (copy.source, copy.target) if not 0 <= page < limit})
    if outside:
        raise PoolError(f"pages {outside} cannot be copied: the pool holds pages 0 to {limit - 1}")
    sources, targets = (torch.tensor(pages, dtype=torch.int64) for pages in settle_copies(copies))
    device = buffers[0].pages.device
    sources, targets = sources.to(device), targets.to(device)
    for buffer in buffers:
        buffer.move_pages(sources, targets)


def move_rows(buffers: Iterable[PagedBuffer], sources: Tensor, targets: Tensor) -> None:
    """Copy rows in each of ``buffers``, which hold the same slots on one device; see ``KVPools.move_rows``."""
    buffers = tuple(buffers)
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
    """As many moves, none of them skipped: then no number has to come back from the device.

    A skipped move repeats the first one that is not skipped. If there is none, it moves slot 0 to itself.
    """
    live = targets >= 0
    first = live.to(torch.uint8).argmax().view(1)
    target = targets.index_select(0, first)
    source = sources.index_select(0, first).masked_fill(target < 0, 0)
    return torch.where(live, sources, source), torch.where(live, targets, target.clamp(min=0))
