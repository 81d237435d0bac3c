"""One forward pass: which rows each request has, and where they go in pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import Limits
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.pages import Pages


class Planned(NamedTuple):
    """A step over some pages: its batch, planned, and the slot of every column ``[batch * columns]``, -1 for none."""

    batch: ForwardBatch
    slots: Tensor


@dataclass(slots=True, eq=False)
class Step:
    """The rows of one forward pass, for the layers of one kind.

    Keys have ``columns`` columns. The new tokens are the columns ``start … start + queries - 1``, and what follows was
    not written yet. ``start`` is a tensor where only the device knows it. ``valid`` ``[batch, columns]`` is false for
    padding; ``None`` if there is none.
    """

    batch: int
    queries: int
    columns: int
    start: int | Tensor
    window: int | None
    valid: Tensor | None
    _planned: dict[Pages, Planned] = field(default_factory=dict)
    _order: Tensor | None = None

    @property
    def ndim(self) -> int:
        """transformers asks each mask for it, and leaves alone what is not 2-dimensional."""
        return 0

    def contiguous(self) -> Step:
        """``generate`` asks each mask for it."""
        return self

    @property
    def limits(self) -> Limits:
        """What a backend is built for, at least, to run it."""
        return Limits(self.batch, self.batch * self.queries, self.columns)

    @property
    def is_fresh(self) -> bool:
        """Whether all rows are new."""
        return isinstance(self.start, int) and self.start == 0

    def rows(self, tensor: Tensor) -> Tensor:
        """The new tokens ``[batch, heads, queries, dim]`` as rows ``[batch * queries, heads, dim]``: those of the
        requests one after the other, then padding."""
        rows = tensor.transpose(1, 2).flatten(0, 1)
        return rows if self._compact() is None else rows.index_select(0, self._compact_order())

    def columns_of(self, rows: Tensor) -> Tensor:
        """``rows`` ``[batch * queries, heads, dim]`` back in place, as ``[batch, queries, heads, dim]``."""
        if self._compact() is not None:
            rows = torch.empty_like(rows).index_copy_(0, self._compact_order(), rows)
        placed: Tensor = rows.unflatten(0, (self.batch, self.queries))
        return placed

    def _compact(self) -> Tensor | None:
        """Which of the new tokens are padding, if any may be. One token per request needs no order."""
        return self.valid if self.queries > 1 else None

    def _compact_order(self) -> Tensor:
        if self._order is None:
            assert self.valid is not None
            self._order = torch.argsort(~self._new().flatten(), stable=True)
        return self._order

    def _new(self) -> Tensor:
        """``[batch, queries]``: which of the new tokens are none of padding."""
        assert self.valid is not None
        if isinstance(self.start, int):
            return self.valid[:, self.start : self.start + self.queries]
        columns = torch.arange(self.queries, device=self.valid.device) + self.start
        return self.valid.index_select(1, columns)

    def planned(self, pages: Pages) -> Planned:
        """The step's batch over these pages. It is planned by the first layer that asks."""
        if (found := self._planned.get(pages)) is None:
            found = self._planned[pages] = self._plan(pages)
        return found

    def _plan(self, pages: Pages) -> Planned:
        device, end = pages.device, self.start + self.queries
        columns = torch.arange(self.columns, device=device)
        held = (columns < end).expand(self.batch, -1)
        mode = ForwardMode.DECODE if self.queries == 1 else ForwardMode.EXTEND
        table = pages.table[: self.batch]
        if self.valid is None:
            rank = columns.expand(self.batch, -1)
        else:
            self._check_window()
            held = held & self.valid
            rank = held.cumsum(1) - 1
        firsts = table[:, :1].long() * pages.page_size
        slots = torch.where(held, firsts + rank, -1).flatten()
        if self.valid is None and isinstance(end, int):
            lengths = [self.queries] * self.batch, [end] * self.batch
            return Planned(pages.planned(Geometry.of_lengths(mode, table, *lengths, pages.page_size)), slots)
        lens = held.sum(1, dtype=torch.int32)
        new_lens = None
        if self.valid is not None:
            new = self._new().sum(1, dtype=torch.int32)
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
        return Planned(pages.planned(geometry), slots)

    def _check_window(self) -> None:
        """A window counts positions, and a backend counts rows. They agree if padding only comes first or last."""
        if self.window is None or self.window >= self.columns or self.valid is None:
            return
        begins = self.valid[:, 1:] & ~self.valid[:, :-1]
        if bool(((begins.sum(1) + self.valid[:, 0]) > 1).any()):
            raise BridgeError(
                f"attention_mask has padding between tokens, and these layers have a window of {self.window} "
                "positions, which would count it; pad on the left: tokenizer.padding_side = 'left'"
            )
