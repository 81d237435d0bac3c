"""Memory layout of a layer's cache rows, as data: a shape in logical order, and strides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError

LayoutName = Literal["token_major", "head_major"]
"""Layouts that pools can be built with. Kernels call them NHD and HND."""
_NAMES: tuple[LayoutName, ...] = ("token_major", "head_major")


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Physical layout of one layer's keys, values or latent rows.

    ``shape`` is ``(pages, page_size, heads, dim)``, whatever the order in memory. ``strides`` are in elements, for the
    same four dimensions. No two elements may overlap.
    """

    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if len(self.shape) != 4 or len(self.strides) != 4:
            raise PoolError(f"shape {self.shape} and strides {self.strides}: give four of each")
        if min(self.shape) < 1:
            raise PoolError(f"layout {self.shape}: pages, page_size, heads and dim must all be 1 or more")
        span = 1
        for stride, size in sorted((stride, size) for stride, size in zip(self.strides, self.shape, strict=True)):
            if size == 1:
                continue
            if stride < span:
                raise PoolError(f"strides {self.strides} make elements of the shape {self.shape} overlap")
            span = stride * (size - 1) + span

    @classmethod
    def of(cls, pages: Tensor) -> PageLayout:
        """Return the layout of a tensor ``[pages, page_size, heads, dim]`` with any strides."""
        if pages.dim() != 4:
            raise PoolError(f"pages of shape {list(pages.shape)}: give [pages, page_size, heads, dim]")
        (a, b, c, d), (e, f, g, h) = pages.shape, pages.stride()
        return cls((a, b, c, d), (e, f, g, h))

    @classmethod
    def named(cls, name: LayoutName, num_pages: int, page_size: int, heads: int, dim: int) -> PageLayout:
        """Return a layout without gaps.

        From slow to fast, ``token_major`` has page, token, head, dim, and ``head_major`` page, head, token, dim.
        """
        strides = {"token_major": (heads * dim, dim), "head_major": (dim, page_size * dim)}
        if name not in strides:
            raise PoolError(f"{name!r} is not a cache layout; use token_major or head_major")
        return cls((num_pages, page_size, heads, dim), (page_size * heads * dim, *strides[name], 1))

    @property
    def name(self) -> LayoutName | Literal["strided"]:
        """``token_major`` or ``head_major`` if the memory has this order without gaps, else ``strided``.

        With one head the first two are equal, and the name is ``token_major``.
        """
        for name in _NAMES:
            strides = zip(self.shape, self.strides, PageLayout.named(name, *self.shape).strides, strict=True)
            if all(size == 1 or own == other for size, own, other in strides):
                return name
        return "strided"

    @property
    def num_pages(self) -> int:
        return self.shape[0]

    @property
    def page_size(self) -> int:
        return self.shape[1]

    @property
    def heads(self) -> int:
        return self.shape[2]

    @property
    def dim(self) -> int:
        return self.shape[3]

    @property
    def elements(self) -> int:
        """Number of elements that a buffer needs, including gaps."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def tokens_evenly_spaced(self) -> bool:
        """True if consecutive tokens have the same distance everywhere, also across page boundaries.

        The cache can then be divided into smaller pages, and can be indexed by flat slot.
        """
        return 1 in self.shape[:2] or self.strides[0] == self.page_size * self.strides[1]

    def view(self, buffer: Tensor) -> Tensor:
        """View a one-dimensional contiguous ``buffer`` as ``[pages, page_size, heads, dim]``."""
        if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() < self.elements:
            raise PoolError(
                f"a buffer of shape {list(buffer.shape)} cannot hold the layout {self.shape}; "
                f"give a contiguous one-dimensional buffer of {self.elements} elements or more"
            )
        return buffer.as_strided(self.shape, self.strides)

    def split(self, kernel_page_size: int) -> PageLayout:
        """Return the same memory's layout with smaller pages: page p becomes pages p * ratio … p * ratio + ratio - 1.

        ``ratio`` is ``page_size / kernel_page_size``. ``split_table`` converts a page table accordingly.
        """
        if kernel_page_size == self.page_size:
            return self
        if kernel_page_size < 1 or self.page_size % kernel_page_size:
            raise PoolError(
                f"pages of {self.page_size} tokens cannot be split into kernel pages of {kernel_page_size}; "
                f"use a `page_size` that is a multiple of the kernel's",
                settings=["page_size"],
            )
        if not self.tokens_evenly_spaced:
            raise PoolError(
                f"pages of {self.page_size} tokens cannot be seen as kernel pages of {kernel_page_size}: with "
                f"shape {self.shape} and strides {self.strides} kernel pages would not be evenly spaced; "
                f"use the token_major layout or a `page_size` of {kernel_page_size}",
                settings=["page_size"],
            )
        pages = self.num_pages * (self.page_size // kernel_page_size)
        _, token_stride, head_stride, dim_stride = self.strides
        return PageLayout(
            (pages, kernel_page_size, self.heads, self.dim),
            (kernel_page_size * token_stride, token_stride, head_stride, dim_stride),
        )


def split_table(page_table: Tensor, ratio: int) -> Tensor:
    """Convert a page table to kernel pages: ``[requests, pages]`` → ``[requests, pages * ratio]``, same integer dtype.

    Negative entries mark unused pages and become -1. Does not synchronise with the device.
    """
    if ratio < 1 or page_table.dim() != 2:
        raise PoolError(
            f"a page table of shape {list(page_table.shape)} cannot be split by {ratio}; "
            "give [requests, pages] and a ratio of 1 or more"
        )
    first = page_table.unsqueeze(2) * ratio
    kernel_pages = first + torch.arange(ratio, dtype=page_table.dtype, device=page_table.device)
    return kernel_pages.masked_fill_(first < 0, -1).flatten(1)
