"""Checks of linear attention: results and states against float64, verify and commit, padding, plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, GraphLevel, ModelSpec
from attnplug.machine.runtime import runtime_of
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import FIRST, LAYER, Case, Shape, always
from attnplug_conformance.check import Check, CheckContext, Measured, expect_error
from attnplug_conformance.checks.graphs import requires_graphs
from attnplug_conformance.diagnosis import check_settings_unchanged
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.linear_scene import PAGE, LinearScene, tokens_of
from attnplug_conformance.subject import Subject

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY = ForwardMode.TARGET_VERIFY
STRONG = 8.0
"""Factor by which decay is stronger than in other cases: 64 tokens then decay by exp(-256)."""
_READ = {DECODE: "state_slots", EXTEND: "state_slots and new_lens"}
KINDS = tuple(kind for kind in AttentionKind if kind.is_linear)


def _scene(context: CheckContext) -> LinearScene:
    return LinearScene(context.subject, context.case)


def _measure(context: CheckContext, scene: LinearScene, error: float) -> None:
    context.measured.append(Measured(scene.rows, max(scene.new, default=0), error, scene.tolerance, 0.0, 0.0))


def check_accurate(context: CheckContext) -> None:
    scene = _scene(context)
    _measure(context, scene, scene.check_results(*scene.run()))


def _wide(context: CheckContext) -> None:
    with failure_prefix("in slots whose offsets exceed 32 bits; compute slot * stride in 64 bits"):
        check_accurate(context)


def check_two_steps(context: CheckContext) -> None:
    """Extend, then decode from the resulting states."""
    scene = _scene(context)
    scene.check_results(*scene.run())
    later = replace(scene.case, lengths=tuple((1, 1) for _ in scene.new), mode=DECODE, seed=3)
    second = LinearScene(context.subject, later, backend=scene.backend)
    second.pool, second.pools, second.slots = scene.pool, scene.pools, scene.slots
    second.before = [[states[slot].clone() for slot in scene.slots] for states in scene.states(LAYER)]
    with failure_prefix("in the step after an extend"):
        _measure(context, second, second.check_results(*second.run()))


def check_verify(context: CheckContext) -> None:
    scene = _scene(context)
    before, batch = scene.snapshot(), scene.batch()
    attention = scene.attention()
    attention.plan(batch)
    conv, out = scene.forward(attention, batch)
    if not scene.unchanged(before):
        raise CheckFailure("a target verify changed states; commit_states advances them by the accepted rows")
    accepted = [count % (new + 1) for count, new in zip(cycle((2, 0, 4, 1)), scene.new, strict=False)]
    attention.commit_states(batch, torch.tensor(accepted, device=scene.device))
    with failure_prefix(f"after commit_states with {accepted} rows accepted"):
        scene.check_states(accepted)
    outs = scene.wanted()[0]
    for found, right, what in ((out, outs[0], "the recurrence"), (conv, outs[1], "the convolution")):
        if found is not None and torch.cat(right).shape == found.shape:
            error = relative_error(found.flatten(1).unsqueeze(1), torch.cat(right).flatten(1).unsqueeze(1))
            if not error <= scene.tolerance:
                raise CheckFailure(f"in a target verify {what} is wrong by {error:.1e}")
            _measure(context, scene, error)


def _verify_of_all_layers(context: CheckContext) -> None:
    """One plan verifies two layers, and one commit advances the states of both."""
    scene = _scene(context)
    first = scene.case.layers[0]
    for target, source in zip(scene.states(FIRST), scene.states(LAYER), strict=True):
        target.copy_(source)
    attention, batch = scene.attention(), scene.batch()
    attention.plan(batch)
    for layer in (first, scene.layer):
        scene.forward(attention, batch, layer)
    accepted = [count % (new + 1) for count, new in zip(cycle((2, 0, 4, 1)), scene.new, strict=False)]
    attention.commit_states(batch, torch.tensor(accepted, device=scene.device))
    right = [states for states in scene.wanted(accepted)[1] if states]
    for states, wanted in zip(scene.states(FIRST), right, strict=True):
        for slot, should in zip(scene.slots, wanted, strict=True):
            if not relative_error(states[slot], should) <= scene.tolerance:
                raise CheckFailure(
                    f"commit_states left a wrong state in layer {FIRST}; it must advance the states of all layers"
                )
        states.fill_(NAN)
    scene.check_states(accepted)


def _verify_two_alive(context: CheckContext) -> None:
    """Verify two batches, then commit the states of each."""
    scene = _scene(context)
    half = len(scene.new) // 2
    cut = sum(scene.new[:half])
    attention, accepted = scene.attention(), [2, 0, 4, 1]
    both = list(scene.batch().split(half, lanes=(0, 1)))
    for batch in both:
        attention.plan(batch)
    x, inputs = scene.x, scene.inputs
    for batch, rows in zip(both, (slice(0, cut), slice(cut, None)), strict=True):
        scene.x = None if x is None else x[rows]
        scene.inputs = None if inputs is None else tokens_of(inputs, rows, scene.device)
        scene.forward(attention, batch)
    scene.x, scene.inputs = x, inputs
    for batch, counts in zip(both, (accepted[:half], accepted[half:]), strict=True):
        attention.commit_states(batch, torch.tensor(counts, device=scene.device))
    with failure_prefix("with two batches verified before either was committed"):
        scene.check_states(accepted)


def _replans(context: CheckContext) -> None:
    """A batch with as many requests and rows as an earlier one, but other state slots."""
    scene = _scene(context)
    scene.check_results(*scene.run())
    other = LinearScene(context.subject, replace(scene.case, seed=11), backend=scene.backend)
    for target, source in zip(scene.states(LAYER), other.states(LAYER), strict=True):
        target.copy_(source)
    other.pool, other.pools = scene.pool, scene.pools
    with failure_prefix(
        "a batch with as many requests and rows as an earlier one ran by the earlier plan; plan each "
        "batch from its own geometry"
    ):
        _measure(context, other, other.check_results(*other.run()))


def _strided(context: CheckContext) -> None:
    """Inputs as models have them: slices of one projection."""
    scene = _scene(context)
    if scene.x is not None:
        scene.x = _column_slice(scene.x)
    if (kept := scene.inputs) is not None:
        q, k, v = (_column_slice(each) for each in (kept.q, kept.k, kept.v))
        scene.inputs = replace(kept, q=q, k=k, v=v)
    batch, attention = scene.batch(), scene.attention()
    attention.plan(batch)
    conv = out = None
    if scene.x is not None:
        conv = attention.convolve(scene.x, scene.weight, scene.bias, scene.layer, batch, silu=scene.case.silu)
    if scene.inputs is not None:
        out = attention.attend_linear(scene.inputs, scene.layer, batch)
    with failure_prefix("with rows that are not contiguous; use their strides, or copy them"):
        scene.check_results(conv, out)


def _column_slice(rows: torch.Tensor) -> torch.Tensor:
    """Copy of rows as the leading columns of wider rows."""
    flat = rows.flatten(1)
    return torch.cat([flat, flat + 1], 1)[:, : flat.shape[1]].view(rows.shape)


def _strong_decay(context: CheckContext) -> None:
    """Decays whose products underflow float32, as in trained models."""
    scene = _scene(context)
    if scene.inputs is not None:
        scene.inputs = replace(scene.inputs, log_decay=scene.inputs.log_decay * STRONG)
    _measure(context, scene, scene.check_results(*scene.run()))


def _idle(context: CheckContext) -> None:
    scene = _scene(context)
    before = scene.snapshot()
    table = torch.zeros(0, 1, dtype=torch.int32, device=scene.device)
    slots = torch.zeros(0, dtype=torch.int64, device=scene.device)
    for rows in (0, 2):
        geometry = Geometry.of_lengths(ForwardMode.IDLE, table, [], [], PAGE, state_slots=slots)
        batch = ForwardBatch(geometry, input_ids=torch.zeros(rows, dtype=torch.int64, device=scene.device))
        attention = scene.attention()
        attention.plan(batch)
        empty = LinearScene(context.subject, replace(scene.case, lengths=()), backend=scene.backend)
        for found in empty.forward(attention, batch):
            if found is not None and (found.shape[0] != rows or (found != 0).any()):
                raise CheckFailure("an idle batch gives rows that are not zero")
    if not scene.unchanged(before):
        raise CheckFailure("an idle batch changed states")


def _two_alive(context: CheckContext) -> None:
    scene = _scene(context)
    attention = scene.attention()
    first = scene.batch()
    attention.plan(first)
    other = LinearScene(context.subject, replace(scene.case, lengths=((1, 1),) * 2, mode=DECODE), backend=scene.backend)
    attention.plan(other.batch())
    with failure_prefix("with two plans alive, the first batch ran by the second plan"):
        scene.check_results(*scene.forward(attention, first))


def _unchanged(context: CheckContext) -> None:
    check_settings_unchanged(context.subject, lambda: _only_results(context))


def _only_results(context: CheckContext) -> None:
    scene = _scene(context)
    given = [t for t in (scene.x, scene.weight, scene.bias) if t is not None]
    if scene.inputs is not None:
        kept = scene.inputs
        given += [t for t in (kept.q, kept.k, kept.v, kept.log_decay, kept.beta) if t is not None]
    copies = [tensor.clone() for tensor in given]
    batch, attention = scene.batch(), scene.attention()
    geometry = batch.geometry
    slots, lens = geometry.state_slots, geometry.seq_lens.clone()
    assert slots is not None
    before = slots.clone()
    attention.plan(batch)
    if scene.x is not None:
        attention.convolve(scene.x, scene.weight, scene.bias, scene.layer, batch, silu=scene.case.silu)
    if scene.inputs is not None:
        attention.attend_linear(scene.inputs, scene.layer, batch)
    if not all(torch.equal(old, new) for old, new in zip(copies, given, strict=True)):
        raise CheckFailure("it changed its inputs, which the caller owns")
    if not torch.equal(slots, before) or not torch.equal(geometry.seq_lens, lens):
        raise CheckFailure("it changed the batch's geometry, which the caller owns")


def _results_kept(context: CheckContext) -> None:
    scene = _scene(context)
    attention, batch = scene.attention(), scene.batch()
    attention.plan(batch)
    first = [t for t in scene.forward(attention, batch) if t is not None]
    copies = [tensor.clone() for tensor in first]
    scene.forward(attention, batch)
    if not all(torch.equal(old, new) for old, new in zip(copies, first, strict=True)):
        raise CheckFailure("the output is overwritten by the next call; allocate it per call")


def _plans(context: CheckContext) -> None:
    scene, other = _scene(context), _scene(context)
    attention, unplanned = scene.attention(), scene.batch()
    expect_error(lambda: scene.forward(attention, unplanned), "it ran a batch that has no plan")
    theirs = other.batch()
    other.attention().plan(theirs)
    expect_error(lambda: scene.forward(attention, theirs), "it accepted a plan of another instance")
    planned = scene.batch()
    attention.plan(planned)
    scene.x = None if scene.x is None else scene.x[:-1]
    if scene.inputs is not None:
        scene.inputs = tokens_of(scene.inputs, slice(0, scene.rows - 1))
    planned.input_ids = planned.input_ids[:-1] if planned.input_ids is not None else None
    expect_error(lambda: scene.forward(attention, planned), "it accepted fewer rows than planned")


def _hybrid(context: CheckContext) -> None:
    """Run the backend inside the hybrid wrapper that hosts use."""
    scene = _scene(context)
    model = ModelSpec("conformance", "conformance", scene.case.layers, 4096)
    scene.backend = HybridLinearBackend(None, scene.backend, model)
    with failure_prefix("inside the hybrid wrapper"):
        scene.check_results(*scene.run())


def _built_twice(context: CheckContext) -> None:
    first, second = _scene(context), LinearScene(context.subject, replace(context.case, seed=9))
    second.check_results(*second.run())
    with failure_prefix("after a second instance was built in this process, the first is wrong"):
        first.check_results(*first.run())


def _graph(context: CheckContext) -> None:
    """Captured decode or extend: state slots, and an extend's lengths, change between replays; padded requests have
    slot -1."""
    scene = _scene(context)
    attention = scene.attention()
    requests, rows, mode = len(scene.new), scene.rows, context.case.mode
    attention.reserve(requests, rows)
    device = scene.device
    new_lens = torch.zeros(requests, dtype=torch.int32, device=device) if mode is EXTEND else None
    slots = torch.full((requests,), -1, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        Geometry(
            mode,
            torch.zeros(requests, 256, dtype=torch.int32, device=device),
            torch.full((requests,), attention.padding_length(), dtype=torch.int32, device=device),
            PAGE,
            rows=rows,
            max_seq_len=256 * PAGE,
            max_new=1 if new_lens is None else rows,
            new_lens=new_lens,
            captured=True,
            state_slots=slots,
        )
    )
    attention.capture(batch, in_capture=True)

    def run() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        attention.refill(batch)
        return scene.forward(attention, batch)

    graph, outs = None, run()
    if (runtime := runtime_of(device)).graph is not None:
        graph = runtime.graph()
        with runtime.module.graph(graph):
            outs = run()
    real = requests - 1
    live = sum(scene.new[:real])
    slots[:real] = torch.tensor(scene.slots[:real], device=device)
    batch.geometry.seq_lens[:real] = torch.tensor(
        [before + new for before, new in context.case.lengths[:real]], dtype=torch.int32, device=device
    )
    if new_lens is not None:
        new_lens[:real] = torch.tensor(scene.new[:real], dtype=torch.int32, device=device)
    attention.capture(batch)
    if graph is None:
        outs = run()
    else:
        graph.replay()
    wanted, after = scene.wanted()
    for found, right in zip(outs, wanted[::-1], strict=True):
        if found is None:
            continue
        error = relative_error(found[:live].flatten(1).unsqueeze(1), torch.cat(right)[:live].flatten(1).unsqueeze(1))
        if not error <= scene.tolerance:
            raise CheckFailure(f"a replay with other slots is wrong by {error:.1e}; read {_READ[mode]} on the device")
        if (found[live:] != 0).any():
            raise CheckFailure(
                "the output of a padded request or row of a replay is not zero; padded requests have slot -1"
            )
    for states, right, before in zip(scene.states(LAYER), [a for a in after if a], scene.before, strict=True):
        for request, slot in enumerate(scene.slots):
            should = right[request] if request < real else before[request].double()
            if not relative_error(states[slot], should) <= scene.tolerance:
                raise CheckFailure("a replay left a wrong state; padded requests have slot -1 and no state")
        if not states[scene.others].isnan().all():
            raise CheckFailure("a replay wrote a state that no request has; padded requests have slot -1 and no state")


def linear_checks() -> Iterator[Check]:
    for kind in KINDS:
        yield from _checks_of(kind)


def _checks_of(kind: AttentionKind) -> Iterator[Check]:
    claim = "linear"

    def of(*lengths: tuple[int, int], mode: ForwardMode = EXTEND, **changes: Any) -> Shape:
        return always(replace(Case(lengths, mode, kind), **changes))

    def check(
        name: str,
        requirement: str,
        case: Shape,
        run: Callable[[CheckContext], None],
        quick: bool = False,
        applies: Callable[[Subject], str | None] = lambda subject: None,
        claim: str = claim,
    ) -> Check:
        return Check(f"{kind}.{name}", claim, requirement, case, run, quick, applies)

    some = ((5, 3), (0, 7), (9, 1), (0, 20))
    one = ((5, 1), (0, 1), (9, 1), (2, 1))
    right = "outputs and states are right"
    yield check("decode", right, of(*one, mode=DECODE), check_accurate, True)
    yield check("decode.one", right, of((7, 1), mode=DECODE), check_accurate)
    yield check("decode.many", right, of(*[(request % 3, 1) for request in range(11)], mode=DECODE), check_accurate)
    yield check("extend", right, of(*some), check_accurate, True)
    yield check("extend.one", "one request with fewer rows than a convolution is wide", of((5, 2)), check_accurate)
    yield check("extend.no_state", right, of((0, 9), (0, 4)), check_accurate)
    yield check("extend.long", "requests longer than a chunk of 64", of((3, 65), (0, 130), (1, 64)), check_accurate)
    yield check("extend.many", right, of(*[(request % 3, 1 + request % 2) for request in range(20)]), check_accurate)
    if kind is not AttentionKind.SHORT_CONV:
        yield check("strong_decay", "strong decays give no NaN", of((3, 70), (0, 9)), _strong_decay)
    yield check("mixed", right, of((4, 1), (0, 9), (6, 1), mode=MIXED), check_accurate)
    for suffix, case in (("", of(*some, pages="wide")), ("_decode", of(*one, mode=DECODE, pages="wide"))):
        yield check(f"slots.wide{suffix}", "offsets in the states of all slots may exceed 32 bits", case, _wide)
    yield check("two_steps", "a decode continues from the state after an extend", of(*some), check_two_steps, True)
    yield check("padding.rows", "padding rows give zero", of(*some, padding=4), check_accurate, True)
    yield check(
        "padding.requests",
        "a padded request has slot -1 and no state",
        of(*one, mode=DECODE, padded_requests=2, padding=2),
        check_accurate,
        True,
    )
    yield check("idle", "an idle batch gives zeros and changes no state", of(*some), _idle, True)
    yield check("verify", "a verify changes no state, and a commit advances states by the accepted rows",
                of((5, 4), (0, 4), (9, 4), (1, 4), mode=VERIFY), check_verify, True, claim="linear verify")  # fmt: skip
    drafts = of((5, 4), (0, 4), (9, 4), (1, 4), mode=VERIFY, lanes=2)
    yield check("verify.layers", "a commit advances the states of all layers", drafts, _verify_of_all_layers,
                claim="linear verify")  # fmt: skip
    yield check("verify.two_alive", "two batches are verified before either is committed", drafts, _verify_two_alive,
                claim="linear verify")  # fmt: skip
    yield check(
        "plan.anew", "a batch with the sizes of an earlier one uses its own states", of(*one, mode=DECODE), _replans
    )
    yield check("strides", "rows may be slices of wider ones", of(*some), _strided, True)
    yield check("plan.two_alive", "two plans may be alive at the same time", of(*some), _two_alive, True)
    yield check("plan.refused", "missing and foreign plans, and fewer rows, are errors", of(*some), _plans, True)
    yield check("unchanged", "inputs and the batch are not modified", of(*some), _unchanged, True)
    yield check("results_kept", "a result is not overwritten by the next call", of(*some), _results_kept)
    yield check("hybrid", "it runs inside the hybrid wrapper", of(*some), _hybrid, True)
    yield check("built.twice", "two instances in one process share no state", of(*some), _built_twice)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield check(str(dtype), f"results in {dtype} are right", of(*some, dtype=dtype), check_accurate, True)
    if kind is not AttentionKind.LIGHTNING:
        yield check("conv.plain", "without bias and SiLU", of(*some, bias=False, silu=False), check_accurate)
    yield check(
        "graph.decode",
        "a captured decode is replayed with other states",
        of(*one, mode=DECODE, graph=GraphLevel.DECODE),
        _graph,
        False,
        lambda subject: None if subject.capabilities.cuda_graph else "it claims no CUDA graphs",
        claim="graphs",
    )
    for name, lengths in (("", (*some, (2, 70), (0, 66))), (".short", ((5, 3), (0, 4), (9, 1), (0, 6)))):
        yield check(
            f"graph.extend{name}",
            "a captured extend is replayed with other states and lengths, and fewer requests",
            of(*lengths, graph=GraphLevel.ALWAYS),
            _graph,
            False,
            requires_graphs(GraphLevel.ALWAYS),
            claim="graphs",
        )
