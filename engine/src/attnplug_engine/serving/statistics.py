"""Statistics of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnplug import ForwardMode
from attnplug_engine.execution.backend_usage import BackendUsage
from attnplug_engine.execution.compilations import Compilation, describe
from attnplug_engine.scheduling.step import Step
from attnplug_engine.speculation.statistics import RoundStatistics


@dataclass(frozen=True, slots=True)
class StartUp:
    """Duration of an engine's start-up in seconds, and the kernels that it compiled or loaded from disk caches.

    ``not_ahead`` is the reason why some kernels may not have been compiled in parallel; None if all were, or none had
    to be.
    """

    seconds: float
    compiled: tuple[Compilation, ...] = ()
    not_ahead: str | None = None

    def lines(self) -> list[str]:
        """Return lines about what was compiled; none if everything came from disk caches."""
        found = [describe(self.compiled)]
        if self.not_ahead is not None:
            found.append(f"some kernels may have been compiled one after the other: {self.not_ahead}")
        return [line for line in found if line is not None]


@dataclass(slots=True)
class Statistics:
    """Tokens, and seconds in the engine, since it was built. The time of a mixed step is divided by its tokens.

    Rows computed for a request that had already ended are not counted.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    replayed_steps: int = 0
    """Decode steps that ran as captured graphs."""
    eager_steps: int = 0
    """Decode steps that ran eagerly."""
    replayed_prefills: int = 0
    """Steps with prefill that ran as captured graphs."""
    eager_prefills: int = 0
    """Steps with prefill that ran eagerly."""
    rounds: RoundStatistics | None = None
    """Statistics of speculation; None if it is off."""
    backend_usage: BackendUsage = field(default_factory=BackendUsage)
    """Steps by backend, counted as they are launched."""

    def add(self, step: Step, new_tokens: int, seconds: float, *, replayed: bool = False) -> None:
        """Count a finished step with ``new_tokens`` new tokens.

        Steps overlap: ``seconds`` is the time in the engine since the previous step finished.
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
        self,
        step: Step,
        new_tokens: Mapping[int, Sequence[int]],
        seconds: float,
        *,
        replayed: bool = False,
        replayed_prefill: bool = False,
    ) -> None:
        """Like ``add``, for a step of speculative rounds, with its new tokens by request id."""
        if step.rounds:
            self.replayed_steps += replayed
            self.eager_steps += not replayed
        self.replayed_prefills += replayed_prefill
        self.eager_prefills += step.rounds < len(step.entries) and not replayed_prefill
        prefill = sum([len(entry.token_ids) for entry in step.entries[step.rounds :]])
        rounds = [new_tokens.get(entry.request.id, ()) for entry in step.entries[: step.rounds]]
        self._count(prefill, sum(map(len, rounds)), seconds)

    def _count(self, prefill: int, decoding: int, seconds: float) -> None:
        share = prefill / (prefill + decoding) if prefill else 0.0
        self.decode_tokens += decoding
        self.prefill_tokens += prefill
        self.decode_seconds += seconds * (1 - share)
        self.prefill_seconds += seconds * share
