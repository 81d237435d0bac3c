"""Base classes of pools with pages, and of those that hold one row per token and layer; checks shared by all pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.kv_format import KVFormat, as_format
from attnplug.declare.model import LayerSpec
from attnplug.kv.buffer import (
    CodedRows,
    PageCopy,
    PagedBuffer,
    copy_pages,
    load_codec,
    move_rows,
    separate_views,
    torch_dtype,
)
from attnplug.kv.layout import LayoutName, PageLayout, check_together, page_views

T = TypeVar("T")
Scales: TypeAlias = float | tuple[float, ...]
"""Scale of a layer's rows, or of each of its contents; 1.0 by default."""


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


def layer_list(layer_ids: Iterable[int]) -> str:
    """Format layer ids for messages."""
    return ", ".join(map(str, sorted(layer_ids)))


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Storage format of one layer's rows: ``heads`` times ``width`` elements of type ``stored`` per token.

    ``wrap`` wraps memory ``[pages, page_size, heads, width]``. ``separate`` returns the views of parts that own memory
    keeps apart; ``None`` if they follow one another in each row.
    """

    width: int
    stored: torch.dtype
    wrap: Callable[..., PagedBuffer]
    heads: int = 1
    separate: Callable[[Tensor, PageLayout, LayoutName], tuple[Tensor, ...]] | None = None

    @classmethod
    def of(
        cls,
        format: KVFormat | str,
        width: int,
        *,
        rope: int = 0,
        scale: float = 1.0,
        heads: int = 1,
        separate: bool = False,
    ) -> RowFormat:
        """Return the storage of rows of ``width`` values; the last ``rope`` of them are rotary columns.

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
        views = partial(separate_views, format=format, width=width) if separate and format.in_bytes else None
        return cls(format.row_nbytes(width, rope) // stored.itemsize, stored, wrap, heads, views)

    def allocate(self, layout: LayoutName, num_pages: int, page_size: int, device: torch.device | str) -> PagedBuffer:
        """Return rows of zeros in new memory."""
        place = PageLayout.named(layout, num_pages, page_size, self.heads, self.width)
        memory = torch.zeros(place.elements, dtype=self.stored, device=device)
        if self.separate is None:
            return self.wrap(place.view(memory))
        return self.wrap(place.view(memory), views=self.separate(memory, place, layout))


class PagedPool:
    """Base class of pools with pages. Each layer has rows of one or several ``contents``, e.g. keys and values.

    Subclass contract: name ``kind`` and ``contents``, define ``formats``, and ``serves`` if it leaves layers out.
    """

    kind: ClassVar[str]
    """Name of the pool in messages."""
    contents: ClassVar[tuple[str, ...]]
    """Names of the rows in messages, in the plural."""
    shared: ClassVar[bool] = False
    """All layers have the first one's memory: a subclass distinguishes rows by slot."""

    num_pages: int
    page_size: int
    nbytes: int
    dtype: str
    """Name of the format."""

    @classmethod
    def serves(cls, layer: LayerSpec) -> bool:
        """Return True if the pool holds rows of this layer."""
        return True

    @classmethod
    def formats(cls, layer: LayerSpec, dtype: KVFormat | str, *scales: float) -> tuple[RowFormat, ...]:
        """Return the storage of each of the ``contents`` of a layer, which has one of ``scales`` each."""
        raise NotImplementedError

    @classmethod
    def all_formats(
        cls, layers: Sequence[LayerSpec], dtype: KVFormat | str, scales: Mapping[int, Scales] | None = None
    ) -> dict[int, tuple[RowFormat, ...]]:
        """Return the storage of all layers that the pool serves, by layer id. Allocates nothing."""
        own = distinct_layers([layer for layer in layers if cls.serves(layer)], cls.kind)
        if unknown := set(scales or ()) - set(own):
            raise PoolError(f"scales were given for layers {layer_list(unknown)}; the pool has {layer_list(own)}")
        found = {}
        for layer_id, layer in own.items():
            given = (scales or {}).get(layer_id, (1.0,) * len(cls.contents))
            each = given if isinstance(given, tuple) else (given,)
            if len(each) != len(cls.contents):
                raise PoolError(f"layer {layer_id} has scales {given}; give one for each of {', '.join(cls.contents)}")
            found[layer_id] = cls.formats(layer, dtype, *each)
        return found

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: KVFormat | str,
        device: torch.device | str,
        layout: LayoutName = "token_major",
        scales: Mapping[int, Scales] | None = None,
    ) -> None:
        formats = self.all_formats(layers, dtype, scales)
        check_size(num_pages, page_size)
        held: dict[int, tuple[PagedBuffer, ...]] = {}
        for layer_id, forms in formats.items():
            if self.shared and (first := next(iter(held.values()), ())):
                held[layer_id] = tuple(form.wrap(rows.pages) for form, rows in zip(forms, first, strict=True))
                continue
            held[layer_id] = tuple(form.allocate(layout, num_pages, page_size, device) for form in forms)
        self._hold(held, dtype)

    @classmethod
    def over(
        cls,
        layers: Sequence[LayerSpec],
        tensors: Mapping[int, Tensor | tuple[Tensor, ...]],
        layout: str,
        *,
        page_size: int,
        dtype: KVFormat | str,
        scales: Mapping[int, Scales] | None = None,
    ) -> Self:
        """Make a pool over a host's tensors by layer id: one tensor per layer, or one for each of its contents.

        Nothing is copied or zeroed. ``layout`` names the dimensions of each tensor from slow to fast: ``pages``,
        ``tokens``, ``heads``, ``dim``, and ``kv`` if one tensor holds keys and values. Parentheses join several into
        one dimension, and ``slots`` is ``(pages tokens)``. vLLM has ``"kv pages tokens heads dim"``, ``"pages kv tokens
        heads dim"``, the same with ``heads tokens``, ``"pages heads tokens (kv dim)"`` and, for latent rows, ``"pages
        tokens dim"``; SGLang has pairs of ``"slots heads dim"``, with one head for latent rows. ``dim`` is the width of
        a row in its format. Tensors may have any strides. Raises PoolError for tensors that do not fit the layers,
        overlap, or differ in device or number of pages.

        >>> from attnplug import AttentionKind, MHAPool
        >>> heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
        >>> layer = LayerSpec(0, AttentionKind.MHA, **heads, scale=0.125)
        >>> cache = torch.zeros(2, 32, 16, 2, 64)  # keys and values in 32 pages of 16 tokens, as in vLLM
        >>> layout = "kv pages tokens heads dim"
        >>> pool = MHAPool.over([layer], {0: cache}, layout, page_size=16, dtype="float32")
        >>> pool.keys(0).shape
        torch.Size([32, 16, 2, 64])
        """
        check_size(1, page_size)
        formats = cls.all_formats(layers, dtype, scales)
        if set(tensors) != set(formats):
            given_ids, own_ids = layer_list(tensors), layer_list(formats)
            raise PoolError(f"tensors were given for layers {given_ids}; the {cls.kind} pool's layers are {own_ids}")
        held: dict[int, tuple[PagedBuffer, ...]] = {}
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
                stored = form.stored  # a dtype of one byte may come as another
                if view.dtype != stored and (view.element_size() > 1 or stored.itemsize > 1):
                    raise PoolError(f"{name} of type {view.dtype} cannot be a cache in {dtype}; give {stored}")
                pages[name] = view.view(stored)
            held[layer_id] = tuple(form.wrap(pages[name]) for name, form in zip(names, forms, strict=True))
        check_together(pages)
        pool = cls.__new__(cls)
        pool._hold(held, dtype)
        return pool

    def _hold(self, layers: Mapping[int, tuple[PagedBuffer, ...]], dtype: KVFormat | str) -> None:
        distinct = list({id(rows.pages): rows for each in layers.values() for rows in each}.values())
        self._parts = tuple(part for rows in distinct for part in rows.parts)
        self._layers, self.layer_ids = layers, tuple(layers)
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

    A subclass chooses the layers and their formats::

        class MeanKeyPool(RowPool):
            kind, contents = "mean key", ("mean keys",)

            @classmethod
            def formats(cls, layer, dtype, *scales):
                return (RowFormat.of(dtype, 64, scale=scales[0]),)
    """

    def _of(self, layer_id: int) -> PagedBuffer:
        return held_for(self._layers, layer_id, self.kind)[0]

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
