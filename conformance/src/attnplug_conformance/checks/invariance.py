"""Checks of invariance levels: a request's rows have the same bits under all conditions that a level covers (E3).

The check of a level varies only the level's own conditions and requests only that level. ``all`` requests every claimed
level and varies all of their conditions together. The first batch of each comparison is also compared with float64: a
backend may run other kernels if levels are requested.
"""

from __future__ import annotations

import shlex
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from random import Random
from typing import Any, TypeVar

from attnplug import AttentionKind, Feature, ForwardMode, GraphLevel, Role
from attnplug.declare.problem import INVARIANCE
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_conformance.arithmetic import as_bytes
from attnplug_conformance.case import Case
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.checks.accuracy import FEATURES
from attnplug_conformance.checks.compressed import sized
from attnplug_conformance.checks.sparse import INDEX
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.invariant_case import PASSES, Comparison, Step, from_text, to_text
from attnplug_conformance.invariant_run import Results, StepRunner, make_runner
from attnplug_conformance.random_case import UNIFORM, Lengths
from attnplug_conformance.shrink import shrink
from attnplug_conformance.stored_rows import coded_formats
from attnplug_conformance.subject import Subject, Unclaimed

DECODE, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED
VERIFY = ForwardMode.TARGET_VERIFY
SHARE, LEAST = 0.1, 9
"""Share of the time budget for random cases that each level may use, and pairs of batches of a check's first layer that
are compared anyway. So are a third as many of every other layer, until the check has used all of the budget's time."""
REPEATS = 6
"""Repetitions of a batch: an autotuner tries several kernels before it settles on one."""
BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Usual sizes of tiles and splits."""
GRAPH_LEVELS = {DECODE: GraphLevel.DECODE, VERIFY: GraphLevel.UNIFORM, EXTEND: GraphLevel.ALWAYS}
OVERLAPPING, ENTRY_INDEX = CompressedDims(4, overlap=True), IndexerDims(heads=2, head_dim=16, topk=3)
"""Index heads of a compressed layer. With two, many scores are zero, and so equal."""
HEADS: tuple[dict[str, Any], ...] = ({"group": 1, "mla_heads": 8}, {"kv_heads": 1, "group": 12, "mla_heads": 32})
"""Numbers of heads for which kernels often differ: a KV head for each query head, and one for all."""
ADVICE = {
    "run": "use no atomics whose order changes results, and decide nothing by time",
    "batch": "split KV at absolute positions, use one tile size, and merge in a fixed order",
    "graph": "choose the same kernels and tiles in eager and captured batches of every size",
    "chunks": "place tiles and splits at absolute positions of keys, and run every row with one tile configuration",
    "verify": "run rows of a target verify with the reduction of a decode",
    "all": "the check of each level varies one condition at a time",
}

Item = TypeVar("Item")
Pairs = Iterator[tuple[Step, list[Step]]]
"""First batches, each with the batches to compare it with."""


class Schedules:
    """Random pairs of batches of one layer, by level: each method named after a level yields its pairs."""

    def __init__(self, subject: Subject, case: Case, seed: int) -> None:
        self.subject, self.case, self.rng = subject, case, Random(seed)
        self.page, self.longest = case.page_size or 16, subject.longest - 2
        if case.kind.is_linear:
            self.longest = min(self.longest, 200)
        can = subject.capabilities
        self.paged = not case.kind.is_linear
        self.bounds = not can.needs_cpu_seq_lens and self.paged
        self.modes = [mode for mode in (DECODE, EXTEND, MIXED, VERIFY) if self._serves(mode)]
        self.most_verified = min(can.max_speculative_tokens, 7)

    def _serves(self, mode: ForwardMode) -> bool:
        try:
            self.subject.fit(replace(self.case, lengths=((3, 1),), mode=mode))
        except Unclaimed:
            return False
        return True

    def edge(self, most: int) -> int:
        """Return a random number of rows up to ``most``, often at a boundary of a tile, split or page."""
        rng, most = self.rng, max(most, 1)
        if rng.random() < 0.3:
            return rng.randint(1, most)
        block = rng.choice([each for each in (*BLOCKS, self.page, 2 * self.page) if each <= most + 1] or [1])
        return max(1, min(most, block * rng.randint(1, 2) + rng.randint(-1, 1)))

    def shuffled(self, *items: Item) -> list[Item]:
        """Return the items in random order: a check ends with its budget, often before the last one."""
        return self.rng.sample(items, len(items))

    def others(self, count: int, most: int) -> Lengths:
        """Return ``count`` random requests with fewer than ``most`` cached rows."""
        new = 80 if count < 4 else 5 if count < 16 else 1
        return tuple((self.edge(most) - 1, self.edge(new)) for _ in range(count))

    def tested(self) -> list[Step]:
        """Return the requests under test, the longest of every mode first: within, across, and to the end of pages."""
        page, long = self.page, self.longest
        sizes = {
            DECODE: [(0, 1), (page, 1), (self.edge(long // 2), 1), (max(long // page * page, 1) - 1, 1)],
            EXTEND: [(0, 5), (page - 1, page + 1), (long // 2, 70)],
            MIXED: [(page + 2, 1), (self.edge(long // 2), 3)],
            VERIFY: [(self.edge(long // 2), 1 + self.most_verified // 2)],
        }
        by_mode = [[Step(before, new, mode) for before, new in reversed(sizes[mode])] for mode in self.modes]
        return [step for steps in zip_longest(*by_mode) for step in steps if step is not None]

    def run(self) -> Pairs:
        for step in self.tested():
            both = replace(step, ahead=self.others(1, 40), behind=self.others(2, 200))
            changes: tuple[dict[str, Any], ...] = ({"fresh": True}, {"stream": True}, {"lane": 1})
            yield both, self.shuffled(*[both] * REPEATS, *(replace(both, **each) for each in changes))

    def batch(self) -> Pairs:
        for place, step in enumerate(self.tested()):
            new, long, many = step.new, self.longest, 65 if self.subject.device.type == "cuda" or not place else 8
            varied: list[dict[str, Any]] = [
                {"behind": ((long - 1, new),), "typical": self.paged},
                {"ahead": ((1, new),), "slots": self.paged, "strided": self.paged},
                {"ahead": ((0, min(520, long)),)},
                {"ahead": self.others(3, 300), "behind": self.others(3, 60)},
                {"ahead": self.others(many, 30), "behind": self.others(many, 30)},
                {"pages": "contiguous", "seed": 7},
                {"padded": 3},
            ]
            wide = BLOCKS[-1] // self.page + 30
            if self.paged:
                alike = ((step.before, new),)
                varied += [{"width": wide}, {"ahead": alike, "behind": alike, "shared": True}]
                varied.append({"ahead": 4 * alike, "behind": 4 * alike, "shared": True})  # cascades begin at 8
            if self.bounds:
                varied += [
                    {"exact": False, "width": wide},
                    {"exact": False, "padded": 2, "ahead": self.others(1, long), "typical": True},
                ]
            yield step, self.shuffled(*(replace(step, **changes) for changes in varied))

    def graph(self) -> Pairs:
        can = self.subject.capabilities.cuda_graph
        modes = [mode for mode in self.modes if mode is not MIXED and can >= GRAPH_LEVELS[mode]]
        for alone in (True, False):
            for mode in modes:
                tested = [step for step in self.tested() if step.mode is mode]
                step = tested[0] if alone else replace(tested[-1], behind=self.others(2, 60))
                sizes = [len(step.lengths), len(step.lengths) + 1, 64]
                rows = [size * step.new if mode in UNIFORM else step.rows + 3 * (size - sizes[0]) for size in sizes]
                shapes = list(zip(sizes, rows, strict=True))
                yield step, self.shuffled(*(replace(step, shape=shape) for shape in shapes for _ in range(2)))

    def chunks(self) -> Pairs:
        if EXTEND not in self.modes:
            return
        page, long, modes = self.page, self.longest, [mode for mode in (EXTEND, MIXED) if mode in self.modes]
        spans = [(0, 2 * page + 5), (0, min(150, long)), (0, min(600, long))]
        if self.paged:  # the end of a prompt whose other rows are cached
            spans.insert(1, (max(0, long - 2 * page - 5), long))
        for start, stop in spans:
            blocks = (block + more for block in (64, 128, 256, 512) for more in (-1, 0, 1))
            offsets = {1, 2, *range(page - 2, page + 3), *blocks}
            pages = range(-(-(start + 1) // page) * page, stop, page)
            ends = {start + each for each in offsets} | {(start + stop) // 2, stop - 2, stop - 1, *pages[-1:]}
            ends = {each for each in ends if start < each < stop}
            # Prefixes that a cache finds end with a page; most often, all of the prompt but its last page is found.
            hits = sorted(self.shuffled(*ends), key=lambda end: (end not in pages[-1:], end not in pages))
            kinds = [
                [Step(end, stop - end) for end in hits],
                [Step(end, 1, DECODE) for end in self.shuffled(*ends) if DECODE in self.modes],
                [Step(start, end - start) for end in self.shuffled(*ends)],
                [Step(end, 1, self.rng.choice(modes)) for end in self.shuffled(*ends)],
            ]
            yield Step(start, stop - start), [step for each in zip_longest(*kinds) for step in each if step][:24]

    def verify(self) -> Pairs:
        if not {VERIFY, DECODE} <= set(self.modes):
            return
        most = min(self.subject.capabilities.max_speculative_tokens, 64, self.longest // 2)
        for before in (max(self.page - 2, 0), self.edge(self.longest // 2), self.longest - most):
            sizes = {min(each, most) for each in (1, 2, 4, self.rng.randint(3, 7), self.rng.randint(8, 64))}
            for new in sorted(sizes | {most}):
                *rows, last = (Step(before + row, 1, DECODE) for row in range(new))
                yield Step(before, new, VERIFY), [last, *self.shuffled(*rows)]

    def all(self) -> Pairs:
        """Yield batches that differ in every condition of the claimed levels."""
        levels = self.subject.capabilities.invariant
        for _ in range(max(3, int(20 * self.subject.budget))):
            first = self.rng.choice(self.tested())
            yield first, [self._varied(first, levels) for _ in range(3)]

    def _varied(self, step: Step, levels: frozenset[str]) -> Step:
        rng = self.rng
        if "verify" in levels and step.mode is VERIFY and DECODE in self.modes and rng.random() < 0.5:
            step = replace(step, before=step.before + rng.randrange(step.new), new=1, mode=DECODE)
        elif "chunks" in levels and EXTEND in self.modes and step.mode is not VERIFY and rng.random() < 0.7:
            end = step.before + rng.randint(1, step.new)
            start = max(0, end - rng.choice((1, 1, self.edge(end), end)))
            modes = [mode for mode in (DECODE, MIXED, EXTEND) if mode in self.modes and (end - start == 1)]
            step = Step(start, end - start, rng.choice(modes or [EXTEND]))
        if "batch" in levels:
            exact = not self.bounds or rng.random() < 0.5
            step = replace(
                step,
                ahead=self.others(rng.choice((0, 0, 1, 5)), rng.choice((20, self.longest))),
                behind=self.others(rng.choice((0, 1, 3)), rng.choice((20, self.longest))),
                pages=rng.choice(("shuffled", "contiguous", "interleaved")),
                padded=rng.choice((0, 2)),
                exact=exact,
                seed=rng.randrange(1000),
            )
            if self.paged:
                width, given = rng.choice((0, 5)), rng.random() < 0.5
                step = replace(step, width=width, typical=given, slots=given, strided=given, shared=rng.random() < 0.3)
        return replace(step, lane=rng.randrange(2))


def difference(first: tuple[Step, Results], second: tuple[Step, Results]) -> str | None:
    """Describe the first common row whose bits differ; ``None`` if there is none."""
    start = max(first[0].before, second[0].before)
    stop = min(first[0].total, second[0].total)
    for name in first[1].keys() & second[1].keys():
        one, other = (found[name][start - step.before : stop - step.before] for step, found in (first, second))
        differing = (as_bytes(one) != as_bytes(other)).flatten(1).any(1).nonzero().flatten().tolist()
        if differing:
            row = differing[0]
            most = (one[row].double() - other[row].double()).abs().max().item()
            return (
                f"the {name} at position {start + row} of the request has other bits (by up to {most:.1e}); "
                f"{len(differing)} of {stop - start} common rows differ"
            )
    return None


def _compare(runner: StepRunner, comparison: Comparison) -> str | None:
    first = comparison.first, runner.run(comparison.first)
    for _ in range(comparison.repeats):
        found = difference(first, (comparison.second, runner.run(comparison.second)))
        if found is not None:
            return found
    return None


def _outcome(context: CheckContext, comparison: Comparison) -> str | None:
    """Run a comparison on a new backend; return the difference, or ``None``."""
    return _compare(make_runner(context, comparison.case, (comparison.first, comparison.second)), comparison)


def _fit(subject: Subject, level: str, comparison: Comparison) -> Comparison | None:
    """Return the comparison with open choices filled in for the backend; ``None`` if it is invalid or refused."""
    steps = comparison.first, comparison.second
    if level in ("run", "batch", "graph") and len({(step.before, step.new, step.mode) for step in steps}) > 1:
        return None
    if max(step.before for step in steps) >= min(step.total for step in steps):
        return None  # no common row
    if any((step.mode is DECODE and step.new > 1) or not step.new for step in steps):
        return None
    for step in steps:
        if step.shape is not None and (len(step.lengths) > step.shape[0] or step.rows > step.shape[1]):
            return None
    try:
        for step in steps:
            subject.fit(replace(comparison.case, lengths=step.lengths, mode=step.mode))
        return replace(comparison, case=subject.fit(comparison.case))
    except Unclaimed:
        return None


def _failure(context: CheckContext, level: str, comparison: Comparison, found: str) -> CheckFailure:
    """Shrink a comparison that differs, and describe both batches."""

    def differs(smaller: Comparison) -> bool:
        try:
            return _outcome(context, smaller) is not None
        except Exception:
            return False  # another failure

    origin = "it differed, but not each time"
    if differs(comparison):
        comparison = shrink(comparison, partial(_fit, context.subject, level), differs, PASSES)
        found, origin = _outcome(context, comparison) or found, "shrunk"
    failure = CheckFailure(f"{found}; {ADVICE[level]}. {comparison.describe()} ({origin})")
    failure.case = comparison.case.describe()
    failure.repeat = f"--case {shlex.quote(to_text(level, comparison))}"
    return failure


def _check_level(level: str, context: CheckContext) -> None:
    subject, seed = context.subject, context.case.seed
    if subject.random_case is not None:
        comparison = _fit(subject, level, from_text(subject.random_case)[1])
        if comparison is None:
            raise Unclaimed(f"it does not claim the comparison {subject.random_case}")
        if (found := _outcome(context, comparison)) is not None:
            raise _failure(context, level, comparison, found)
        return
    compared, digest, start = 0, None, time.process_time()
    layers = list(_layers(level, context))
    for number, case in enumerate(layers):
        end = start + SHARE * subject.budget * (number + 1) / len(layers)
        spent = time.process_time() - start
        least = compared + (LEAST if not number else LEAST // 3 if spent < subject.budget else 0)
        runners: dict[object, StepRunner] = {}
        pairs = list(getattr(Schedules(subject, case, seed + number), level)())
        turn = (3 if len(pairs) % 3 else 2) * number  # layers begin with other modes and lengths
        for first, steps in (*pairs[turn % len(pairs) :], *pairs[: turn % len(pairs)]) if pairs else ():
            if compared >= least and time.process_time() > end:
                break
            # A captured batch has the mode and the rows per request of the scene that it is captured in.
            shape = first.mode, first.new
            if (key := shape if level == "graph" else None) not in runners:
                alike = [each for one, others in pairs for each in (one, *others)]
                alike = [each for each in alike if key is None or (each.mode, each.new) == key]
                runners[key] = make_runner(context, case, alike)
            runner = runners[key]
            expected = runner.run(first, check=True)
            if digest is None:
                digest = zlib.crc32(b"".join(as_bytes(each).cpu().numpy().tobytes() for each in expected.values()))
            for place, step in enumerate(steps):
                if place >= LEAST // 3 and compared >= least and time.process_time() > end:
                    break
                compared += 1
                if (found := difference((first, expected), (step, runner.run(step)))) is not None:
                    repeats = REPEATS if level == "run" else 2
                    raise _failure(context, level, Comparison(case, first, step, repeats), found)
    if not compared:
        raise Unclaimed(f"it claims {level}, but no two batches that it serves differ in it")
    context.note = f"{compared} pairs of batches have the same bits; digest of the first batch {digest:08x}"


def _layers(level: str, context: CheckContext) -> Iterator[Case]:
    """Yield the check's layer, then those with other heads, dims, claimed features, dtypes and KV formats."""
    yield context.case
    for each in _variants(level, context.subject, context.case):
        try:
            yield context.subject.fit(each)
        except Unclaimed:
            continue


def _variants(level: str, subject: Subject, case: Case) -> list[Case]:
    can = subject.capabilities
    dtypes = _share(level, [replace(case, dtype=dtype) for dtype in sorted(can.dtypes) if dtype != case.dtype])
    if case.compressed is not None:
        all_entries = replace(case, compressed=CompressedDims(8), index=None, extras=case.extras - {"selected"})
        return [all_entries, *dtypes]
    if case.kind.is_linear or case.index is not None:
        return dtypes
    changes = [FEATURES[name][1] for name in ("window_and_cap", "sinks", "window", "cap")]
    # Large logits: a kernel that rescales its sums only then decides so for a tile.
    found = [replace(case, extras=case.extras - {"lse"}, magnitude=2.0), *(replace(case, **heads) for heads in HEADS)]
    found += [] if case.is_mla else _of_other_width(subject, case)
    for change in changes[: 2 if subject.device.type == "cpu" else 4]:
        made = {**change, "extras": case.extras | change.get("extras", frozenset())}
        found.append(replace(case, **made | ({"window": 20} if "window" in made else {})))
    found += dtypes
    held = [format.name for format in coded_formats(case.kind)]
    claimed = [name for name in held if can.kv_dtypes is None or name in can.kv_dtypes]
    return found + _share(level, [replace(case, kv_dtype=name, dtype=None) for name in sorted(claimed)])


def _of_other_width(subject: Subject, case: Case) -> list[Case]:
    """Return the layer with the largest other head dims that are served, for which kernels often have larger tiles."""
    for shaped in reversed([*subject.shapes(replace(case, dims=None))]):
        with suppress(Unclaimed):
            if shaped.dims != case.dims:
                return [subject.fit(shaped)]
    return []


def _share(level: str, layers: list[Case]) -> list[Case]:
    """Return the layers that a level's check runs: one, each level another one, and all of them with all levels."""
    turn = None if level == "all" else list(INVARIANCE).index(level) % max(len(layers), 1)
    return layers if turn is None else layers[turn : turn + 1]


def _applies(level: str, kind: AttentionKind, layer: Feature | None, subject: Subject) -> str | None:
    can = subject.capabilities
    if level != "all" and level not in can.invariant:
        return f"it does not claim invariance {level}"
    if not can.invariant:
        return "it claims no level of invariance"
    if layer is not None and layer not in can.features:
        return f"it does not serve {layer} layers"
    if level == "graph" and can.cuda_graph is GraphLevel.NEVER:
        return "it is never captured"
    if level == "graph" and kind.is_linear:
        return "captured linear layers are compared with float64 only"
    if level == "graph" and layer is Feature.COMPRESSED:
        return "captured compressed layers are not compared"
    if level == "verify" and not can.max_speculative_tokens:
        return "it verifies no drafts"
    return None


def _check_claim(level: str, kind: AttentionKind, layer: Feature | None, context: CheckContext) -> None:
    """Check a level on a layer that fits the backend's claims.

    The log-sum-exp is requested if it is claimed. The mode is decode unless the backend only prefills.
    """
    subject, can = context.subject, context.subject.capabilities
    case = Case(
        ((3, 1),),
        kind=kind,
        index=replace(INDEX, heads=5) if layer is Feature.SPARSE else None,
        extras=frozenset({"selected"} if layer is Feature.SPARSE else ()),
        invariant=can.invariant if level == "all" else frozenset({level}),
        seed=context.case.seed,
    )
    if "lse" in can.extras and not kind.is_linear:
        case = replace(case, extras=case.extras | {"lse"})
    if layer is Feature.COMPRESSED:
        case = replace(sized(case, subject.page_size, subject.longest), compressed=OVERLAPPING, window=6, sinks=True)
        case = replace(case, extras=case.extras | {"entries", "sinks"})
        if Feature.SPARSE in can.features:
            case = replace(case, index=ENTRY_INDEX, extras=case.extras | {"selected"})
    decodes = kind.is_linear or Role.DECODE in can.roles
    context.case = subject.fit(replace(case, mode=DECODE if decodes else EXTEND))
    _check_level(level, context)


def invariance_checks() -> Iterator[Check]:
    """Yield the checks of every attention kind and level."""
    together = "a row has the same bits if conditions of all claimed levels change together"
    for kind in AttentionKind:
        for layer in (None, Feature.SPARSE, Feature.COMPRESSED) if kind is AttentionKind.MLA else (None,):
            for level in (*INVARIANCE, "all"):
                yield Check(
                    f"{kind}.{'' if layer is None else f'{layer}.'}invariant.{level}",
                    f"invariant {level}",
                    f"a row has the same bits regardless of {INVARIANCE[level]}" if level != "all" else together,
                    None,
                    partial(_check_claim, level, kind, layer),
                    False,
                    partial(_applies, level, kind, layer),
                )
