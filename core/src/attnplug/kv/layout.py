"""Memory layout of a layer's cache rows, as data: a shape in logical order, and strides.

Views of a host's cache tensors as pages, by the names of their dimensions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
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


_ROW = ("pages", "tokens", "heads", "dim")
_GRAMMAR = (
    "name the tensor's dimensions from slow to fast: pages, tokens, heads and dim, and kv if keys and values are in "
    "one tensor; a dimension that joins several is in parentheses, and slots means (pages tokens); for example "
    "'kv pages tokens heads dim', 'pages heads tokens (kv dim)' or 'slots heads dim'"
)


def page_views(
    tensor: Tensor, layout: str, page_size: int, heads: int, widths: Sequence[int], what: str
) -> list[Tensor]:
    """Return a view ``[pages, page_size, heads, width]`` of a host's tensor for each of ``widths``, without a copy.

    ``layout`` names the tensor's dimensions. Two widths are those of keys and values, and the names must then include
    ``kv``. ``(kv dim)`` is a row of keys followed by values, which may differ in width. ``heads`` may be omitted if
    there is only one. ``what`` is the tensor's name in messages.
    """
    written, with_kv = layout.replace("slots", "(pages tokens)"), len(widths) > 1
    dims = [tuple((joined or single).split()) for joined, single in re.findall(r"\(([^()]*)\)|(\S+)", written)]
    named = [name for joined in dims for name in joined]
    missing = {"pages", "tokens", "dim", *(["heads"] if heads > 1 else [])} - set(named)
    if len(set(named)) < len(named) or missing or set(named) - {"kv", *_ROW}:
        raise PoolError(f"{layout!r} does not describe a cache tensor; {_GRAMMAR}")
    if with_kv != ("kv" in named):
        have = "one tensor is given for keys and values" if with_kv else "the tensor holds one row per token"
        raise PoolError(f"{layout!r} {'lacks' if with_kv else 'has'} kv, but {have}; {_GRAMMAR}")
    if tensor.dim() != len(dims):
        raise PoolError(
            f"{what} of shape {list(tensor.shape)} is not {layout!r}: it has {tensor.dim()} dimensions, not {len(dims)}"
        )
    views = []
    for part, width in enumerate(widths):
        sizes = {"kv": len(widths), "tokens": page_size, "heads": heads, "dim": width}
        view, names = tensor, list[str]()
        for names_here, size in zip(dims, tensor.shape, strict=True):
            place = len(names)
            if names_here == ("kv", "dim"):
                _check(size == sum(widths), tensor, layout, what, f"(kv dim) is {size}, not {sum(widths)}")
                view, names_here = view.narrow(place, sum(widths[:part]), width), ("dim",)
            else:
                wanted, shown = math.prod(sizes.get(name, 1) for name in names_here), " × ".join(names_here)
                if "pages" not in names_here:
                    _check(size == wanted, tensor, layout, what, f"{shown} is {size}, not {wanted}")
                else:
                    multiple = f", not a multiple of {wanted}" if size else ""
                    _check(size > 0 and size % wanted == 0, tensor, layout, what, f"{shown} is {size}{multiple}")
                view = view.unflatten(place, [sizes.get(name, -1) for name in names_here])
            names += names_here
        if "kv" in names:
            view = view.select(names.index("kv"), part)
            names.remove("kv")
        if "heads" not in names:
            # In front of dim, as with several heads: a tensor map cannot have a stride of one element for heads.
            place = names.index("dim")
            view = view.unsqueeze(place)
            names.insert(place, "heads")
        views.append(view.permute([names.index(name) for name in _ROW]))
    return views


def _check(fits: bool, tensor: Tensor, layout: str, what: str, difference: str) -> None:
    if not fits:
        raise PoolError(f"{what} of shape {list(tensor.shape)} is not {layout!r} for this layer: {difference}")


def check_together(pages: Mapping[str, Tensor]) -> None:
    """Raise PoolError for caches, by their names in messages, that differ in pages or device, or that overlap."""
    held = list(pages.items())
    first, one = held[0]
    for name, other in held[1:]:
        for what, here, there in (("pages", one.shape[0], other.shape[0]), ("device", one.device, other.device)):
            if here != there:
                raise PoolError(f"{first} and {name} differ in {what}: {here} and {there}; one pool has one page table")
    for index, (name, cache) in enumerate(held):
        for other_name, other in held[:index]:
            # Address ranges may interleave, like those of keys and values.
            if np.shares_memory(_addresses(other), _addresses(cache)):
                raise PoolError(f"{other_name} and {name} overlap in memory; give each its own")


def _addresses(tensor: Tensor) -> NDArray[np.void]:
    """Return the addresses of a tensor as an array. They may be a GPU's, and its elements are never read."""
    width = tensor.element_size()
    interface = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": f"|V{width}",
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * width for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
