"""Views of a host's cache tensors as pages: parsing of dimension names, and checks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnplug.declare.errors import PoolError

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
    dims = _parse(layout, with_heads=heads > 1, with_kv=len(widths) > 1)
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
                _check_size(size, names_here, sizes, tensor, layout, what)
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


def _parse(layout: str, *, with_heads: bool, with_kv: bool) -> list[tuple[str, ...]]:
    written = layout.replace("slots", "(pages tokens)")
    dims = [tuple((joined or single).split()) for joined, single in re.findall(r"\(([^()]*)\)|(\S+)", written)]
    names = [name for joined in dims for name in joined]
    missing = {"pages", "tokens", "dim", *(["heads"] if with_heads else [])} - set(names)
    if len(set(names)) < len(names) or missing or set(names) - {"kv", *_ROW}:
        raise PoolError(f"{layout!r} does not describe a cache tensor; {_GRAMMAR}")
    if with_kv != ("kv" in names):
        have = "one tensor is given for keys and values" if with_kv else "the tensor holds one row per token"
        raise PoolError(f"{layout!r} {'lacks' if with_kv else 'has'} kv, but {have}; {_GRAMMAR}")
    return dims


def _check_size(
    size: int, names: tuple[str, ...], sizes: Mapping[str, int], tensor: Tensor, layout: str, what: str
) -> None:
    wanted, shown = math.prod(sizes.get(name, 1) for name in names), " × ".join(names)
    if "pages" not in names:
        _check(size == wanted, tensor, layout, what, f"{shown} is {size}, not {wanted}")
    else:
        multiple = f", not a multiple of {wanted}" if size else ""
        _check(size > 0 and size % wanted == 0, tensor, layout, what, f"{shown} is {size}{multiple}")


def _check(fits: bool, tensor: Tensor, layout: str, what: str, difference: str) -> None:
    if not fits:
        raise PoolError(f"{what} of shape {list(tensor.shape)} is not {layout!r} for this layer: {difference}")


def foreign_pages(pages: Tensor, stored: torch.dtype, format: str, what: str) -> Tensor:
    """View a host's memory in the dtype that a cache in ``format`` stores. A dtype of one byte may come as another."""
    if pages.dtype != stored and (pages.element_size() > 1 or stored.itemsize > 1):
        raise PoolError(f"{what} of type {pages.dtype} cannot be a cache in {format}; give {stored}")
    return pages.view(stored)


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
