"""Random cases as data: a batch and how the backend is used, their estimated cost and their text form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from attnplug import AttentionKind, CacheLayout, DType, ExtendPath, ForwardMode, GraphLevel, Role
from attnplug.host import MLADims
from attnplug.linear import LinearDims
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_conformance.case import Case
from attnplug_conformance.reference import Parents
from attnplug_conformance.stored_rows import format_of
from attnplug_conformance.subject import Subject, Unclaimed

UNIFORM = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes in which all requests have the same number of new rows."""
Lengths = tuple[tuple[int, int], ...]


class Way(StrEnum):
    """Use of the backend in a random case."""

    RUN = "run"
    """One batch."""
    SEQUENCE = "sequence"
    """Plan A, plan B, run A, refuse C, run B, run A again."""
    LANES = "lanes"
    """Two batches in two lanes, alternately; on a GPU on two streams."""
    CAPTURED = "captured"
    """Several shapes captured in one lane, and replayed in any order."""
    PATH = "path"
    """An MLA extend through core, by one of its paths."""
    TWO_STEPS = "two steps"
    """A linear extend and then a decode from its states."""


@dataclass(frozen=True)
class Drawn:
    """A random case: its first batch, and how the backend is used."""

    case: Case
    way: Way = Way.RUN
    lse: bool = False
    out: bool = False
    strided: bool = False
    """q, k and v are not contiguous."""
    saved: bool = True
    late_tree: bool = False
    """Draft trees are written after planning."""
    split: int = 0
    """Number of requests of the first of two batches."""
    second: ForwardMode | None = None
    """Mode of the second batch, if it differs."""
    refused: str = ""
    """Batch that must be refused between the two: ``missing``, ``stale`` or ``short``."""
    shapes: tuple[tuple[int, int], ...] = ()
    """Requests and rows of each captured shape."""
    replays: tuple[tuple[int, Lengths, tuple[Parents, ...] | None], ...] = ()
    """Index of the shape, lengths and trees of each replay."""
    path: ExtendPath | None = None
    chunk: int = 24
    """Prefix rows of a chunk of a chunked MLA extend."""

    @cached_property
    def seconds(self) -> float:
        """Estimated CPU seconds with a backend in plain torch."""
        runs = 1 if self.way in (Way.RUN, Way.PATH) else 2
        lengths = [self.case.lengths] * runs
        if self.way is Way.CAPTURED:
            lengths = [
                tuple((sum(each), 0) for each in self.case.lengths),
                *(lengths for _, lengths, _ in self.replays),
            ]
        return sum(batch_seconds(replace(self.case, lengths=each)) for each in lengths)

    def describe(self) -> str:
        """Describe the case in one line, for reports."""
        mine = {name: value for name, value in changed_fields(self).items() if name != "case"}
        return self.case.describe() + "".join(f"; {name} {plain(value)}" for name, value in mine.items())


def fit(subject: Subject, drawn: Drawn) -> Drawn | None:
    """Return the case with the choices that it leaves to the backend; ``None`` if the spec refuses it."""
    case = drawn.case
    if case.kv_dtype is None or not format_of(case.kv_dtype).layer_scale:
        case = replace(case, kv_scales=(1.0, 1.0))
    if drawn.way is Way.CAPTURED:
        if case.trees is None:
            drawn = replace(drawn, replays=tuple((shape, lengths, None) for shape, lengths, _ in drawn.replays))
        case = _captured_memory(replace(drawn, case=case))
    if not 0 < drawn.split < len(case.lengths) and drawn.way in (Way.SEQUENCE, Way.LANES):
        return None
    if len(case.shared) != len(case.lengths):
        case = replace(case, shared=())
    pages = [before // (case.page_size or 1) for before, _ in case.lengths]
    shared = [min(count, *pages[max(index - 1, 0) : index + 1]) for index, count in enumerate(case.shared)]
    case = replace(case, shared=(0, *shared[1:]) if any(shared[1:]) else ())
    if case.trees is not None and case.padded_requests and case.exact:
        return None  # padded requests have no rows then, but all requests with trees have the same number
    extras = {"sinks": case.sinks, "selected": case.index is not None, "lse": drawn.lse, "out": drawn.out}
    case = replace(case, extras=frozenset(name for name, needed in extras.items() if needed))
    try:
        case = subject.fit(case)
        if drawn.second is not None:
            subject.fit(replace(case, mode=drawn.second))
    except Unclaimed:
        return None
    return replace(drawn, case=case)


def _captured_memory(drawn: Drawn) -> Case:
    """Return a case with the largest of all captured shapes and the longest context of their replays."""
    requests, rows = (max(sizes) for sizes in zip(*drawn.shapes, strict=True))
    total = max(sum(each) for _, lengths, _ in drawn.replays for each in lengths)
    new = max(new for _, lengths, _ in drawn.replays for _, new in lengths)
    if drawn.case.mode not in UNIFORM:
        new = max(1, -(-rows // requests))
    trees = None if drawn.case.trees is None else ((-1,) * new,) * requests
    return replace(drawn.case, lengths=((max(total - new, 0), new),) * requests, trees=trees)


def batch_seconds(case: Case) -> float:
    """Estimated CPU seconds of one batch, with the reference and a backend in plain torch on one core."""
    rows, requests = sum(new for _, new in case.lengths), len(case.lengths)
    if case.linear is not None:
        size = case.linear.heads * case.linear.key_dim * case.linear.value_dim + case.linear.conv_channels
        return 4e-3 + 3e-4 * requests + rows * (1.2e-4 + 1e-8 * size)
    heads, width = query_heads(case), sum(_widths(case))
    pairs = sum(new * (before + new) for before, new in case.lengths)
    spent = 5e-3 + 6e-4 * requests + 1e-5 * rows + pairs * heads * (2e-8 + 1.5e-9 * width)
    return spent + 2e-9 * cache_bytes(case) + (6e-4 * rows if case.index is not None else 0.0)


def query_heads(case: Case) -> int:
    return (case.mla_heads or 1) if case.is_mla else case.kv_heads * case.group


def _widths(case: Case) -> tuple[int, int]:
    """Widths of a query and of a result."""
    if case.is_mla:
        return (40, 32) if case.mla is None else (case.mla.row_dim, case.mla.kv_lora_rank)
    return case.dims or (16, 16)


def cache_bytes(case: Case) -> int:
    size = case.page_size or 16
    pages = max((-(-sum(each) // size) for each in case.lengths), default=0) + 1
    slots = len(case.lengths) * pages * size + ((1 << 16) if case.pages == "far" else 0)
    row = _widths(case)[0] if case.is_mla else case.kv_heads * sum(_widths(case))
    return 3 * slots * row * (case.other_widths if not case.is_mla else 1) * 4


# Text form: JSON of the fields that differ from their defaults

_DERIVED = ("case", "extras", "layers_alike")
_RECORDS: dict[str, Callable[..., Any]] = {
    "mla": MLADims,
    "linear": LinearDims,
    "index": IndexerDims,
    "compressed": CompressedDims,
}
_ENUMS: dict[str, Callable[[Any], Any]] = {
    "mode": ForwardMode,
    "kind": AttentionKind,
    "dtype": DType,
    "kv_dtype": str,
    "index_dtype": str,
    "layout": CacheLayout,
    "graph": GraphLevel,
    "forced_role": Role,
    "way": Way,
    "second": ForwardMode,
    "path": ExtendPath,
}


def to_text(drawn: Drawn) -> str:
    """Return the case as one line of JSON, which :func:`from_text` reads."""
    both = {
        name: value
        for name, value in (changed_fields(drawn.case) | changed_fields(drawn)).items()
        if name not in _DERIVED
    }
    return json.dumps({name: plain(value) for name, value in both.items()})


def case_fields(given: Mapping[str, Any] | Case) -> dict[str, Any]:
    """Return the fields of a case that differ from their defaults, or parse those that a text form has."""
    if isinstance(given, Case):
        return {name: value for name, value in changed_fields(given).items() if name not in ("layers_alike", "lengths")}
    if unknown := sorted(given.keys() - {each.name for each in fields(Case)}):
        raise ValueError(f"{unknown[0]!r} is unknown")
    return {name: _read(name, value) for name, value in given.items()}


def from_text(text: str) -> Drawn:
    """Read a case that :func:`to_text` wrote. Raises ``ValueError`` for anything else."""
    given = json.loads(text)
    names = {each.name: Case for each in fields(Case)} | {each.name: Drawn for each in fields(Drawn)}
    if not isinstance(given, dict) or "lengths" not in given:
        raise ValueError('it is not an object with "lengths"')
    if unknown := sorted(given.keys() - names.keys()):
        raise ValueError(f"{unknown[0]!r} is unknown")
    parts: dict[type, dict[str, Any]] = {Case: {}, Drawn: {}}
    for name, value in given.items():
        try:
            parts[names[name]][name] = _read(name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} {value!r}: {error}") from None
    return Drawn(Case(**parts[Case]), **parts[Drawn])


def _read(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("extras", "invariant"):
        return frozenset(value)
    if name in _RECORDS:
        return _RECORDS[name](*value)
    return _ENUMS[name](value) if name in _ENUMS else tuples(value)


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def changed_fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass that differ from their defaults."""
    return {each.name: mine for each in fields(value) if (mine := getattr(value, each.name)) != each.default}


def plain(value: Any) -> Any:
    if isinstance(value, MLADims | LinearDims | IndexerDims | CompressedDims):
        return [getattr(value, each.name) for each in fields(value)]
    if isinstance(value, frozenset):
        return sorted(value)
    return value
