"""What speculation brought, and what it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnplug_engine.speculation.timing import Timing


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
    timed: int = 0
    """Those of them whose times are known: all but the last, on a GPU."""
    verify_seconds: float = 0.0
    extend_seconds: float = 0.0
    """Of drafts that caught up with the tokens that were accepted."""
    draft_seconds: float = 0.0
    """Of drafts' further steps."""

    _running: deque[Timing] = field(default_factory=deque, init=False, repr=False)

    def add(self, brought: Sequence[int], timing: Timing) -> None:
        """A round that brought each request so many tokens. Its draft may still run: its times are taken later."""
        self.rounds += len(brought)
        self.tokens += sum(brought)
        self.batches += 1
        self._running.append(timing)
        while self._running and self._running[0].done:
            verify, extend, draft = self._running.popleft().seconds()
            self.timed += 1
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
        return f"{self.tokens_a_round:.2f} tokens a round, {self.acceptance:.0%} of proposed tokens accepted"

    @property
    def times(self) -> str:
        """What a round takes, in words."""
        parts = {"verify": self.verify_seconds, "extend": self.extend_seconds, "draft": self.draft_seconds}
        return ", ".join(f"{name} {seconds / max(self.timed, 1) * 1000:.2f} ms" for name, seconds in parts.items())
