"""Measuring without waiting: a clock with known times, and backends under names of a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from attnplug_tune.clock import Chain
from attnplug_tune.points import Point
from attnplug_tune.shapes import Task, tasks_of

from attnplug import DType, Problem
from attnplug.host import load_model, load_registry
from attnplug.registry.registry import Registry
from attnplug_testing.plugins import EMBEDDED, bringing, spec

FACTORY = "attnplug.torch_native.backend:TorchNativeBackend"


@dataclass
class FakeClock:
    """Fake clock that returns given microseconds per call for each candidate and advances by ``seconds`` for each
    chain."""

    times_us: dict[str, Callable[[Point], float]]
    seconds: float = 1.0
    compile_s: float = 0.0
    """Seconds to prepare the first chain of a side."""
    runs: bool = False
    """True if chains run, although their time is not used."""
    ran: list[Chain] = field(default_factory=list)
    _now: float = 0.0

    def now(self) -> float:
        return self._now

    def warm_up(self, chain: Chain) -> None:
        if not any(each.side == chain.side for each in self.ran):
            self._now += self.compile_s
        if self.runs:
            chain.run()

    def times(self, chain: Chain) -> list[float]:
        self.ran.append(chain)
        self._now += self.seconds
        us = self.times_us[chain.side](chain.task.point)
        return [1e-6 * us * chain.calls * part for part in (0.9, 0.95, 1.0, 1.05, 1.1)]


def toys(install: Callable[..., object], *names: str, **changes: object) -> Registry:
    """A registry with torch_native, and the same under other names, as third parties would bring it."""
    made = [spec(name, factory=FACTORY, **changes) for name in names]
    points = [install(bringing(each), each.name, f"{each.name}-dist") for each in made]
    return load_registry([EMBEDDED, *points])  # type: ignore[list-item] # entry points


def problem(model: str = "tiny:llama", **changes: object) -> Problem:
    fields = {"device": "cpu", "dtype": DType.FLOAT32, "kv_dtype": DType.FLOAT32, **changes}
    return Problem(load_model(model), **fields)  # type: ignore[arg-type]


def tasks(registry: Registry, name: str, *points: Point) -> tuple[Task, ...]:
    return tasks_of(registry.get(name), [problem()], points)
