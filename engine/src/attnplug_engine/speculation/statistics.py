"""What speculation brought, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RoundStatistics:
    """Rounds of all requests since the engine was made: one of a batch of seven requests counts as seven.

    A round that brought a tokens accepted a - 1 that were proposed. What a request left out at its end is counted, too.
    """

    steps: int
    """Tokens that are proposed one after the other."""
    rounds: int = 0
    tokens: int = 0
    batches: int = 0
    """Rounds, however many requests they had."""
    verify_seconds: float = 0.0
    extend_seconds: float = 0.0
    """Of drafts that caught up with the tokens that were accepted."""
    draft_seconds: float = 0.0
    """Of drafts' further steps."""

    def add(self, brought: Sequence[int], seconds: Sequence[float]) -> None:
        """A round that brought each request so many tokens, and the seconds of its verify, extend and draft."""
        self.rounds += len(brought)
        self.tokens += sum(brought)
        self.batches += 1
        verify, extend, draft = seconds
        self.verify_seconds += verify
        self.extend_seconds += extend
        self.draft_seconds += draft

    @property
    def acceptance(self) -> float:
        """The share of the proposed tokens that were accepted, where a round proposes ``steps``."""
        return (self.tokens - self.rounds) / (self.rounds * self.steps) if self.rounds else 0.0

    @property
    def tokens_a_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        if not self.rounds:
            return "no round"
        parts = {"verify": self.verify_seconds, "extend": self.extend_seconds, "draft": self.draft_seconds}
        times = ", ".join(f"{name} {seconds / self.batches * 1000:.2f} ms" for name, seconds in parts.items())
        return (
            f"{self.tokens_a_round:.2f} tokens a round, {self.acceptance:.0%} of proposed tokens accepted; a round: "
            f"{times}"
        )
