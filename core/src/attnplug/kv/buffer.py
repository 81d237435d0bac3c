"""Memory of one layer's cache rows in any layout: writes, reads and copies.

Rows are in one dtype, or in a format with a codec: in parts, encoded by the codec's module or by a kernel.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from attnplug.declare.errors import PluginError, PoolError, describe_error
from attnplug.declare.kv_format import KVFormat
from attnplug.declare.problem import DType
from attnplug.kv.layout import LayoutName, PageLayout

_FEW_SLOTS = 64
"""Up to this many slots, min and max of a list are faster than torch's: 3 µs instead of 8, in every layer of a step."""


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a ``DType``, or of a part of a row: ``torch_dtype("bfloat16")``."""
    return cast("torch.dtype", getattr(torch, dtype))


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
            given = f"{name} of shape {list(rows.shape)} cannot be written to slots of shape {list(slots.shape)}"
            raise PoolError(f"{given}; give [tokens, {self._row[0]}, {self._row[1]}] and [tokens]")

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
        given = f"from slots of shape {list(sources.shape)} to slots of shape {list(targets.shape)}"
        raise PoolError(f"rows cannot be moved {given}; give [n] and [n]")
    buffers[0]._check_device(sources)
    padded = buffers[0]._check_slots(targets, padding=True)
    if not targets.numel():
        return
    if padded:
        # A skipped move repeats the first one that is not skipped. If there is none, it moves slot 0 to itself. This
        # keeps the number of moves, and needs no synchronisation with the device.
        live = targets >= 0
        first = live.to(torch.uint8).argmax().view(1)
        target = targets.index_select(0, first)
        source = sources.index_select(0, first).masked_fill(target < 0, 0)
        sources, targets = torch.where(live, sources, source), torch.where(live, targets, target.clamp(min=0))
    buffers[0]._check_slots(sources)
    sources, targets = sources.to(torch.int64), targets.to(torch.int64)
    for buffer in buffers:
        buffer.move_rows(sources, targets)


@lru_cache
def load_codec(format: KVFormat, width: int) -> ModuleType:
    """Import a format's codec and run it once on rows of ``width`` values, all of them encoded.

    Raises PluginError in one line if it cannot be imported, or contradicts the declaration.
    """
    assert format.codec is not None
    rows = torch.linspace(-2, 2, 6 * width).view(3, 2, width).roll(1, -1)
    rows[1, 0] = 0.0
    wanted = [f"{part.dtype} {[3, 2, part.elements(width)]}" for part in format.parts]
    try:
        codec = importlib.import_module(format.codec)
        parts = codec.encode(rows)
        if (found := [f"{part.dtype} {list(part.shape)}".removeprefix("torch.") for part in parts]) != wanted:
            raise PluginError(f"encode returned {', '.join(found)}; the parts of these rows are {', '.join(wanted)}")
        read = codec.decode(parts)
        if read.shape != rows.shape or read.dtype not in (torch.float32, torch.bfloat16):
            raise PluginError(f"decode returned {read.dtype} {[*read.shape]}; give float32 or bfloat16 {[*rows.shape]}")
        if bool(read.isfinite().logical_not().any()):
            raise PluginError("decode returned NaN or infinity for rows whose values are from -2 to 2")
    except (Exception, SystemExit) as error:
        raise PluginError(f"KV format {format}: {format.codec}: {describe_error(error).splitlines()[0]}") from error
    return codec


class CodedRows(PagedBuffer):
    """Rows of ``width`` values per head, over memory ``[pages, page_size, heads, row_width]`` of any strides.

    The last ``rope`` values are rotary columns. ``scale`` is the layer's, for formats that have one. ``views`` of the
    parts, ``[pages, page_size, heads, elements]``, are given if they do not follow one another in each row.
    """

    def __init__(
        self,
        pages: Tensor,
        format: KVFormat,
        width: int,
        rope: int = 0,
        scale: float = 1.0,
        views: tuple[Tensor, ...] | None = None,
    ) -> None:
        super().__init__(pages)
        if not (math.isfinite(scale) and scale > 0):
            raise PoolError(f"a cache scale of {scale} cannot be divided by; give a finite number above 0")
        self.scale, self._row = scale, (self.layout.heads, width)
        self._rope = 0 if format.rope is None else rope
        self._coded = width - self._rope
        self._codec, self._scaled = load_codec(format, self._coded), format.layer_scale
        views = views or part_views(pages, format, width, rope)
        self._parts = tuple(map(PagedBuffer, views))
        # A tensor: on a GPU torch divides by a Python number by multiplying with its inverse, which rounds twice.
        self._divisor = torch.tensor(scale, dtype=torch.float32, device=pages.device)
        self.kernel = format_kernel(format, views, scale, pages.device.type)

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        return self._parts

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Encode and store ``rows`` ``[tokens, heads, width]``; see ``PagedBuffer.write``."""
        if self.kernel is not None:
            self.kernel.write(slots, rows)
            return
        coded, *rope = rows.split((self._coded, self._rope), -1) if self._rope else (rows,)
        parts = self._codec.encode(coded.to(torch.float32) / self._divisor if self._scaled else coded)
        for buffer, cells in zip(self._parts, (*parts, *rope), strict=True):
            buffer.write(slots, cells, padded=padded)

    def read(self, slots: Tensor) -> Tensor:
        """Return rows ``[*slots.shape, heads, width]`` in float32 or bfloat16, as the codec does."""
        cells = [part.read(slots) for part in self._parts]
        rope = cells.pop() if self._rope else None
        if slots.dim() == 1:
            rows: Tensor = self._codec.decode(cells)
        else:
            rows = self._codec.decode([part.reshape(-1, *part.shape[-2:]) for part in cells])
            rows = rows.view(*slots.shape, *rows.shape[1:])
        if self._scaled:
            rows = rows.to(torch.float32).mul_(self.scale)
        return rows if rope is None else torch.cat((rows, rope.to(rows.dtype)), -1)


def part_views(pages: Tensor, format: KVFormat, width: int, rope: int = 0) -> tuple[Tensor, ...]:
    """Return views ``[pages, page_size, heads, elements]`` of the parts of rows in ``pages``."""
    if not format.in_bytes:
        return (pages,)
    return tuple(pages[..., start:end].view(torch_dtype(dtype)) for dtype, start, end in format.placed(width, rope))


def separate_views(
    memory: Tensor, place: PageLayout, layout: LayoutName, format: KVFormat, width: int
) -> tuple[Tensor, ...]:
    """Return views like ``part_views`` of memory in which each part is contiguous over all rows.

    Kernels then load 16 bytes at a time: fp8 rows of 128 values and a scale have 132. Parts other than the first, e.g.
    scales, are head-major: those of a page and head are contiguous.
    """
    pages, page_size, heads, _ = place.shape
    rows, views = pages * page_size * heads, []
    for number, (dtype, start, end) in enumerate(format.placed(width)):
        part = memory[rows * start : rows * end].view(torch_dtype(dtype))
        order: LayoutName = "head_major" if number else layout
        views.append(PageLayout.named(order, pages, page_size, heads, part.numel() // rows).view(part))
    return tuple(views)


def format_kernel(format: KVFormat, parts: Sequence[Tensor], scale: float, device_type: str) -> RowKernel | None:
    """Return the format's kernel that writes rows on this type of device; ``None`` if its codec has to."""
    if (target := format.kernels.get(device_type)) is None:
        return None
    try:
        kernel: RowKernel | None = pkgutil.resolve_name(target)(parts, scale)
        if kernel is not None and (isinstance(kernel, type) or not callable(getattr(kernel, "write", None))):
            raise PluginError(f"it returned {kernel!r}; return None, or an object with write(slots, rows)")
    except (Exception, SystemExit) as error:
        raise PluginError(f"KV format {format}: kernel {target}: {describe_error(error).splitlines()[0]}") from error
    return kernel
