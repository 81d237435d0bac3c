"""Random cases of everything that a spec claims, within a budget of time. A failing case is shrunk."""

from __future__ import annotations

import shlex
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attnplug import AttentionKind, ForwardBatch, ForwardExtras, ForwardMode, Geometry
from attnplug.declare.errors import describe_error
from attnplug.host import ModelAttention
from attnplug.machine.runtime import runtime_of
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import LAYER
from attnplug_conformance.check import Check, CheckContext, expect_error
from attnplug_conformance.checks.cache import check_written, uncontiguous
from attnplug_conformance.checks.graphs import Capture, check_replayed
from attnplug_conformance.checks.linear import check_accurate, check_two_steps, check_verify
from attnplug_conformance.checks.mla_paths import check_path
from attnplug_conformance.checks.sparse import SparseScene, check_sparse
from attnplug_conformance.diagnosis import check_result
from attnplug_conformance.draw import draw
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.random_case import Drawn, Way, fit, from_text, to_text
from attnplug_conformance.reference import tree_bits
from attnplug_conformance.runner import location
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.shrink import PASSES, shrink
from attnplug_conformance.subject import Subject, Unclaimed

SHARE = 1 / 30
"""Share of the budget that one random case may cost, so that there are many, and the last one ends in time."""
MIN_SECONDS = 0.03
"""Cost up to which cases are drawn even if the budget is smaller."""
WARM_UP = 6
"""Number of cases until the largest size is drawn. The first ones measure how fast the backend is."""
MAX_MISSES = 400
"""Number of draws in a row that are refused or too expensive, after which drawing stops."""


# Running one case


def run_drawn(context: CheckContext, drawn: Drawn, *, diagnosed: bool = True) -> None:
    """Run one random case. Raises :class:`CheckFailure`; the diagnosis costs many times the case itself."""
    subject, case = context.subject, drawn.case
    if case.kind.is_linear:
        run = check_two_steps if drawn.way is Way.TWO_STEPS else check_accurate
        run = check_verify if case.mode is ForwardMode.TARGET_VERIFY else run
        return run(CheckContext(subject, case, context.measured))
    scene = (Scene if case.index is None else SparseScene)(subject, case)
    scene.diagnosed = diagnosed
    if isinstance(scene, SparseScene):
        check_sparse(context, scene, lse=drawn.lse, out=drawn.out)
    elif drawn.way is Way.CAPTURED:
        _run_captured(context, drawn, scene)
    elif drawn.way is Way.PATH:
        assert drawn.path is not None
        check_path(drawn.path, context, scene, drawn.chunk)
    elif drawn.way is Way.RUN:
        _run_batch(context, drawn, scene)
    else:
        _run_two_batches(context, drawn, scene)


def _run_batch(context: CheckContext, drawn: Drawn, scene: Scene) -> None:
    if not drawn.saved:
        scene.store(LAYER, [(before, before + new) for before, new in scene.case.lengths])
    before, batch = scene.snapshot(), scene.batch()
    _plan(drawn, scene, batch)
    q, k, v = scene.inputs(batch.num_tokens)
    inputs = uncontiguous(q, k, v) if drawn.strided else (q, k, v)
    extras = _extras(drawn, scene, batch)
    out = scene.forward(batch, inputs if drawn.saved else (inputs[0], None, None), save=drawn.saved, extras=extras)
    context.check_output(scene, Output(out, extras.lse, 0.0, 0.0))
    if extras.out is not None and out.data_ptr() != extras.out.data_ptr():
        raise CheckFailure("extras.out was given, but the result is in other memory; write it to out, and return out")
    check_written(scene, before, saved=drawn.saved)


def _plan(drawn: Drawn, scene: Scene, batch: ForwardBatch) -> None:
    """Plan a batch. With ``late_tree``, its trees have only roots while it is planned."""
    tree = batch.geometry.tree
    if tree is None or not drawn.late_tree or scene.backend.claims.needs_cpu_seq_lens:
        scene.plan(batch)
        return
    with _late_tree(tree):
        scene.plan(batch)


@contextmanager
def _late_tree(tree: Tensor) -> Iterator[None]:
    """Replace trees by roots that attend only to themselves, until the end of the block."""
    written = tree.clone()
    tree.copy_(torch.ones_like(tree) << torch.arange(tree.shape[1], device=tree.device))
    yield
    tree.copy_(written)


def _extras(drawn: Drawn, scene: Scene, batch: ForwardBatch) -> ForwardExtras:
    shape, device = (batch.num_tokens, scene.layer.num_heads), scene.device
    return ForwardExtras(
        lse=torch.full(shape, NAN, device=device) if drawn.lse else None,
        out=torch.full((*shape, scene.widths[1]), NAN, dtype=scene.dtype, device=device) if drawn.out else None,
    )


@dataclass(frozen=True)
class _Part:
    """Consecutive requests of a scene, as a batch of their own."""

    scene: Scene
    requests: slice
    mode: ForwardMode
    lane: int

    @property
    def rows(self) -> slice:
        new, stop = self.scene.new, self.requests.stop
        return slice(sum(new[: self.requests.start]), sum(new[:stop]))

    def batch(self) -> ForwardBatch:
        scene, case, part = self.scene, self.scene.case, self.requests
        made = Geometry.of_lengths(
            self.mode,
            scene.page_table[part].to(scene.device),
            scene.new[part],
            scene.totals[part],
            scene.page_size,
            lane=self.lane,
            tree=None if case.trees is None else tree_bits(case.trees[part], scene.device),
        )
        if not case.exact:
            made = replace(made, host=None, max_seq_len=scene.page_table.shape[1] * scene.page_size)
        return ForwardBatch(made, input_ids=torch.zeros(made.rows, dtype=torch.int64, device=scene.device))

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = self.scene.inputs(sum(self.scene.new))
        return q[self.rows].clone(), k[self.rows].clone(), None if v is None else v[self.rows].clone()


def _run_two_batches(context: CheckContext, drawn: Drawn, scene: Scene) -> None:
    """Plan both batches, then run them in turn: in one lane, or in two."""
    lanes = (0, 1) if drawn.way is Way.LANES else (0, 0)
    ends = (slice(0, drawn.split), slice(drawn.split, len(scene.new)))
    modes = (scene.case.mode, drawn.second or scene.case.mode)
    parts = [_Part(scene, *each) for each in zip(ends, modes, lanes, strict=True)]
    before, wanted = scene.snapshot(), scene.wanted()
    batches, inputs = [part.batch() for part in parts], [part.inputs() for part in parts]
    for batch in batches:
        _plan(drawn, scene, batch)
    module = runtime_of(scene.device).module if drawn.way is Way.LANES else None
    streams = [nullcontext() if module is None else module.stream(module.Stream()) for _ in parts]
    scene.now()  # waits for the device
    outs = []
    for turn, number in enumerate((0, 1, 0, 1)[: 3 if drawn.way is Way.SEQUENCE else 4]):
        extras = _extras(drawn, scene, batches[number])
        with streams[number]:
            outs.append((number, scene.forward(batches[number], inputs[number], extras=extras), extras.lse))
        if not turn and drawn.refused:
            _refuse(drawn.refused, scene, parts[0])
    scene.now()
    other = "in another lane" if drawn.way is Way.LANES else "on the same backend"
    with failure_prefix(f"with another batch {other}"):
        for number, out, lse in outs:
            _check_part(scene, parts[number], out, lse, wanted)
        check_written(scene, before)


def _check_part(scene: Scene, part: _Part, out: Tensor, lse: Tensor | None, wanted: tuple[Tensor, Tensor]) -> None:
    rows = part.rows
    check_result(scene, out, rows.stop - rows.start)
    for name, found, right, allowed in (
        ("result", out, wanted[0][rows], scene.tolerance),
        ("log-sum-exp", lse, wanted[1][rows], max(scene.tolerance, 1e-5)),
    ):
        error = 0.0 if found is None else relative_error(found, right)
        if not error <= allowed:
            first, stop = part.requests.start, part.requests.stop
            raise CheckFailure(
                f"the {name} of the {part.mode} of requests {first} to {stop - 1} is wrong by {error:.2e}; "
                f"{allowed:.2e} is allowed"
            )


def _refuse(reason: str, scene: Scene, part: _Part) -> None:
    """Run a batch that must be refused: without a plan, with a stale one, or with fewer rows than planned."""
    batch, (q, k, v) = part.batch(), part.inputs()
    if reason == "short" and not len(q):
        return
    if reason != "missing":
        scene.plan(batch)
    if reason == "stale":
        batch.geometry = replace(batch.geometry)
    if reason == "short":
        q, k, v = q[:-1], k[:-1], None if v is None else v[:-1]
    expect_error(lambda: scene.forward(batch, (q, k, v)), f"it ran a batch whose plan is {reason}")


def _run_captured(context: CheckContext, drawn: Drawn, scene: Scene) -> None:
    """Capture all shapes, then replay them."""
    attention = ModelAttention(scene.backend, scene.pools)
    captures = [Capture(scene, 0, attention, requests, rows) for requests, rows in drawn.shapes]
    attention.reserve(max(requests for requests, _ in drawn.shapes), max(rows for _, rows in drawn.shapes))
    for capture in captures:
        capture.capture()
    for number, (shape, lengths, trees) in enumerate(drawn.replays):
        case = replace(drawn.case, lengths=lengths, trees=trees, seed=drawn.case.seed + number + 1)
        other, capture = Scene(context.subject, case, backend=scene.backend), captures[shape]
        other.diagnosed = scene.diagnosed
        capture.put(other)
        tree = capture.batch.geometry.tree
        if drawn.late_tree and tree is not None:
            with _late_tree(tree):
                capture.plan_replay()
            out = capture.run_replay()
        else:
            out = capture.replay()
        with failure_prefix(f"replay {number + 1} of {len(drawn.replays)}, with {len(captures)} shapes captured"):
            check_replayed(context, capture, other, out)


# Drawing, within a budget


class _Clock:
    """Time spent, and a prediction of each case's cost from its estimate and the cost of earlier cases."""

    def __init__(self, device: torch.device, budget: float) -> None:
        # CPU time does not depend on other processes; a GPU's work is not CPU time.
        self._compiles = device.type == "cuda"
        self.now = time.perf_counter if self._compiles else time.process_time
        self.start, self.budget, self.slowdown = self.now(), budget, 1.0

    @property
    def spent(self) -> float:
        return self.now() - self.start

    def affords(self, seconds: float) -> bool:
        affords = self.slowdown * seconds <= min(self.budget / 8, 1.2 * (self.budget - self.spent))
        if self._compiles and not affords:
            self.slowdown *= 0.5  # most of a case's time was compilation, which the next case may not need
        return affords

    def record(self, estimated: float, measured: float) -> None:
        """Remember how much slower than its estimate a case was; a faster one lowers the factor slowly."""
        self.slowdown = max(measured / estimated, 0.85 * self.slowdown)


def _outcome(context: CheckContext, drawn: Drawn, *, diagnosed: bool = False) -> str | None:
    """Run a case; returns the failure's message, or ``None`` if it passes."""
    try:
        with warnings.catch_warnings(action="ignore"):  # results count: Triton's interpreter warns of each overflow
            run_drawn(context, drawn, diagnosed=diagnosed)
    except CheckFailure as failure:
        return str(failure)
    except Unclaimed:
        return None
    except (Exception, SystemExit) as error:
        return f"it raised {describe_error(error)}{location(error)}"
    return None


def first_failure(context: CheckContext, kind: AttentionKind, seed: int) -> Drawn | None:
    """Run random cases until one fails or the budget is spent. Raises :class:`Unclaimed` if none can run."""
    subject = context.subject
    budget = subject.budget / len(subject.capabilities.kinds)
    clock, ran, index, misses = _Clock(subject.device, budget), 0, 0, 0
    while clock.spent < budget and misses < MAX_MISSES:
        largest = max(SHARE * budget, MIN_SECONDS) * min(1.0, 2.0 ** (index - WARM_UP))
        drawn = draw(subject, kind, seed, index, largest)
        index, misses = index + 1, misses + 1
        if drawn is None or not clock.affords(drawn.seconds):
            continue
        started, misses = clock.now(), 0
        failed = _outcome(context, drawn) is not None
        clock.record(drawn.seconds, clock.now() - started)
        ran += 1
        if failed:
            return drawn
    if not ran:
        raise Unclaimed(f"{budget:.2g} s suffice for no random case")
    context.note = f"{ran} random cases in {clock.spent:.1f} s, seed {seed}"
    return None


def _random(kind: AttentionKind, context: CheckContext) -> None:
    subject, seed = context.subject, context.case.seed
    if subject.random_case is not None:
        given = from_text(subject.random_case)
        drawn = fit(subject, given) if given.case.kind is kind else None
        if drawn is None:
            raise Unclaimed(f"it does not claim the random case {subject.random_case}")
        message = _outcome(context, drawn, diagnosed=True)
        origin = ""
    else:
        found = first_failure(context, kind, seed)
        if found is None:
            return
        drawn = shrink(found, partial(fit, subject), lambda smaller: _outcome(context, smaller) is not None, PASSES)
        message = _outcome(context, drawn, diagnosed=True) or "it fails, but not each time"
        origin = f" (a random case of seed {seed}, shrunk)"
    if message is not None:
        failure = CheckFailure(f"{message}{origin}")
        failure.case, failure.repeat = drawn.describe(), f"--case {shlex.quote(to_text(drawn))}"
        raise failure


def _applies(kind: AttentionKind, subject: Subject) -> str | None:
    if not subject.budget:
        return "the budget for random cases is 0"
    if all(draw(subject, kind, 0, index, 0.01) is None for index in range(3)):
        return f"it refuses every random case of kind {kind}"
    return None


def random_checks() -> Iterator[Check]:
    for kind in AttentionKind:
        yield Check(
            f"{kind}.random",
            "random",
            "random cases of everything that is claimed agree with float64",
            None,
            partial(_random, kind),
            True,
            partial(_applies, kind),
        )
