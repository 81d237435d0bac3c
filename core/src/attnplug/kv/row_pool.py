"""The frame of pools that hold one row a token and layer: latent rows, and index keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol, Self

from torch import Tensor

from attnplug.declare.problem import DType
from attnplug.kv.buffer import PagedBuffer, copy_pages, move_rows
from attnplug.kv.foreign import check_together
from attnplug.kv.layers import held_for
from attnplug.kv.layout import PageLayout
from attnplug.kv.page_copy import PageCopy


class Rows(Protocol):
    """One layer's rows: a ``PagedBuffer``, or ``ScaledRows``."""

    pages: Tensor
    layout: PageLayout
    nbytes: int
    scale: float

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        """What is moved to move a row."""
        ...

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None: ...
    def check_targets(self, slots: Tensor) -> bool: ...
    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None: ...
    def read(self, slots: Tensor) -> Tensor: ...


class RowPool:
    """Rows of all layers of a kind, by layer id."""

    kind: ClassVar[str]
    """What messages call the pool."""
    content: ClassVar[str]
    """What messages call its rows."""

    num_pages: int
    page_size: int
    dtype: DType

    def _hold(self, layers: Mapping[int, Rows], dtype: DType) -> None:
        self._layers = dict(layers)
        self._parts = tuple(part for rows in layers.values() for part in rows.parts)
        self.num_pages, self.page_size = next(iter(layers.values())).layout.shape[:2]
        self.dtype = dtype

    @classmethod
    def _over(cls, layers: Mapping[int, Rows], dtype: DType) -> Self:
        """A pool over memory that a host has."""
        check_together({f"the {cls.content} of layer {layer_id}": rows for layer_id, rows in layers.items()})
        pool = cls.__new__(cls)
        pool._hold(layers, dtype)
        return pool

    def _of(self, layer_id: int) -> Rows:
        return held_for(self._layers, layer_id, self.kind)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._layers.values())

    def parts(self, layer_id: int) -> tuple[Tensor, ...]:
        """Views ``[pages, page_size, 1, …]`` of a layer's memory, each of one type, that hold its rows together: one,
        or for rows with scales of their own their values, scales and other columns."""
        return tuple(part.pages for part in self._of(layer_id).parts)

    def _write(self, layer_id: int, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[tokens, 1, width]``; a row with the slot -1 is padding and is not written."""
        held = self._of(layer_id)
        held.check_rows(slots, rows, self.content)
        held.write(slots, rows, padded=held.check_targets(slots))

    def _read(self, layer_id: int, slots: Tensor) -> Tensor:
        return self._of(layer_id).read(slots).squeeze(-2)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages in every layer, as if one after another."""
        copy_pages(self._parts, copies)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rows in every layer from slots to slots; see ``KVPools.move_rows``."""
        move_rows(self._parts, sources, targets)
