"""Rows of one forward pass, and their slots in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import Limits
from attnplug_transformers.errors import BridgeError, MaskError
from attnplug_transformers.pages import Pages


class PlannedRows(NamedTuple):
    """Planned batch of a step over some pages, and the slot of every column ``[batch * columns]``, -1 for none."""

    batch: ForwardBatch
    slots: Tensor


@dataclass(slots=True, eq=False)
class PaddedStep:
    """Rows of one forward pass, for the layers of one type.

    Keys have ``columns`` columns. The new tokens are the columns ``start … start + queries - 1``; columns behind them
    are not written yet. ``start`` is a tensor if only the device knows it. ``valid`` ``[batch, columns]`` is false for
    padding; ``None`` if there is none. ``position`` is ``start`` as a tensor on the device, for decode steps: compiled
    steps read no number that changes, so they are compiled once.
    """

    batch: int
    queries: int
    columns: int
    start: int | Tensor
    window: int | None
    valid: Tensor | None
    position: Tensor | None = None
    shapes: set[tuple[object, ...]] = field(default_factory=set)
    """Layer shapes that have begun this step."""
    _planned: dict[Pages, PlannedRows] = field(default_factory=dict)
    _order: Tensor | None = None

    @property
    def ndim(self) -> int:
        """4, as of a mask: transformers and models modify those with fewer dimensions."""
        return 4

    def contiguous(self) -> PaddedStep:
        """Return self. ``generate`` calls it on each mask."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        raise MaskError(f"its attribute {name}")

    def __getitem__(self, index: object) -> NoReturn:
        raise MaskError("its elements")

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], *_: object) -> NoReturn:
        raise MaskError(f"it in {getattr(function, '__name__', function)}")

    @property
    def limits(self) -> Limits:
        """Smallest limits of a backend that can run the step."""
        return Limits(self.batch, self.batch * self.queries, self.columns)

    @property
    def is_fresh(self) -> bool:
        """Return True if all rows are new."""
        return isinstance(self.start, int) and self.start == 0

    def begins(self, *shape: object) -> bool:
        """Return True if called for the first time with this layer shape."""
        if shape in self.shapes:
            return False
        self.shapes.add(shape)
        return True

    def rows(self, tensor: Tensor) -> Tensor:
        """Convert new tokens ``[batch, heads, queries, dim]`` to rows ``[batch * queries, heads, dim]``: those of all
        requests in sequence, then padding."""
        rows, order = tensor.transpose(1, 2).flatten(0, 1), self._compact_order(tensor.device)
        return rows if order is None else rows.index_select(0, order)

    def columns_of(self, rows: Tensor) -> Tensor:
        """Convert rows ``[batch * queries, heads, dim]`` back to ``[batch, queries, heads, dim]``."""
        if (order := self._compact_order(rows.device)) is not None:
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
        placed: Tensor = rows.unflatten(0, (self.batch, self.queries))
        return placed

    def _compact_order(self, device: torch.device) -> Tensor | None:
        """Order of the new tokens with padding last. ``None`` for the identity: one token per request needs none."""
        if self.valid is None or self.queries == 1:
            return None
        if self._order is None:
            self._order = torch.argsort(~self._new(self.valid).flatten(), stable=True)
        return self._order.to(device)

    def _new(self, valid: Tensor) -> Tensor:
        """Mask ``[batch, queries]`` of the new tokens that are not padding."""
        if isinstance(self.start, int):
            return valid[:, self.start : self.start + self.queries]
        columns = torch.arange(self.queries, device=valid.device) + self.start.to(valid.device)
        return valid.index_select(1, columns)

    def planned(self, pages: Pages) -> PlannedRows:
        """Return the planned batch over these pages. The first layer that calls this plans it."""
        if (planned := self._planned.get(pages)) is None:
            planned = self._planned[pages] = self._plan(pages)
        return planned

    def _plan(self, pages: Pages) -> PlannedRows:
        device = pages.device
        start = self.start.to(device) if isinstance(self.start, Tensor) else self.start
        end = start + self.queries
        columns = torch.arange(self.columns, device=device)
        present = (columns < end).expand(self.batch, -1)
        mode = ForwardMode.DECODE if self.queries == 1 else ForwardMode.EXTEND
        table = pages.table[: self.batch]
        valid = None if self.valid is None else self.valid.to(device)  # layers may be on several devices
        if valid is None:
            rank = columns.expand(self.batch, -1)
        else:
            self._check_window(valid)
            present = present & valid
            rank = present.cumsum(1) - 1
        firsts = table[:, :1].long() * pages.page_size
        slots = torch.where(present, firsts + rank, -1).flatten()
        if valid is None and isinstance(end, int):
            lengths = [self.queries] * self.batch, [end] * self.batch
            return PlannedRows(pages.planned(Geometry.of_lengths(mode, table, *lengths, pages.page_size)), slots)
        lens = present.sum(1, dtype=torch.int32)
        new_lens = None
        if valid is not None:
            new = self._new(valid).sum(1, dtype=torch.int32)
            if self.queries > 1:
                new_lens = new
            lens = torch.where(new > 0, lens, 0)
        geometry = Geometry(
            mode,
            table,
            lens,
            pages.page_size,
            rows=self.batch * self.queries,
            max_seq_len=self.columns,
            max_new=self.queries,
            new_lens=new_lens,
        )
        return PlannedRows(pages.planned(geometry), slots)

    def _check_window(self, valid: Tensor) -> None:
        """Raise if padding lies between tokens: a window counts positions, but a backend counts rows."""
        if self.window is None or self.window >= self.columns:
            return
        begins = valid[:, 1:] & ~valid[:, :-1]
        if bool(((begins.sum(1) + valid[:, 0]) > 1).any()):
            raise BridgeError(
                f"attention_mask has padding between tokens, which would count toward the window of {self.window} "
                "positions of these layers; pad on the left: tokenizer.padding_side = 'left'"
            )
