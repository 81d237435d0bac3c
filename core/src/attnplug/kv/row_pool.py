"""Base classes of pools with pages, and of those that hold one row per token and layer; checks shared by all pools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.kv_format import KVFormat, as_format
from attnplug.declare.model import LayerSpec
from attnplug.kv.buffer import PageCopy, PagedBuffer, copy_pages, move_rows, torch_dtype
from attnplug.kv.coded_rows import CodedRows, load_codec
from attnplug.kv.foreign import check_together, foreign_pages, page_views
from attnplug.kv.layout import LayoutName, PageLayout

T = TypeVar("T")


def held_for(held: Mapping[int, T], layer_id: int, kind: str) -> T:
    """Return a layer's entry: ``held_for(rows, 3, "MLA")``. Raises PoolError if the pool does not have the layer."""
    try:
        return held[layer_id]
    except KeyError:
        raise PoolError(f"the {kind} pool has no layer {layer_id}; it has {layer_list(held)}") from None


def distinct_layers(layers: Sequence[LayerSpec], kind: str) -> dict[int, LayerSpec]:
    """Return layers by id: ``distinct_layers(layers, "MHA")``. Raises PoolError for none, or if an id repeats."""
    by_id = {layer.layer_id: layer for layer in layers}
    if not by_id:
        raise PoolError(f"there is no {kind} layer to make a pool for; leave the {kind} pool out")
    if len(by_id) != len(layers):
        raise PoolError(f"layer ids repeat among {[layer.layer_id for layer in layers]}; give each layer its own")
    return by_id


def check_size(num_pages: int, page_size: int) -> None:
    """Raise PoolError for an empty pool: ``check_size(num_pages=0, page_size=16)``."""
    if num_pages < 1 or page_size < 1:
        raise PoolError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing; give 1 or more of each")


def layer_scales(scales: Mapping[int, T] | None, layers: Collection[int], default: T) -> dict[int, T]:
    """Return the scales of all layers. Raises PoolError for scales of layers that the pool does not have."""
    unknown = set(scales or ()) - set(layers)
    if unknown:
        raise PoolError(f"scales were given for layers {layer_list(unknown)}; the pool has {layer_list(layers)}")
    return dict.fromkeys(layers, default) | dict(scales or {})


def layer_list(layer_ids: Iterable[int]) -> str:
    """Format layer ids for messages."""
    return ", ".join(map(str, sorted(layer_ids)))


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Storage format of one layer's rows: ``heads`` times ``width`` elements of type ``stored`` per token.

    ``wrap`` wraps memory ``[pages, page_size, heads, width]``.
    """

    width: int
    stored: torch.dtype
    wrap: Callable[[Tensor], PagedBuffer]
    heads: int = 1

    @classmethod
    def of(cls, format: KVFormat | str, width: int, *, rope: int = 0, scale: float = 1.0, heads: int = 1) -> RowFormat:
        """Return the storage of rows of ``width`` values, the last ``rope`` of which are rotary columns.

        Raises PoolError for a scale that the format does not have, and PluginError for a codec that contradicts it.
        """
        format = as_format(format)
        if scale != 1.0 and not format.layer_scale:
            raise PoolError(f"a cache in {format.name} takes no scale per layer, {scale} was given; leave it out")
        if format.codec is None:
            return cls(width, torch_dtype(format.parts[0].dtype), PagedBuffer, heads)
        load_codec(format, width - rope if format.rope is not None else width)
        wrap = partial(CodedRows, format=format, width=width, rope=rope, scale=scale)
        stored = torch.uint8 if format.in_bytes else torch_dtype(format.parts[0].dtype)
        return cls(format.row_nbytes(width, rope) // stored.itemsize, stored, wrap, heads)


class PagedPool:
    """Base class of pools with pages. Each layer has rows of one or several ``contents``, e.g. keys and values."""

    kind: ClassVar[str]
    """Name of the pool in messages."""
    contents: ClassVar[tuple[str, ...]]
    """Names of the rows in messages, in the plural."""

    num_pages: int
    page_size: int
    nbytes: int
    dtype: str
    """Name of the format."""

    def _allocate(
        self,
        formats: Mapping[int, tuple[RowFormat, ...]],
        num_pages: int,
        page_size: int,
        dtype: KVFormat | str,
        device: torch.device | str,
        layout: LayoutName = "token_major",
        shared: bool = False,
    ) -> None:
        """Allocate zeroed memory by layer id. With ``shared``, all layers have the first one's."""
        check_size(num_pages, page_size)
        layers: dict[int, tuple[PagedBuffer, ...]] = {}
        for layer_id, forms in formats.items():
            if shared and layers:
                layers[layer_id] = next(iter(layers.values()))
                continue
            layouts = [PageLayout.named(layout, num_pages, page_size, form.heads, form.width) for form in forms]
            layers[layer_id] = tuple(
                form.wrap(place.view(torch.zeros(place.elements, dtype=form.stored, device=device)))
                for form, place in zip(forms, layouts, strict=True)
            )
        self._hold(layers, dtype)

    @classmethod
    def _over(
        cls,
        formats: Mapping[int, tuple[RowFormat, ...]],
        tensors: Mapping[int, Tensor | tuple[Tensor, ...]],
        layout: str,
        page_size: int,
        dtype: KVFormat | str,
    ) -> Self:
        """Make a pool over a host's tensors by layer id, without a copy: one tensor per layer, or one per content."""
        check_size(1, page_size)
        if set(tensors) != set(formats):
            given_ids, own_ids = layer_list(tensors), layer_list(formats)
            raise PoolError(f"tensors were given for layers {given_ids}; the {cls.kind} pool's layers are {own_ids}")
        layers: dict[int, tuple[PagedBuffer, ...]] = {}
        pages: dict[str, Tensor] = {}
        for layer_id, forms in formats.items():
            given, heads, widths = tensors[layer_id], forms[0].heads, [form.width for form in forms]
            names = [f"the {content} of layer {layer_id}" for content in cls.contents]
            if isinstance(given, Tensor):
                name = names[0] if len(names) == 1 else f"the cache of layer {layer_id}"
                views = page_views(given, layout, page_size, heads, widths, name)
            else:
                views = [
                    page_views(tensor, layout, page_size, heads, (width,), name)[0]
                    for tensor, width, name in zip(given, widths, names, strict=True)
                ]
            for name, form, view in zip(names, forms, views, strict=True):
                pages[name] = foreign_pages(view, form.stored, str(dtype), name)
            layers[layer_id] = tuple(form.wrap(pages[name]) for name, form in zip(names, forms, strict=True))
        check_together(pages)
        pool = cls.__new__(cls)
        pool._hold(layers, dtype)
        return pool

    def _hold(self, layers: Mapping[int, tuple[PagedBuffer, ...]], dtype: KVFormat | str) -> None:
        distinct = list({id(rows): rows for each in layers.values() for rows in each}.values())
        self._parts = tuple(part for rows in distinct for part in rows.parts)
        self.layer_ids = tuple(layers)
        self.nbytes = sum(rows.nbytes for rows in distinct)
        self.num_pages, self.page_size = distinct[0].layout.shape[:2]
        self.dtype = str(dtype)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._parts, copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer from slots to slots; see ``KVPools.move_rows``."""
        move_rows(self._parts, sources, targets)


class RowPool(PagedPool):
    """Rows of several layers, by layer id: per layer ``[pages, page_size, 1, width]``, zero until written.

    With ``shared``, all layers have the first one's memory. A subclass chooses the layers and their formats::

        class MeanKeyPool(RowPool):
            kind, contents = "mean key", ("mean keys",)

            def __init__(self, layers, **sizes):
                super().__init__({layer.layer_id: RowFormat.of(sizes["dtype"], 64) for layer in layers}, **sizes)
    """

    def __init__(
        self,
        formats: Mapping[int, RowFormat],
        *,
        num_pages: int,
        page_size: int,
        dtype: KVFormat | str,
        device: torch.device | str,
        shared: bool = False,
    ) -> None:
        forms = {layer_id: (form,) for layer_id, form in formats.items()}
        self._allocate(forms, num_pages, page_size, dtype, device, shared=shared)

    @classmethod
    def _over_host(
        cls,
        formats: Mapping[int, RowFormat],
        tensors: Mapping[int, Tensor],
        layout: str,
        page_size: int,
        dtype: KVFormat | str,
    ) -> Self:
        """Make a pool over a host's tensors by layer id, without a copy; ``layout`` names their dimensions."""
        return cls._over({layer_id: (form,) for layer_id, form in formats.items()}, tensors, layout, page_size, dtype)

    def _hold(self, layers: Mapping[int, tuple[PagedBuffer, ...]], dtype: KVFormat | str) -> None:
        super()._hold(layers, dtype)
        self._rows = {layer_id: rows for layer_id, (rows,) in layers.items()}

    def _of(self, layer_id: int) -> PagedBuffer:
        return held_for(self._rows, layer_id, self.kind)

    def rows(self, layer_id: int) -> Tensor:
        """Return a layer's cache ``[pages, page_size, 1, width]`` as stored: not a copy."""
        return self._of(layer_id).pages

    def parts(self, layer_id: int) -> tuple[Tensor, ...]:
        """Return views ``[pages, page_size, 1, …]`` of a layer's memory, each of one dtype, that together hold its
        rows: one view, or those of values, scales and other columns for rows with scales of their own."""
        return tuple(part.pages for part in self._of(layer_id).parts)

    def write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[tokens, width]`` or ``[tokens, 1, width]`` at flat ``slots`` ``[tokens]`` int64.

        A row with the slot -1 is padding and is not written. Does not synchronise with the device.
        """
        held = self._of(layer_id)
        if rows.dim() == 2:
            rows = rows.unsqueeze(1)
        held.check_rows(slots, rows, self.contents[0])
        held.write(slots, rows, padded=held.check_targets(slots))

    def read_rows(self, layer_id: int, slots: Tensor) -> Tensor:
        """Return rows ``[*slots.shape, width]`` in the stored dtype, or as the format's codec decodes them."""
        return self._of(layer_id).read(slots).squeeze(-2)
