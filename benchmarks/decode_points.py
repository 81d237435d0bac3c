"""Points, settings, time budget and records, shared by the engines of ``decode_h200.py``."""

from __future__ import annotations

import fcntl
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MEASURED_S = 0.4
_FEWEST, _MOST = 24, 200
SHORT = (16, 128, 512, 2048)
"""Prompt lengths of short prefills."""


@dataclass(slots=True)
class Point:
    """A batch of requests with equal context lengths, and its results."""

    model: str
    batch: int
    context: int
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """Measurement settings. ``max_new_tokens`` limits the new tokens of a request."""

    device: str | None = None
    attention_backend: str = "auto"
    prefill_backend: str | None = None
    eager: bool = False
    no_overlap: bool = False
    fill_cache: bool = True
    trace: bool = True
    prefill: int = 8192
    prefill_models: tuple[str, ...] = ()
    max_new_tokens: int = 1000
    is_linear: bool = False


class DeviceLock:
    """File lock for engines that start in parallel, then measure one at a time.

    A starting process holds a shared lock; a measuring process holds an exclusive one until it ends.
    """

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a") if path else None  # noqa: SIM115 - open until the process ends
        self._measuring = False
        self._lock(fcntl.LOCK_SH)

    def acquire(self) -> None:
        """Wait until this process may measure. Another call does nothing: it would let other processes in."""
        if not self._measuring:
            self._measuring = True
            self._lock(fcntl.LOCK_UN)
            self._lock(fcntl.LOCK_EX)

    def _lock(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, how)


class Clock:
    """Remaining time budget, and the records of points: measured, failed, or out of time.

    ``after_each`` is called after every record, so that results survive if the process is killed.
    """

    def __init__(self, budget_s: float, after_each: Callable[[], None], lock: DeviceLock) -> None:
        self._after_each, self.lock = after_each, lock
        self._end = time.perf_counter() + budget_s
        self.notes: dict[str, dict[str, Any]] = {}
        self.prefill: dict[str, dict[str, Any]] = {}

    @property
    def left_s(self) -> float:
        return self._end - time.perf_counter()

    def note(self, model: str, **facts: Any) -> None:
        """Record a value of the whole model."""
        self.notes.setdefault(model, {}).update(facts)

    def record(self, point: Point, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure a point. An error is recorded with it, and the other points go on."""
        name = f"{point.model} {point.batch} × {point.context}"
        self._keep(point.found, name, measure)
        if "step_us" in point.found:
            rate = 1e6 * point.batch / point.found["step_us"]
            print(f"{name}: {point.found['step_us']:.0f} µs a step, {rate:.0f} tokens/s", flush=True)

    def record_prefill(self, model: str, tokens: int, measure: Callable[[], dict[str, Any]]) -> None:
        found = self.prefill[model] = {"tokens": tokens}
        self._keep(found, f"{model} prefill of {tokens}", measure)

    def _keep(self, found: dict[str, Any], name: str, measure: Callable[[], dict[str, Any]]) -> None:
        started = time.perf_counter()
        try:
            if self.left_s <= 0:
                raise TimeoutError("no time was left")
            found |= measure()
        except Exception as error:
            found["error"] = error_text(error)
            print(f"{name}: {found['error']}", flush=True)
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
        found["spent_s"] = round(time.perf_counter() - started, 2)
        self._after_each()


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def steps_for(step_s: float, most: int) -> int:
    """Number of steps to measure: some tenths of a second."""
    return max(1, min(most, max(_FEWEST, min(_MOST, int(_MEASURED_S / max(step_s, 1e-6))))))


def points_of(model: str, batches: Sequence[int], contexts: Sequence[int]) -> list[Point]:
    """All points of a model, smallest first, so that the largest are left out if time runs out."""
    found = [Point(model, batch, context) for context in contexts for batch in batches]
    return sorted(found, key=lambda point: point.batch * point.context)
