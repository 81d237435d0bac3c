"""Size of mixed steps: how much prefill runs beside requests that decode, from prefills timed at start-up.

A prompt of n tokens takes ``a n + b n² / 2`` seconds: a token costs ``a`` for the layers and ``b`` for each position
before it. A chunk of 8192 tokens of a 1.1B Llama has 2.3 times as many operations at position 24k as at position 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.request import Request, SamplingParams

_LEAST_TOKENS = 128
_MOST_ATTENTION = 0.75  # of a timed prefill: bounds the effect of a time that was disturbed


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Limit on the prefill of a step in which requests decode.

    ``tokens`` fit into the inter-token latency if attention were free. At ``doubling`` positions, attention makes a
    token cost twice as much; None if it does not matter. Both are rounded, so that runs that are timed alike chunk
    prompts alike.
    """

    tokens: int
    doubling: int | None = None

    @classmethod
    def of(cls, per_token: float, per_position: float, latency: float) -> MixedSteps:
        """Return the limit for ``latency`` seconds: ``per_token`` seconds, and ``per_position`` for each one before."""
        tokens = int(min(latency / per_token, 1 << 30))
        step = 1 << max(tokens.bit_length() - 3, 0)  # keeps 3 bits: less than 20 % are lost
        doubling = None
        if per_token < per_position * (1 << 30):
            doubling = 1 << round(math.log2(max(per_token / per_position, 1)))
        return cls(max(tokens // step * step, _LEAST_TOKENS), doubling)

    def cost(self, tokens: int, position: int) -> float:
        """Return the cost of a chunk at ``position``, in tokens."""
        return tokens if self.doubling is None else tokens * (1 + (position + tokens / 2) / self.doubling)

    def chunk(self, cost: float, position: int) -> int:
        """Return the tokens of a chunk at ``position`` that costs ``cost``."""
        if self.doubling is None:
            return int(cost)
        linear, scaled = self.doubling + position, 2 * self.doubling * cost
        return int(scaled / (linear + math.sqrt(linear**2 + scaled)))


class PrefillBudget:
    """Prefill that still fits into a step: ``tokens``, and the limit of a mixed step if requests decode in it."""

    def __init__(self, tokens: int, mixed: MixedSteps | None) -> None:
        self.tokens = tokens
        self._mixed = mixed
        self._left: float = 0 if mixed is None else mixed.tokens

    def chunk(self, position: int) -> int:
        """Return the most tokens of a chunk at ``position``. The first chunk of a step is not too small to pay."""
        if (mixed := self._mixed) is None:
            return self.tokens
        tokens = mixed.chunk(self._left, position)
        if self._left == mixed.tokens:
            tokens = max(tokens, min(_LEAST_TOKENS, mixed.tokens))
        return min(self.tokens, tokens)

    def spend(self, tokens: int, position: int) -> None:
        """Count a chunk that was scheduled."""
        self.tokens -= tokens
        if self._mixed is not None:
            self._left = max(self._left - self._mixed.cost(tokens, position), 0)


def timed_prompts(capacity: Capacity, vocab_size: int) -> Iterator[Request]:
    """Yield the prompts to time: a full step, and twice as much as far as context and pool allow.

    Tokens differ, so that a mixture of experts uses all of them.
    """
    longest = min(capacity.context_length, capacity.num_pages * capacity.page_size - capacity.lookahead) - 1
    full = min(capacity.max_step_tokens, longest)
    for number, tokens in enumerate(dict.fromkeys((full, min(2 * full, longest)))):
        if tokens > 0:
            yield Request(~number, tuple(7919 * token % vocab_size for token in range(tokens)), SamplingParams(1))


def prefill_seconds(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Return seconds per token, and per token and position before it, from one or two timed prompts.

    Each is a pair of tokens and seconds.
    """
    tokens, seconds = times[0]
    rate = seconds / tokens
    if len(times) == 1:  # contexts are no longer than what was timed
        return rate, 0.0
    more, longer = times[1]
    slope = 2 * (longer / more - rate) / (more - tokens)
    slope = min(max(slope, 0.0), 2 * _MOST_ATTENTION * rate / tokens)
    return rate - slope * tokens / 2, slope
