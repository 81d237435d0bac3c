"""Checks of CUDA graphs: a batch is captured once and replayed with other lengths and pages.

On a CPU the contents of the graph are run eagerly at the same fixed addresses. This tests planning only, and the report
says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnplug import AttentionKind, ForwardBatch, ForwardExtras, ForwardMode, Geometry, GraphLevel
from attnplug.host import ModelAttention
from attnplug.machine.runtime import runtime_of
from attnplug_conformance.arithmetic import NAN, as_bytes, poison, relative_error, uninitialized_as_nan
from attnplug_conformance.case import LAYER, Case, Shape
from attnplug_conformance.check import Check, CheckContext, Measured, expect_error
from attnplug_conformance.checks.accuracy import FEATURES
from attnplug_conformance.diagnosis import check_lse, check_padding, check_result, explain
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.reference import tree_bits
from attnplug_conformance.scene import Scene
from attnplug_conformance.stored_rows import coded_formats
from attnplug_conformance.subject import Subject

AnyScene = TypeVar("AnyScene", bound=Scene)
DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND


class Capture:
    """A batch at fixed addresses in one lane, captured on a GPU. Other scenes' batches are copied into it."""

    def __init__(
        self,
        scene: Scene,
        lane: int = 0,
        attention: ModelAttention | None = None,
        requests: int | None = None,
        rows: int | None = None,
        lse: bool = False,
    ) -> None:
        self.scene = scene
        self.attention = attention or ModelAttention(scene.backend, scene.pools)
        self.fill = self.attention.padding_length()
        case, device, uniform = scene.case, scene.device, max(scene.new)
        ragged, count = case.mode is EXTEND, requests or len(scene.new)
        shape, rows = (count, scene.page_table.shape[1]), rows or sum(scene.new[:count])
        self.batch = ForwardBatch(
            Geometry(
                case.mode,
                torch.full(shape, scene.poisoned_page, dtype=torch.int32, device=device),
                torch.full((count,), self.fill, dtype=torch.int32, device=device),
                scene.page_size,
                rows=rows,
                max_seq_len=shape[1] * scene.page_size,
                max_new=rows if ragged else uniform,
                new_lens=torch.zeros(count, dtype=torch.int32, device=device) if ragged else None,
                captured=True,
                lane=lane,
                tree=None if case.trees is None else torch.full((count, uniform), -1, device=device),
            )
        )
        given = scene.inputs(max(rows, sum(scene.new)))
        q, k, v = (None if each is None else torch.zeros_like(each[:rows]) for each in given)
        assert q is not None and k is not None
        self.q, self.k, self.v = q, k, v
        sums = torch.full((rows, scene.layer.num_heads), NAN, device=device) if lse else None
        sinks = None if scene.sinks is None else scene.sinks.clone()
        self.extras = None if sinks is sums is None else ForwardExtras(sinks=sinks, lse=sums)
        self.graph: Any = None

    def reserve(self) -> Capture:
        self.attention.reserve(self.batch.batch_size + 1, self.batch.geometry.rows + 3)
        return self

    def capture(self) -> Capture:
        planned = self.attention.capture(self.batch, in_capture=True)
        self.plan = planned.attention
        runtime = runtime_of(self.scene.device)
        if runtime.graph is None:
            self.run()
            return self
        module = runtime.module
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            self.run()
        module.current_stream().wait_stream(stream)
        self.graph = runtime.graph()
        with module.graph(self.graph):
            self.run()
        return self

    def run(self) -> None:
        backend = self.scene.backend
        forward = backend.forward_decode if self.batch.forward_mode.is_decode else backend.forward_extend
        with uninitialized_as_nan(self.scene.device):
            self.attention.refill(self.batch)
            self.out = forward(self.q, self.k, self.v, self.scene.layer, self.batch, extras=self.extras)

    def put(self, other: Scene) -> None:
        """Copy another scene's batch and cache, possibly with fewer requests, to the captured addresses."""
        for target, source in self.copies(other):
            target.copy_(source)

    def copies(self, other: Scene) -> list[tuple[Tensor, Tensor]]:
        """Pairs of target and source tensors on the device: captured memory, and its new contents."""
        geometry, device = self.batch.geometry, other.device
        found = [
            (geometry.seq_lens, filled(geometry.seq_lens, self.fill, torch.tensor(other.totals, device=device))),
            (geometry.page_table, filled(geometry.page_table, self.scene.poisoned_page, other.page_table.to(device))),
        ]
        if geometry.new_lens is not None:
            found.append((geometry.new_lens, filled(geometry.new_lens, 0, torch.tensor(other.new, device=device))))
        if geometry.tree is not None and other.case.trees is not None:
            found.append((geometry.tree, filled(geometry.tree, -1, tree_bits(other.case.trees, device))))
        for memory, theirs in zip(self.scene.cache_tensors(LAYER), other.cache_tensors(LAYER), strict=True):
            source = torch.empty_like(memory)
            poison(source)
            as_bytes(source)[: len(theirs)] = as_bytes(theirs)
            found.append((memory, source))
        for target, given in zip((self.q, self.k, self.v), other.inputs(geometry.rows), strict=True):
            if target is not None and given is not None:
                found.append((target, given))
        if self.extras is not None and self.extras.sinks is not None and other.sinks is not None:
            found.append((self.extras.sinks, other.sinks))
        return found

    def replay(self) -> Tensor:
        self.plan_replay()
        return self.run_replay()

    def plan_replay(self) -> None:
        planned = self.attention.capture(self.batch)
        if planned.attention is not self.plan and planned.attention.new_slots is not None:
            before, after = self.plan.new_slots, planned.attention.new_slots
            if before is not None and before.data_ptr() != after.data_ptr():
                raise CheckFailure(
                    "a replay was planned in other memory than the capture; a graph needs fixed addresses"
                )

    def run_replay(self) -> Tensor:
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return self.out


def filled(like: Tensor, value: int, rows: Tensor) -> Tensor:
    """Copy of ``rows`` in the shape of ``like``, padded with ``value``."""
    made = torch.full_like(like, value)
    made[tuple(slice(size) for size in rows.shape)] = rows.to(made.dtype)
    return made


def others(context: CheckContext, scene: AnyScene) -> Iterator[AnyScene]:
    """Yield scenes to replay: short and long, with all or fewer requests. The first one is not the longest."""
    new, most = scene.case.lengths[0][1], min(before for before, _ in scene.case.lengths)
    for seed, prefixes in enumerate(([1, 16, 2, 0], [most, 5, 17, 31], [most // 2, 15], [15])):
        case = replace(scene.case, lengths=tuple((prefix, new) for prefix in prefixes), seed=seed + 1)
        if case.trees is not None:
            case = replace(case, trees=(case.trees * 2)[seed : seed + len(prefixes)])
        yield type(scene)(context.subject, case, backend=scene.backend)


def check_replayed(context: CheckContext, capture: Capture, other: Scene, out: Tensor) -> None:
    wanted, wanted_lse = other.wanted()
    check_result(capture.scene, out, capture.batch.geometry.rows)
    error = relative_error(out[: len(wanted)], wanted)
    if not error <= other.tolerance:
        first = "" if error != error else f": {explain(other, out[: len(wanted)], wanted, error)}"
        raise CheckFailure(
            f"a replay with other lengths and pages is wrong{first or ' (NaN)'}; compute what changes in "
            "init_forward_metadata_in_graph, from the lengths and pages on the device"
        )
    check_padding(out, len(wanted))
    if capture.extras is not None and capture.extras.lse is not None:
        with failure_prefix("in a replay with other lengths and pages"):
            check_lse(other, capture.extras.lse, wanted_lse)
    context.measured.append(Measured(len(wanted), max(other.totals), error, other.tolerance, 0.0, 0.0))
    written = set()
    for memory, theirs in zip(capture.scene.cache_tensors(LAYER), other.cache_tensors(LAYER), strict=True):
        for request, (start, _) in enumerate(other.case.lengths):
            pages, offsets = other.places(request, start, other.totals[request])
            written |= set(zip(pages.tolist(), offsets.tolist(), strict=True))
        changed = (as_bytes(memory)[: len(theirs)] != as_bytes(theirs)).flatten(2).any(-1)
        extra = {tuple(place) for place in changed.nonzero().tolist()} - written
        beyond = as_bytes(memory[len(theirs) :])
        if extra or not torch.equal(beyond, _poisoned(beyond, memory.dtype)):
            raise CheckFailure("a replay wrote to a cache row that is not new; padded requests must write nothing")


def _poisoned(like: Tensor, dtype: torch.dtype) -> Tensor:
    poisoned = torch.empty_like(like).view(dtype)
    poison(poisoned)
    return as_bytes(poisoned)


def _replays(context: CheckContext) -> None:
    scene = context.scene()
    capture = Capture(scene, lse="lse" in scene.case.extras).reserve().capture()
    for other in others(context, scene):
        capture.put(other)
        check_replayed(context, capture, other, capture.replay())


def _extends(context: CheckContext) -> None:
    """Captured extend: ``new_lens`` on the device assigns rows to requests at each replay."""
    scene = context.scene()
    capture = Capture(scene).reserve().capture()
    for seed, lengths in enumerate((((5, 3), (0, 7), (20, 1)), ((0, 12),), ((9, 2), (3, 2), (1, 2), (0, 2)))):
        other = Scene(context.subject, replace(scene.case, lengths=lengths, seed=seed + 1), backend=scene.backend)
        capture.put(other)
        check_replayed(context, capture, other, capture.replay())


def _eager_between(context: CheckContext) -> None:
    """An eager batch between capture and replay does not affect the captured one."""
    scene = context.scene()
    capture = Capture(scene).reserve().capture()
    other, eager = (next(others(context, scene)) for _ in range(2))
    capture.put(other)
    capture.attention.capture(capture.batch)
    eager.case = replace(eager.case, mode=scene.case.mode)
    eager.plan(eager.batch())
    check_replayed(context, capture, other, capture.replay())


def _lanes(context: CheckContext) -> None:
    """Two lanes captured; both are refilled before either runs."""
    scene = context.scene()
    attention = ModelAttention(scene.backend, scene.pools)
    first = Capture(scene, 0, attention).reserve().capture()
    second = Capture(scene, 1, attention).capture()
    batches = list(others(context, scene))[:2]
    for capture, other in zip((first, second), batches, strict=True):
        capture.put(other)
        attention.capture(capture.batch)
        attention.refill(capture.batch)
    first.put(batches[0])  # both lanes share the pool: restore the first lane's rows
    if first.graph is None:
        backend = scene.backend
        forward = backend.forward_decode if first.batch.forward_mode.is_decode else backend.forward_extend
        out = forward(first.q, first.k, first.v, scene.layer, first.batch)
    else:
        out = first.replay()
    wanted = batches[0].wanted()[0]
    check_result(scene, out, first.batch.geometry.rows)
    error = relative_error(out[: len(wanted)], wanted)
    if not error <= batches[0].tolerance:
        raise CheckFailure(
            f"captured batches of two lanes share memory: lane 0 is wrong by {error:.1e} after lane 1's refill"
        )


def _never_captured(context: CheckContext) -> None:
    scene = context.scene()
    attention = ModelAttention(scene.backend, scene.pools)
    expect_error(
        lambda: attention.capture(Capture(scene, 0, attention).batch),
        "it planned the replay of a shape that was never captured",
    )


def _no_sync(context: CheckContext) -> None:
    scene = context.scene()
    capture = Capture(scene).reserve().capture()
    for other in others(context, scene):
        capture.put(other)
        capture.replay()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        try:
            with forbid_sync():
                capture.attention.capture(capture.batch)
                assert capture.graph is not None
                capture.graph.replay()
        except RuntimeError as error:
            raise CheckFailure(f"planning a replay synchronizes with the device: {error}") from None
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        if made:
            raise CheckFailure(f"planning a replay allocated memory {made} times; reserve it in init_cuda_graph_state")


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Raise if an operation synchronizes with the GPU."""
    with warnings.catch_warnings(action="ignore"):  # torch warns at every change that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.set_sync_debug_mode("default")


def requires_graphs(level: GraphLevel, trees: bool = False, cuda: bool = False) -> Callable[[Subject], str | None]:
    def applies(subject: Subject) -> str | None:
        capabilities = subject.capabilities.cuda_graph
        if capabilities < level:
            return f"it claims CUDA graphs at level {capabilities.name}, not {level.name}"
        if trees and not subject.capabilities.trees:
            return "it does not claim trees"
        if cuda and subject.device.type != "cuda":
            return f"the device is {subject.device.type}: synchronization and allocations cannot be counted"
        return None

    return applies


def graph_checks(kind: AttentionKind) -> Iterator[Check]:
    def of(mode: ForwardMode, new: int, level: GraphLevel, **changes: Any) -> Shape:
        return lambda p, longest: Case(
            tuple((max(longest // 4, 60), new) for _ in range(4)), mode, kind, graph=level, **changes
        )

    decode, uniform, always = GraphLevel.DECODE, GraphLevel.UNIFORM, GraphLevel.ALWAYS
    forest = ((-1, 0, 0, 1), (-1, -1, 1, 1), (-1, 0, 1, 2), (-1, 0, 1, 0))
    replayed = "a captured batch is replayed with other lengths and pages, and fewer requests"
    yield Check(
        f"{kind}.graph.decode", "graphs", replayed, of(DECODE, 1, decode), _replays, True, requires_graphs(decode)
    )
    yield Check(
        f"{kind}.graph.verify", "graphs", replayed, of(VERIFY, 3, uniform), _replays, False, requires_graphs(uniform)
    )
    special = [
        *((name, f"of layers with a {name.rstrip('s')}", FEATURES[name][1]) for name in ("window", "cap", "sinks")),
        ("lse", "with its log-sum-exp", {"extras": frozenset({"lse"})}),
        *((str(format), f"over a cache in {format}", {"kv_dtype": format.name, "kv_scales": (0.4, 1.7)})
          for format in coded_formats(kind) if format.layer_scale),
    ]  # fmt: skip
    for name, what, changes in special:
        yield Check(
            f"{kind}.graph.{name}",
            "graphs",
            f"a captured batch {what} is replayed with other lengths and pages",
            of(DECODE, 1, decode, **changes),
            _replays,
            False,
            requires_graphs(decode),
        )
    yield Check(
        f"{kind}.graph.trees",
        "graphs",
        "trees of a captured batch change from replay to replay",
        of(VERIFY, 4, uniform, trees=forest),
        _replays,
        False,
        requires_graphs(uniform, trees=True),
    )
    yield Check(
        f"{kind}.graph.extend",
        "graphs",
        "a captured extend takes the new tokens of each request from the device",
        of(EXTEND, 3, always),
        _extends,
        False,
        requires_graphs(always),
    )
    yield Check(
        f"{kind}.graph.eager_between",
        "graphs",
        "an eager batch does not affect a captured one",
        of(DECODE, 1, decode),
        _eager_between,
        False,
        requires_graphs(decode),
    )
    yield Check(
        f"{kind}.graph.lanes",
        "graphs",
        "captured batches of two lanes share no memory",
        of(DECODE, 1, decode, lanes=2),
        _lanes,
        False,
        requires_graphs(decode),
    )
    yield Check(
        f"{kind}.graph.never_captured",
        "graphs",
        "a replay of a shape that was never captured is an error",
        of(DECODE, 1, decode),
        _never_captured,
        False,
        requires_graphs(decode),
    )
    yield Check(
        f"{kind}.graph.no_wait",
        "graphs",
        "planning a replay neither synchronizes nor allocates",
        of(DECODE, 1, decode),
        _no_sync,
        False,
        requires_graphs(decode, cuda=True),
    )
