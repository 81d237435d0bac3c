"""Address spaces of HiSparse, one type each, so that a slot of one is never used in another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LogicalSlots:
    """Slots of the page table: ``page * page_size + offset``, -1 for none. Index keys have the same slots."""

    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """Rows of one layer in ``HostRows``; -1 for none."""

    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    """Rows of ``HotPool``, which all layers share; -1 for none."""

    slots: Tensor


def host_slots(logical: LogicalSlots) -> HostSlots:
    """Translate slots of the page table to host memory, whose pages have the same numbers.

    So shared prefixes, page copies and evictions need no bookkeeping besides the page table.
    """
    return HostSlots(logical.slots)
