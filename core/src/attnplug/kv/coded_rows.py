"""Rows of one layer in a format with a codec: memory in parts, the codec's module, and kernels that write rows."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from attnplug.declare.errors import PluginError, PoolError, describe_error
from attnplug.declare.kv_format import KVFormat
from attnplug.kv.buffer import PagedBuffer, RowKernel, torch_dtype
from attnplug.kv.layout import LayoutName, PageLayout


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
            given = f"decode returned {read.dtype} {list(read.shape)}"
            raise PluginError(f"{given}; it must return float32 or bfloat16 {list(rows.shape)}")
        if not bool(read.isfinite().all()):
            raise PluginError("decode returned NaN or infinity for rows whose values are from -2 to 2")
    except Exception as error:
        raise PluginError(f"KV format {format.name!r} (codec {format.codec}): {describe_error(error)}") from error
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
        self.scale, self._row, self._blocks = scale, (self.layout.heads, width), None
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
        return cast("RowKernel | None", pkgutil.resolve_name(target)(parts, scale))
    except Exception as error:
        raise PluginError(f"KV format {format.name!r}: kernel {target}: {describe_error(error)}") from error
