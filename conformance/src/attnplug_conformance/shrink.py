"""Shrinking of failing random cases: fewer requests, shorter lengths, fewer heads, features off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from attnplug import DType, ForwardMode
from attnplug.host import MLADims
from attnplug_conformance.case import Case
from attnplug_conformance.random_case import UNIFORM, Drawn, Lengths, Way

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
OFF = Drawn(Case(()))
FEW_REQUESTS = 12
"""Number of requests up to which each is removed or shortened alone."""
MAX_SECONDS = 2.0
"""Estimated cost of all attempts to shrink a failure. It does not depend on the machine, and so neither do results."""
MAX_ATTEMPTS = 300


class Costed(Protocol):
    """A case that estimates its cost."""

    @property
    def seconds(self) -> float:
        """Estimated CPU seconds."""


AnyCase = TypeVar("AnyCase", bound=Costed)


def shrink(
    drawn: AnyCase,
    fit: Callable[[AnyCase], AnyCase | None],
    fails: Callable[[AnyCase], bool],
    passes: Sequence[Callable[[AnyCase], Iterator[AnyCase]]],
) -> AnyCase:
    """Return the smallest case found that still fails. The order of attempts is fixed.

    ``fit`` returns a case as the backend would run it, or ``None`` if its spec refuses it. Each of ``passes`` yields
    smaller cases.
    """
    tried, spent, before = {drawn}, 0.0, None
    while before != drawn:
        before = drawn
        for one_pass in passes:
            candidates = one_pass(drawn)
            while (candidate := next(candidates, None)) is not None:
                fitted = fit(candidate)
                if fitted is None or fitted in tried:
                    continue
                tried.add(fitted)
                spent += fitted.seconds
                if spent > MAX_SECONDS or len(tried) > MAX_ATTEMPTS:
                    return drawn
                if fails(fitted):
                    drawn, candidates = fitted, one_pass(fitted)
    return drawn


def _off(name: str, drawn: Drawn) -> Iterator[Drawn]:
    """Reset a field of the use to its default."""
    yield replace(drawn, **{name: getattr(OFF, name)})


def _plain(name: str, drawn: Drawn) -> Iterator[Drawn]:
    """Reset a field of the case to its default."""
    yield replace(drawn, case=replace(drawn.case, **{name: getattr(OFF.case, name)}))


def _one_batch(drawn: Drawn) -> Iterator[Drawn]:
    """Run one batch once, without a graph."""
    for _, lengths, trees in drawn.replays:
        case = replace(drawn.case, lengths=lengths, trees=trees, graph=OFF.case.graph)
        yield replace(drawn, way=Way.RUN, case=case, shapes=(), replays=())
    if drawn.way in (Way.SEQUENCE, Way.LANES, Way.TWO_STEPS):
        yield replace(drawn, way=Way.RUN, split=0, second=None, refused="", case=replace(drawn.case, lanes=1))


def _mode(drawn: Drawn) -> Iterator[Drawn]:
    """Extend instead of a mixed batch or a draft extend, and decode instead of a verify of one row."""
    case = drawn.case
    if drawn.way is not Way.CAPTURED and case.trees is None:
        one = all(new == 1 for _, new in case.lengths)
        yield replace(drawn, case=replace(case, mode=DECODE if one else EXTEND))


def _sizes(drawn: Drawn) -> Iterator[Drawn]:
    case = drawn.case
    changes: tuple[dict[str, Any], ...] = (
        {"dtype": DType.FLOAT32},
        {"page_size": 16},
        {"pages": "contiguous"},
        {"dims": case.dims and (16, 16)},
        {"dims": case.dims and (case.dims[0],) * 2},
        {"mla": case.mla and MLADims(32, 16, 8), "v_head_dim": 16},
    )
    for each in changes:
        yield replace(drawn, case=replace(case, **each))


def _numbers(drawn: Drawn) -> Iterator[Drawn]:
    """Fewer heads and ranks, a smaller window and less padding."""
    case = drawn.case
    heads = ("mla_heads",) if case.is_mla else ("kv_heads", "group")
    for name, least in (*((each, 1) for each in (*heads, "window", "ranks")), ("padding", 0), ("padded_requests", 0)):
        value = getattr(case, name)
        for less in _less(value, least) if value is not None else ():
            change: dict[str, Any] = {name: less}
            yield replace(drawn, case=replace(case, **change))


def _requests(drawn: Drawn) -> Iterator[Drawn]:
    """Remove halves, quarters and eighths of the requests, and single ones if there are few."""
    if drawn.way is Way.CAPTURED:
        return
    count = len(drawn.case.lengths)
    size = count // 2
    while size and (size >= count / 8 or count <= FEW_REQUESTS):
        for start in range(0, count, size):
            yield _keep(drawn, [*range(start), *range(start + size, count)])
        size //= 2


def _keep(drawn: Drawn, requests: Sequence[int]) -> Drawn:
    """Return the case with some of its requests. A request shares pages with the next one in front that is left."""
    case, shared = drawn.case, []
    for number, request in enumerate(requests if case.shared else ()):
        skipped = case.shared[requests[number - 1] + 1 : request + 1] if number else (0,)
        shared.append(min(skipped))
    case = replace(
        case,
        lengths=tuple(case.lengths[request] for request in requests),
        trees=case.trees and tuple(case.trees[request] for request in requests),
        shared=tuple(shared),
    )
    return replace(drawn, case=case, split=sum(request < drawn.split for request in requests))


def _all_lengths(drawn: Drawn) -> Iterator[Drawn]:
    """Shorten all prefixes, or all new rows, together."""
    if drawn.way is Way.CAPTURED:
        return
    case, lengths = drawn.case, drawn.case.lengths
    for most in _less(max((before for before, _ in lengths), default=0), 0):
        yield _with_lengths(drawn, tuple((min(before, most), new) for before, new in lengths))
    if case.mode is DECODE:
        return
    for most in _less(max((new for _, new in lengths), default=1), 1):
        yield _with_lengths(drawn, tuple((before, min(new, most)) for before, new in lengths))


def _each_length(drawn: Drawn) -> Iterator[Drawn]:
    """Shorten single requests."""
    lengths = drawn.case.lengths
    if drawn.way is Way.CAPTURED or len(lengths) > FEW_REQUESTS:
        return
    uniform = drawn.second is None and drawn.case.mode in UNIFORM
    for request, (before, new) in enumerate(lengths):
        pairs = [(less, new) for less in _less(before, 0)]
        pairs += [] if uniform else [(before, less) for less in _less(new, 1)]
        for pair in pairs:
            yield _with_lengths(drawn, (*lengths[:request], pair, *lengths[request + 1 :]))


def _with_lengths(drawn: Drawn, lengths: Lengths) -> Drawn:
    trees = drawn.case.trees
    if trees is not None:
        trees = tuple(tree[:new] for tree, (_, new) in zip(trees, lengths, strict=True))
    return replace(drawn, case=replace(drawn.case, lengths=lengths, trees=trees))


def _replays(drawn: Drawn) -> Iterator[Drawn]:
    """Remove replays and shapes, and shorten the requests of single replays."""
    replays = drawn.replays
    for number in range(len(replays) if len(replays) > 1 else 0):
        yield replace(drawn, replays=(*replays[:number], *replays[number + 1 :]))
    used = {shape for shape, _, _ in replays}
    for number in range(len(drawn.shapes)):
        if number not in used:
            moved = tuple((shape - (shape > number), lengths, trees) for shape, lengths, trees in replays)
            yield replace(drawn, shapes=(*drawn.shapes[:number], *drawn.shapes[number + 1 :]), replays=moved)
    for number, (shape, lengths, trees) in enumerate(replays):
        alone = Drawn(replace(drawn.case, lengths=lengths, trees=trees, shared=()))
        for less in (*_requests(alone), *_all_lengths(alone), *_each_length(alone)):
            fewer = less.case.lengths
            if fewer and (drawn.case.mode is EXTEND or fewer[0][1] == lengths[0][1]):  # all replays have these rows
                one = shape, fewer, less.case.trees
                yield replace(drawn, replays=(*replays[:number], one, *replays[number + 1 :]))


def _less(value: int, least: int) -> Iterator[int]:
    """Yield smaller numbers: the least one, then ever closer ones."""
    gap = value - least
    while gap > 0:
        yield value - gap
        gap //= 2


_USES = ("lse", "out", "strided", "saved", "late_tree", "refused", "second", "chunk")
_FEATURES = ("trees", "window", "cap", "sinks", "kv_dtype", "kv_scales", "layout", "pages", "exact", "unused", "shared")
_REST = (
    *("ranks", "magnitude", "at_limits", "padding", "padded_requests", "plain_first", "other_heads", "other_widths"),
    *("index_dtype", "silu", "bias", "seed"),
)
PASSES: tuple[Callable[[Drawn], Iterator[Drawn]], ...] = (
    _requests,
    _replays,
    _all_lengths,
    _one_batch,
    *(partial(_off, name) for name in _USES),
    *(partial(_plain, name) for name in (*_FEATURES, *_REST)),
    _mode,
    _sizes,
    _numbers,
    _each_length,
)
