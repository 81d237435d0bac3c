"""Backends that plan a batch, by KV length: each range gets a graph of its own."""

from __future__ import annotations

import sys
from bisect import bisect_left
from typing import NamedTuple

from attnplug import AttentionBackend, ForwardMode
from attnplug.auto.fastest import FastestBackend
from attnplug.host import ForwardingBackend
from attnplug.wrappers.forwarding import SplitBackend

EVERY_LENGTH = sys.maxsize
"""``max_length`` of the last :class:`LengthRange`."""


class LengthRange(NamedTuple):
    """Backends, by name, that serve a batch together if its KV lengths do not exceed ``max_length``."""

    max_length: int
    backends: tuple[str, ...]


def length_ranges(
    backend: AttentionBackend, mode: ForwardMode, requests: int, tokens: int, ragged: bool = False
) -> tuple[LengthRange, ...]:
    """Backends that plan a batch of ``requests`` with ``tokens`` new tokens each, by KV length.

    The length is that of every request, or their mean if ``ragged``. Ranges are in ascending order and the last one
    ends at ``EVERY_LENGTH``. There is only one unless backends share a role by batch.
    """
    if not isinstance(backend, ForwardingBackend):
        return (LengthRange(EVERY_LENGTH, (backend.backend_id.name,)),)
    if isinstance(backend, FastestBackend):
        by = backend.by_mode[mode]
        if isinstance(by, str):
            return (LengthRange(EVERY_LENGTH, (by,)),)
        ends, names = by.length_ranges(requests, tokens, ragged)
        return tuple(LengthRange(end, (name,)) for end, name in zip(ends, names, strict=True))
    labels = backend.child_of[mode] if isinstance(backend, SplitBackend) else tuple(backend.children)
    children = [backend.children[label] for label in labels]
    return merge_length_ranges(*(length_ranges(child, mode, requests, tokens, ragged) for child in children))


def merge_length_ranges(*several: tuple[LengthRange, ...]) -> tuple[LengthRange, ...]:
    """Merge the ranges of backends that plan the same batches into one list of ranges."""
    ends = sorted({one.max_length for each in several for one in each})
    taking = [[each[bisect_left(each, (end,))].backends for each in several] for end in ends]
    return tuple(LengthRange(end, sum(names, ())) for end, names in zip(ends, taking, strict=True))
