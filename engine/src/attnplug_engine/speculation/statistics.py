"""Statistics of speculation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnplug_engine.speculation.timing import Timing


@dataclass(slots=True)
class RoundStatistics:
    """Rounds of all requests since the engine was built: one round of seven requests counts as seven.

    A round that yielded a tokens accepted a - 1 proposed ones. Tokens that a request dropped at its end are counted,
    too.
    """

    steps: int
    """Depth of a draft: proposed tokens per round in one chain."""
    rounds: int = 0
    tokens: int = 0
    batches: int = 0
    """Rounds, regardless of the number of requests."""
    timed: int = 0
    """Rounds with known times: on a GPU all but the last."""
    verify_seconds: float = 0.0
    extend_seconds: float = 0.0
    """Seconds of drafts catching up with accepted tokens."""
    draft_seconds: float = 0.0
    """Seconds of drafts' further steps."""

    _running: deque[Timing] = field(default_factory=deque, init=False, repr=False)

    def add(self, brought: Sequence[int], timing: Timing) -> None:
        """Count a round with each request's number of new tokens. Its draft may still run, so its times are read
        later."""
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
        """Share of the proposed tokens that were accepted, with ``steps`` proposed per round."""
        return (self.tokens - self.rounds) / (self.rounds * self.steps) if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        if not self.rounds:
            return "no round"
        return f"{self.tokens_per_round:.2f} tokens a round, {self.acceptance:.0%} of proposed tokens accepted"

    @property
    def times(self) -> str:
        """Times of a round as text."""
        parts = {"verify": self.verify_seconds, "extend": self.extend_seconds, "draft": self.draft_seconds}
        return ", ".join(f"{name} {seconds / max(self.timed, 1) * 1000:.2f} ms" for name, seconds in parts.items())
