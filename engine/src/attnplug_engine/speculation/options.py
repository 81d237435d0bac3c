"""What a user asks of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Algorithm(StrEnum):
    """Where proposed tokens come from."""

    MTP = "mtp"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    STANDALONE = "standalone"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are proposed: ``steps`` deep, ``topk`` branches wide, ``nodes`` rows to verify, the root included."""

    algorithm: Algorithm
    draft_model: str | None
    steps: int
    topk: int = 1
    nodes: int = 0
