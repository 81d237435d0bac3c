"""What became of prompts: each one's completion, and what all of them took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnplug import ForwardMode
from attnplug_engine.execution.backend_usage import BackendUsage
from attnplug_engine.request import TokenLogprobs
from attnplug_engine.scheduling.step import Step
from attnplug_engine.speculation.statistics import RoundStatistics


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one prompt. ``cached_tokens`` are those of the prompt that the prefix cache supplied."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one prompt. ``text`` is ``None`` where the checkpoint has no tokenizer."""

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    usage: Usage
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each token, where ``SamplingParams.logprobs`` asks for them."""


@dataclass(slots=True)
class Statistics:
    """Tokens, and seconds in the engine, since it was made. A step that does both is divided by its tokens.

    A row that was computed for a request which had ended before is no token.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    replayed_steps: int = 0
    """Decode steps that ran as captured graphs."""
    eager_steps: int = 0
    """Decode steps that did not."""
    replayed_prefills: int = 0
    """Steps with prefill that ran as captured graphs."""
    eager_prefills: int = 0
    """Steps with prefill that did not."""
    rounds: RoundStatistics | None = None
    """Of an engine that speculates."""
    backend_usage: BackendUsage = field(default_factory=BackendUsage)
    """Steps by backend, counted as they are launched."""

    def add(self, step: Step, new_tokens: int, seconds: float, *, replayed: bool = False) -> None:
        """A finished step, and how many new tokens it brought.

        Steps overlap. ``seconds`` are those that passed in the engine until this one was finished, and in which no
        other was.
        """
        if step.mode is ForwardMode.DECODE:
            self.replayed_steps += replayed
            self.eager_steps += not replayed
        decoding, prefill = new_tokens, 0
        if step.mode is not ForwardMode.DECODE:
            self.replayed_prefills += replayed
            self.eager_prefills += not replayed
            prefilling = [entry for entry in step.entries if entry.position < len(entry.request.prompt)]
            prefill = sum([len(entry.token_ids) for entry in prefilling])
            decoding = len(step.entries) - len(prefilling)
        self._count(prefill, decoding, seconds)

    def add_rounds(
        self, step: Step, new_tokens: Mapping[int, Sequence[int]], seconds: float, *, replayed: bool = False
    ) -> None:
        """As ``add``, for a step of an engine that speculates, with the tokens that it brought by request id."""
        if step.rounds:
            self.replayed_steps += replayed
            self.eager_steps += not replayed
        self.eager_prefills += step.rounds < len(step.entries)
        prefill = sum([len(entry.token_ids) for entry in step.entries[step.rounds :]])
        rounds = [new_tokens.get(entry.request.id, ()) for entry in step.entries[: step.rounds]]
        self._count(prefill, sum(map(len, rounds)), seconds)

    def _count(self, prefill: int, decoding: int, seconds: float) -> None:
        share = prefill / (prefill + decoding) if prefill else 0.0
        self.decode_tokens += decoding
        self.prefill_tokens += prefill
        self.decode_seconds += seconds * (1 - share)
        self.prefill_seconds += seconds * share
