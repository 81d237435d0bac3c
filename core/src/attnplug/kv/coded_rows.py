"""Rows of one layer in a format with a codec: memory in parts, the codec's module, and kernels that write rows."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from attnplug.declare.errors import PluginError, PoolError, describe_error
from attnplug.declare.kv_format import KVFormat
from attnplug.kv.buffer import PagedBuffer, RowKernel, check_shapes, torch_dtype
from attnplug.kv.layout import PageLayout


class Codec(Protocol):
    """Module of a format's reference code; see ``KVFormat.codec``."""

    def encode(self, rows: Tensor, /) -> Sequence[Tensor]: ...
    def decode(self, parts: Sequence[Tensor], /) -> Tensor: ...


@lru_cache
def load_codec(format: KVFormat, width: int) -> Codec:
    """Import a format's codec and run it once on rows of ``width`` values, all of them encoded.

    Raises PluginError in one line if it cannot be imported, or contradicts the declaration.
    """
    assert format.codec is not None
    rows = torch.linspace(-2, 2, 3 * 2 * width).view(3, 2, width).roll(1, -1)
    rows[1, 0] = 0.0
    wanted = [((3, 2, part.elements(width)), torch_dtype(part.dtype)) for part in format.parts]
    what = f"KV format {format.name!r} (codec {format.codec})"
    try:
        codec = cast("Codec", importlib.import_module(format.codec))
        parts = codec.encode(rows)
        found = [(tuple(part.shape), part.dtype) for part in parts]
        read = codec.decode(parts) if found == wanted else None
    except Exception as error:
        raise PluginError(f"{what}: {describe_error(error)}") from error
    if read is None:
        raise PluginError(f"{what}: encode returned {_listed(found)} for its parts, which are {_listed(wanted)}")
    if read.shape != rows.shape or read.dtype not in (torch.float32, torch.bfloat16):
        raise PluginError(
            f"{what}: decode returned {read.dtype} of shape {list(read.shape)}; it must return rows of shape "
            f"{list(rows.shape)} in float32 or bfloat16"
        )
    if not bool(read.isfinite().all()):
        raise PluginError(f"{what}: decode returned NaN or infinity for rows whose values are from -2 to 2")
    return codec


def _listed(parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} of shape {list(shape)}" for shape, dtype in parts) or "nothing"


class CodedRows:
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
        if not (math.isfinite(scale) and scale > 0):
            raise PoolError(f"a cache scale of {scale} cannot be divided by; give a finite number above 0")
        self.pages, self.layout, self.scale = pages, PageLayout.of(pages), scale
        self.nbytes = pages.numel() * pages.element_size()
        self._coded = width - rope if format.rope is not None else width
        self._codec, self._scaled = load_codec(format, self._coded), format.layer_scale
        views = views or part_views(pages, format, width, rope)
        self.parts = tuple(map(PagedBuffer, views))
        self._row = self.layout.heads, width
        # A tensor: on a GPU torch divides by a Python number by multiplying with its inverse, which rounds twice.
        self._divisor = torch.tensor(scale, dtype=torch.float32, device=pages.device)
        self.kernel = format_kernel(format, views, scale, pages.device.type)

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None:
        """See ``PagedBuffer.check_rows``."""
        check_shapes(slots, rows, self._row, name)

    def check_targets(self, slots: Tensor) -> bool:
        """See ``PagedBuffer.check_targets``."""
        return self.parts[0].check_targets(slots)

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Encode and store ``rows`` ``[tokens, heads, width]``; see ``PagedBuffer.write``."""
        if self.kernel is not None:
            self.kernel.write(slots, rows)
            return
        coded = rows[..., : self._coded]
        parts = self._codec.encode(coded.to(torch.float32) / self._divisor if self._scaled else coded)
        for buffer, cells in zip(self.parts, (*parts, rows[..., self._coded :]), strict=False):
            buffer.write(slots, cells, padded=padded)

    def read(self, slots: Tensor) -> Tensor:
        """Return rows ``[*slots.shape, heads, width]`` in float32 or bfloat16, as the codec does."""
        cells = [part.read(slots) for part in self.parts]
        rope = cells.pop() if self._coded < self._row[1] else None
        rows = self._codec.decode([part.reshape(-1, *part.shape[-2:]) for part in cells])
        rows = rows.view(*slots.shape, *rows.shape[1:])
        if self._scaled:
            rows = rows.to(torch.float32).mul_(self.scale)
        return rows if rope is None else torch.cat((rows, rope.to(rows.dtype)), -1)

    def read_blocks(self, blocks: Tensor, blank: Tensor | None) -> None:
        """Return ``None``: blocks are read as stored."""


def part_views(pages: Tensor, format: KVFormat, width: int, rope: int = 0) -> tuple[Tensor, ...]:
    """Return views ``[pages, page_size, heads, elements]`` of the parts of rows in ``pages``."""
    if not format.in_bytes:
        return (pages,)
    return tuple(pages[..., start:end].view(torch_dtype(dtype)) for dtype, start, end in format.placed(width, rope))


def format_kernel(format: KVFormat, parts: Sequence[Tensor], scale: float, device_type: str) -> RowKernel | None:
    """Return the format's kernel that writes rows on this type of device; ``None`` if its codec has to."""
    if (target := format.kernels.get(device_type)) is None:
        return None
    try:
        return cast("RowKernel | None", pkgutil.resolve_name(target)(parts, scale))
    except Exception as error:
        raise PluginError(f"KV format {format.name!r}: kernel {target}: {describe_error(error)}") from error
