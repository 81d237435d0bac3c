"""Comparisons of bits as data: two batches that compute the same rows of one request, and their text form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from attnplug import DType, ForwardMode
from attnplug.declare.problem import INVARIANCE
from attnplug_conformance.case import Case
from attnplug_conformance.random_case import UNIFORM, Lengths, batch_seconds, case_fields, changed_fields, plain, tuples
from attnplug_conformance.random_case import from_text as drawn_from_text

EXTEND = ForwardMode.EXTEND


@dataclass(frozen=True)
class Step:
    """One batch with ``new`` rows of the request under test, behind ``before`` cached rows, and with other requests."""

    before: int
    new: int
    mode: ForwardMode = EXTEND
    ahead: Lengths = ()
    """Requests in front of the one under test, as (cached rows, new rows)."""
    behind: Lengths = ()
    pages: str = "shuffled"
    shared: bool = False
    """The other requests share the leading pages of the one under test, as with a prefix cache."""
    width: int = 0
    """Unused columns of the page table."""
    padded: int = 0
    """Padded requests, and as many padding rows of q, k and v."""
    exact: bool = True
    """False if the host gives upper bounds instead of lengths."""
    typical: bool = False
    """The host gives typical lengths."""
    slots: bool = False
    """The host gives the slot mapping."""
    strided: bool = False
    """q, k, v and the page table are not contiguous."""
    shape: tuple[int, int] | None = None
    """Requests and rows of the captured batch that is replayed; ``None``: eager."""
    fresh: bool = False
    """Run on a newly built backend."""
    stream: bool = False
    """Run on another stream."""
    lane: int = 0
    seed: int = 0
    """Seed of page numbers and of the other requests' rows."""

    @property
    def total(self) -> int:
        return self.before + self.new

    @property
    def lengths(self) -> Lengths:
        others = [self.ahead, self.behind]
        if self.mode in UNIFORM:
            others = [tuple((before, self.new) for before, _ in each) for each in others]
        return *others[0], (self.before, self.new), *others[1]

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.lengths) + self.padded * self.new

    def describe(self) -> str:
        """Describe the batch in one line: all requests, the one under test in brackets, and what else differs."""
        shown = [f"{before}+{new}" for before, new in self.lengths]
        shown[len(self.ahead)] = f"[{shown[len(self.ahead)]}]"
        more = {name: value for name, value in changed_fields(self).items() if name not in _REQUESTS}
        return f"{self.mode} of {', '.join(shown)} rows" + "".join(f", {name} {value}" for name, value in more.items())


_REQUESTS = ("before", "new", "mode", "ahead", "behind")
"""Fields of a step that describe its requests; the others are conditions."""


@dataclass(frozen=True)
class Comparison:
    """Two batches whose common rows of the request under test must have the same bits.

    ``case`` has the layer, the dtypes, the requested levels and the seed of the request under test. ``second`` runs
    ``repeats`` times behind ``first``, on the same backend unless it is ``fresh``.
    """

    case: Case
    first: Step
    second: Step
    repeats: int = 1

    @property
    def seconds(self) -> float:
        """Estimated CPU seconds with a backend in plain torch."""
        steps = (self.first, *[self.second] * self.repeats)
        return sum(0.005 + batch_seconds(replace(self.case, lengths=step.lengths)) for step in steps)

    def describe(self) -> str:
        return f"first batch: {self.first.describe()}; second batch: {self.second.describe()}"


def to_text(level: str, comparison: Comparison) -> str:
    """Return a comparison as one line of JSON, which :func:`from_text` reads."""
    case = {name: plain(value) for name, value in case_fields(comparison.case).items()}
    steps = {name: {k: plain(v) for k, v in changed_fields(getattr(comparison, name)).items()} for name in _STEPS}
    return json.dumps({"level": level, **case, **steps, "repeats": comparison.repeats})


def from_text(text: str) -> tuple[str, Comparison]:
    """Read the level and the comparison that :func:`to_text` wrote. Raises ``ValueError`` for anything else."""
    given = json.loads(text)
    if not isinstance(given, dict) or not {"level", *_STEPS} <= given.keys():
        raise ValueError('it is not an object with "level", "first" and "second"')
    level, repeats = given.pop("level"), given.pop("repeats", 1)
    first, second = (_step(given.pop(name)) for name in _STEPS)
    return level, Comparison(Case(**case_fields(given | {"lengths": []})), first, second, repeats)


def check_of_case(text: str) -> str:
    """Return the name of the check that runs a case, random or a comparison. Raises ``ValueError`` if it is neither."""
    given = json.loads(text)
    if not isinstance(given, dict) or "level" not in given:
        return f"{drawn_from_text(text).case.kind}.random"
    level, comparison = from_text(text)
    if level not in (*INVARIANCE, "all"):
        raise ValueError(f"level {level!r} is unknown")
    case = comparison.case
    layer = "compressed." if case.compressed is not None else "sparse." if case.index is not None else ""
    return f"{case.kind}.{layer}invariant.{level}"


_STEPS = ("first", "second")


def _step(given: dict[str, Any]) -> Step:
    if unknown := sorted(given.keys() - {each.name for each in fields(Step)}):
        raise ValueError(f"{unknown[0]!r} is unknown")
    read: dict[str, Any] = {
        name: ForwardMode(value) if name == "mode" else tuples(value) for name, value in given.items()
    }
    return Step(**read)


# Passes of ``shrink``: each yields smaller comparisons.


def _halves(requests: Lengths) -> Iterator[Lengths]:
    yield ()
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            yield requests[:start] + requests[start + size :]
        size //= 2


def _less(value: int, least: int = 0) -> Iterator[int]:
    gap = value - least
    while gap > 0:
        yield value - gap
        gap //= 2


def _with(comparison: Comparison, name: str, **changes: Any) -> Comparison:
    """Return a comparison with changes of one of its batches."""
    both: dict[str, Any] = {name: replace(getattr(comparison, name), **changes)}
    return replace(comparison, **both)


def _fewer_requests(comparison: Comparison) -> Iterator[Comparison]:
    for name in _STEPS:
        for side in ("ahead", "behind"):
            for left in _halves(getattr(getattr(comparison, name), side)):
                yield _with(comparison, name, **{side: left})


def _shorter_requests(comparison: Comparison) -> Iterator[Comparison]:
    for name in _STEPS:
        for side in ("ahead", "behind"):
            requests = getattr(getattr(comparison, name), side)
            for index, (before, new) in enumerate(requests):
                pairs = [(less, new) for less in _less(before)] + [(before, less) for less in _less(new, 1)]
                for pair in pairs:
                    yield _with(comparison, name, **{side: (*requests[:index], pair, *requests[index + 1 :])})


def _reset(field: str, comparison: Comparison) -> Iterator[Comparison]:
    """Reset a field of both batches, or of one, to its default."""
    default = {field: getattr(Step(0, 1), field)}
    yield _with(_with(comparison, "first", **default), "second", **default)
    for name in _STEPS:
        yield _with(comparison, name, **default)


def _shorter(comparison: Comparison) -> Iterator[Comparison]:
    """Shorten the request under test: in front of its new rows by the same number of rows, or its new rows."""
    first, second = comparison.first, comparison.second
    least = min(first.before, second.before)
    for left in _less(least):
        starts = (step.before - least + left for step in (first, second))
        yield _with(_with(comparison, "first", before=next(starts)), "second", before=next(starts))
    if (first.before, first.new) == (second.before, second.new):
        for new in _less(first.new, 1):
            yield _with(_with(comparison, "first", new=new), "second", new=new)
    for name in _STEPS:
        step: Step = getattr(comparison, name)
        for new in _less(step.new, 1):
            yield _with(comparison, name, new=new)
            yield _with(comparison, name, before=step.total - new, new=new)


def _simpler_layer(comparison: Comparison) -> Iterator[Comparison]:
    case = comparison.case
    simpler: tuple[dict[str, Any], ...] = (
        {"window": None, "cap": None, "sinks": False, "extras": case.extras - {"sinks"}},
        {"dtype": DType.FLOAT32, "kv_dtype": None},
        {"kv_heads": 1, "group": 1},
        {"mla_heads": case.mla_heads and 1},
        {"seed": 0},
    )
    for changes in simpler:
        yield replace(comparison, case=replace(case, **changes))


PASSES: tuple[Callable[[Comparison], Iterator[Comparison]], ...] = (
    _fewer_requests,
    _shorter,
    *(partial(_reset, field.name) for field in fields(Step) if field.name not in _REQUESTS),
    _simpler_layer,
    _shorter_requests,
)
