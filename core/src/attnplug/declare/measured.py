"""Measured speeds of backends, as data: tables that a ranking can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from attnplug.declare.errors import PluginError
from attnplug.declare.model import AttentionKind
from attnplug.declare.problem import Role
from attnplug.declare.reading import integer, members, several


class Measurement(NamedTuple):
    """One call: the number of requests, each request's cache rows and new tokens, and the time."""

    requests: int
    length: int
    tokens: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """How long one backend takes for one kind of layer in one role, measured on one GPU.

    ``device`` is the GPU's name as its driver gives it, ``sm`` its compute capability. ``versions`` says what was
    measured: versions by distribution. Rows are given in any order, each shape once.
    """

    device: str
    sm: int
    backend: str
    role: Role
    kind: AttentionKind
    rows: tuple[Measurement, ...]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("device", "backend"):
            if not isinstance(value := getattr(self, name), str) or not value.strip():
                raise PluginError(f"a measured table's {name}={value!r} must be a name")
        integer("sm", self.sm)
        object.__setattr__(self, "role", *members("role", [self.role], Role))
        object.__setattr__(self, "kind", *members("kind", [self.kind], AttentionKind))
        object.__setattr__(self, "rows", tuple(sorted(_rows(self.title, several("rows", self.rows)))))
        object.__setattr__(self, "versions", _versions(self.title, self.versions))

    @property
    def title(self) -> str:
        """What was measured where. Two tables with one title contradict each other."""
        return f"{self.backend} {self.role} {self.kind} on {self.device} (SM {self.sm})"


def _rows(title: str, rows: Iterable[object]) -> Iterable[Measurement]:
    shapes = set()
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 4 or not all(map(_is_positive, row)):
            raise PluginError(
                f"the table of {title} has row {row!r}; write (requests, length, tokens, microseconds), all above 0"
            )
        requests, length, tokens, microseconds = row
        if not all(type(count) is int for count in (requests, length, tokens)):
            raise PluginError(f"the table of {title} has row {row!r}; requests, length and tokens are whole numbers")
        if (shape := (requests, length, tokens)) in shapes:
            raise PluginError(f"the table of {title} has (requests, length, tokens) {shape} twice; keep one")
        shapes.add(shape)
        yield Measurement(requests, length, tokens, float(microseconds))
    if not shapes:
        raise PluginError(f"the table of {title} has no rows")


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator] # a number


def _versions(title: str, versions: object) -> Mapping[str, str]:
    if isinstance(versions, Mapping) and versions and all(isinstance(t, str) for two in versions.items() for t in two):
        return dict(versions)
    raise PluginError(f"the table of {title} has versions={versions!r}; say what was measured: {{'torch': '2.11.0'}}")
