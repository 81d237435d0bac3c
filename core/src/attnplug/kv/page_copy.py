"""Copies between pages, made by a host before new rows are written to a page that was shared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The contents of page ``source`` are to be copied to page ``target``, in every layer."""

    source: int
    target: int


def settle_copies(copies: Iterable[PageCopy]) -> tuple[list[int], list[int]]:
    """Sources and targets that, copied all at once, do what ``copies`` do one after another.

    A slot table hands out copies in the order in which rows were extended, so a target can be the source of
    a later copy (a row that was copied is forked and extended), and a freed source can be a later target.
    Every target appears once.
    """
    origin: dict[int, int] = {}
    for copy in copies:
        origin[copy.target] = origin.get(copy.source, copy.source)
    moved = [(source, target) for target, source in origin.items() if source != target]
    return [source for source, _ in moved], [target for _, target in moved]
