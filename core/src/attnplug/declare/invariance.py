"""Levels of invariance: the names that backends claim and problems request (E3)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

INVARIANCE: Mapping[str, str] = MappingProxyType(
    {
        "run": "repetition of the batch, stream, and process",
        "batch": "the other requests of the batch (number, lengths, order, position), padded requests, page numbers, "
        "page-table width, and bounds instead of exact lengths",
        "graph": "eager execution, capture, and replay at any captured size",
        "chunks": "chunk boundaries of the prompt, the length of a cached prefix, and whether a row was prefilled with "
        "other rows or decoded",
        "verify": "target verify or decode, so that speculation changes no token",
    }
)
"""Levels by name: everything that the bits of a request's output and ``lse`` do not depend on.

A claim holds on one machine with one set of installed versions, for a backend that was built with the level requested
(``BackendContext.invariant``), and for MLA if extends run absorbed (``Problem.extend_path``). A backend that is never
captured keeps ``graph``; one that verifies no drafts keeps ``verify``.
"""


def sorted_levels(levels: Collection[str]) -> list[str]:
    """Return levels in the order of their definition."""
    return [level for level in INVARIANCE if level in levels]
