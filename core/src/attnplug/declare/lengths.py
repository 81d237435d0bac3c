"""KV lengths of a batch, as far as backends are chosen by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class TypicalLens(NamedTuple):
    """Approximate KV lengths of a batch, mean and maximum: ``TypicalLens(1200, 4096)``."""

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
