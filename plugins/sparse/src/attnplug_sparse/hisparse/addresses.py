"""Three address spaces, each a type of its own: a slot of one cannot be used where another is meant."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LogicalSlots:
    """Places by the page table: ``page * page_size + offset``, -1 for none. Index keys lie there, too."""

    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HostSlots:
    """Rows of a layer's part of ``HostRows``; -1 for none."""

    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    """Rows of ``HotPool``, in which all layers lie; -1 for none."""

    slots: Tensor


def host_slots(logical: LogicalSlots) -> HostSlots:
    """Where rows of the page table lie in host memory: pages have the same numbers there.

    So prefixes that requests share, copies of pages and evictions need nothing more than the page table's own.
    """
    return HostSlots(logical.slots)
