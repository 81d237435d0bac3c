"""KV lengths of a batch, as far as backends are chosen by them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

EVERY_LENGTH = sys.maxsize
"""``max_length`` of the last :class:`LengthRange`."""


class LengthRange(NamedTuple):
    """Backends, by name, that serve a batch together if its KV lengths do not exceed ``max_length``."""

    max_length: int
    backends: tuple[str, ...]


class TypicalLens(NamedTuple):
    """Approximate KV lengths of a batch: mean and maximum."""

    mean: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> TypicalLens:
        return cls(sum(lengths) // (len(lengths) or 1), max(lengths, default=0))

    @classmethod
    def around(cls, mean: int, *, ragged: bool) -> TypicalLens:
        return cls(mean, (3 * mean + 1) // 2 if ragged else mean)


def is_ragged(mean: int, longest: int) -> bool:
    """Return True if KV lengths vary enough for the ragged measurements to apply."""
    return 4 * longest > 5 * mean
