"""Copies between pages, which a host makes before it writes new rows to a shared page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy of page ``source`` to page ``target``, in every layer."""

    source: int
    target: int


def settle_copies(copies: Iterable[PageCopy]) -> tuple[list[int], list[int]]:
    """Return sources and targets whose simultaneous copy has the effect of ``copies`` made in order.

    A host orders copies by when requests were extended, so a target can be the source of a later copy (a copied
    request is forked and extended), and a freed source can be a later target. Every target appears once.
    """
    origin: dict[int, int] = {}
    for copy in copies:
        origin[copy.target] = origin.get(copy.source, copy.source)
    moved = [(source, target) for target, source in origin.items() if source != target]
    return [source for source, _ in moved], [target for _, target in moved]
