"""Swap-in with torch, one request after another. The kernels are compared with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import Geometry
from attnplug_sparse.hisparse.addresses import DeviceSlots, LogicalSlots, host_slots
from attnplug_sparse.hisparse.host_rows import HostRows
from attnplug_sparse.hisparse.hot_pool import HotPool
from attnplug_sparse.hisparse.tables import HotTables


@dataclass(frozen=True, slots=True)
class _Member:
    """A request of a batch: index in the batch, row of the slot table, first new row, new rows, rows before them."""

    number: int
    row: int
    first: int
    new: int
    start: int


class TorchSwap:
    """Implements ``HiSparse.load_selected`` once the new rows are on the device."""

    def __init__(self, pool: HotPool, host: HostRows, tables: HotTables) -> None:
        self._pool, self._host, self._tables = pool, host, tables

    def swap_in(self, number: int, positions: Tensor, new_slots: LogicalSlots, geometry: Geometry) -> DeviceSlots:
        pool, counters = self._pool, self._tables.counters
        rows = len(new_slots.slots)
        self._host.write(number, host_slots(new_slots), pool.cells[:rows])
        counters[3] += (new_slots.slots >= 0).sum()
        found = torch.full_like(positions, -1)
        for member in self._members(geometry):
            part = slice(member.first, member.first + member.new)
            wanted = positions[part].long()
            last = wanted * pool.sizes.ratio + (pool.sizes.ratio - 1)  # an entry is new if its last token is
            is_old = (wanted >= 0) & (last < member.start)
            slots = torch.where(last >= member.start, last + (member.first - member.start), -1)
            load = self._staged if member.new > pool.sizes.nodes else self._hot
            slots[is_old] = load(number, member, wanted[is_old], geometry)
            found[part] = slots.int()
        return DeviceSlots(found)

    def _members(self, geometry: Geometry) -> Iterator[_Member]:
        assert geometry.table_rows is not None
        lens, table_rows = geometry.seq_lens.tolist(), geometry.table_rows.tolist()
        news = [geometry.max_new] * len(lens) if geometry.new_lens is None else geometry.new_lens.tolist()
        first = 0
        for number, (row, length, new) in enumerate(zip(table_rows, lens, news, strict=True)):
            if length and new and 0 <= row < self._pool.sizes.max_requests:
                yield _Member(number, row, first, new, length - new)
            first += new

    def _logical(self, member: _Member, positions: Tensor, geometry: Geometry) -> LogicalSlots:
        size = self._host.page_rows
        pages = geometry.page_table[member.number, positions // size].long()
        return LogicalSlots(pages * size + positions % size)

    def _staged(self, number: int, member: _Member, wanted: Tensor, geometry: Geometry) -> Tensor:
        """Copy earlier rows of a request, all or those of the window, to the staging area; returns the slots of
        ``wanted``."""
        pool, sizes = self._pool, self._pool.sizes
        old = member.start // sizes.ratio
        first = 0 if sizes.window is None else max(0, old - sizes.window + 1)
        prefix = self._logical(member, torch.arange(first, old, device=wanted.device), geometry)
        pool.cells[pool.staging + prefix.slots] = self._host.read(number, host_slots(prefix))
        self._tables.counters[2] += old - first
        return pool.staging + self._logical(member, wanted, geometry).slots

    def _hot(self, number: int, member: _Member, wanted: Tensor, geometry: Geometry) -> Tensor:
        """Copy missing rows to a request's buffer, over the least recently used; returns the slots of ``wanted``."""
        pool, tables = self._pool, self._tables
        held, hints, order = (table[number, member.row] for table in (tables.held, tables.hints, tables.order))
        columns = hints[wanted].long()
        is_hit = held[columns] == wanted
        missing = wanted[~is_hit]
        if member.new > 1:
            missing = missing.unique()
        touched = torch.zeros(len(held), dtype=torch.bool, device=held.device)
        touched[columns[is_hit]] = True
        by_age = order.long()
        used, free = by_age[touched[by_age]], by_age[~touched[by_age]]
        taken, left = free[: len(missing)], free[len(missing) :]
        order.copy_(torch.cat((left, taken, used)))
        held[taken], hints[missing] = missing.int(), taken.short()
        first = pool.first_of(number) + member.row * pool.sizes.buffer_size
        source = host_slots(self._logical(member, missing, geometry))
        pool.cells[first + taken] = self._host.read(number, source)
        tables.counters[0] += len(wanted)
        tables.counters[1] += len(missing)
        return first + hints[wanted].long()
