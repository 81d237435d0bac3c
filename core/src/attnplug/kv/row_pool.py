"""Base class of row pools, which hold one row per token and layer, e.g. latent rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from attnplug.declare.problem import DType
from attnplug.kv.buffer import PagedBuffer, copy_pages, move_rows, torch_dtype
from attnplug.kv.foreign import check_tensors, check_together, foreign_pages, page_views
from attnplug.kv.layers import check_size, held_for
from attnplug.kv.layout import PageLayout
from attnplug.kv.page_copy import PageCopy


class Rows(Protocol):
    """One layer's rows: a ``PagedBuffer``, or buffers that together hold rows with scales of their own."""

    pages: Tensor
    layout: PageLayout
    nbytes: int
    scale: float

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        """Buffers that together hold the rows, and are moved together."""
        ...

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None: ...
    def check_targets(self, slots: Tensor) -> bool: ...
    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None: ...
    def read(self, slots: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Storage format of one layer's rows: ``width`` elements of type ``stored`` per token.

    ``wrap`` makes the layer's ``Rows`` of memory ``[pages, page_size, 1, width]``.
    """

    width: int
    stored: torch.dtype
    wrap: Callable[[Tensor], Rows]

    @classmethod
    def plain(cls, width: int, dtype: DType, scale: float = 1.0) -> RowFormat:
        """Elements of one type, with one fp8 scale for the layer."""
        return cls(width, torch_dtype(dtype), lambda pages: PagedBuffer(pages, scale))


class RowPool:
    """Rows of several layers, by layer id: per layer ``[pages, page_size, 1, width]``, zero until written.

    With ``shared``, all layers have the first one's memory. A subclass chooses the layers and their formats::

        class MeanKeyPool(RowPool):
            kind, content = "mean key", "mean keys"

            def __init__(self, layers, **sizes):
                super().__init__({layer.layer_id: RowFormat.plain(64, sizes["dtype"]) for layer in layers}, **sizes)
    """

    kind: ClassVar[str]
    """Name of the pool in messages."""
    content: ClassVar[str]
    """Name of its rows in messages, in the plural."""

    num_pages: int
    page_size: int
    dtype: DType

    def __init__(
        self,
        formats: Mapping[int, RowFormat],
        *,
        num_pages: int,
        page_size: int,
        dtype: DType,
        device: torch.device | str,
        shared: bool = False,
    ) -> None:
        check_size(num_pages, page_size)
        layers: dict[int, Rows] = {}
        for layer_id, form in formats.items():
            if shared and layers:
                layers[layer_id] = next(iter(layers.values()))
                continue
            shape = (num_pages, page_size, 1, form.width)
            layers[layer_id] = form.wrap(torch.zeros(shape, dtype=form.stored, device=device))
        self._hold(layers, dtype)

    @classmethod
    def _over_host(
        cls, formats: Mapping[int, RowFormat], tensors: Mapping[int, Tensor], layout: str, page_size: int, dtype: DType
    ) -> Self:
        """Pool over a host's tensors by layer id, without a copy; ``layout`` names their dimensions."""
        check_size(1, page_size)
        check_tensors(tensors, formats, cls.kind)
        layers: dict[int, Rows] = {}
        for layer_id, form in formats.items():
            name = f"the {cls.content} of layer {layer_id}"
            (pages,) = page_views(tensors[layer_id], layout, page_size, 1, (form.width,), name)
            layers[layer_id] = form.wrap(foreign_pages(pages, form.stored, dtype, name))
        check_together({f"the {cls.content} of layer {layer_id}": rows for layer_id, rows in layers.items()})
        pool = cls.__new__(cls)
        pool._hold(layers, dtype)
        return pool

    def _hold(self, layers: Mapping[int, Rows], dtype: DType) -> None:
        self._layers = dict(layers)
        distinct = {id(rows): rows for rows in layers.values()}.values()
        self._parts = tuple(part for rows in distinct for part in rows.parts)
        self.nbytes = sum(rows.nbytes for rows in distinct)
        self.num_pages, self.page_size = next(iter(layers.values())).layout.shape[:2]
        self.dtype = dtype

    def _of(self, layer_id: int) -> Rows:
        return held_for(self._layers, layer_id, self.kind)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._layers)

    def rows(self, layer_id: int) -> Tensor:
        """``[pages, page_size, 1, width]`` as stored: the cache itself."""
        return self._of(layer_id).pages

    def parts(self, layer_id: int) -> tuple[Tensor, ...]:
        """Views ``[pages, page_size, 1, …]`` of a layer's memory, each of one type, that hold its rows together: one,
        or for rows with scales of their own their values, scales and other columns."""
        return tuple(part.pages for part in self._of(layer_id).parts)

    def write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[tokens, width]`` or ``[tokens, 1, width]`` at flat ``slots`` ``[tokens]`` int64.

        A row with the slot -1 is padding and is not written. Does not synchronise with the host.
        """
        held = self._of(layer_id)
        if rows.dim() == 2:
            rows = rows.unsqueeze(1)
        held.check_rows(slots, rows, self.content)
        held.write(slots, rows, padded=held.check_targets(slots))

    def read_rows(self, layer_id: int, slots: Tensor) -> Tensor:
        """``[*slots.shape, width]``: in the stored type, or float32 from fp8."""
        return self._of(layer_id).read(slots).squeeze(-2)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._parts, copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer from slots to slots; see ``KVPools.move_rows``."""
        move_rows(self._parts, sources, targets)
