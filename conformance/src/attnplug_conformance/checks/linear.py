"""Linear attention: results and states against float64, verify and commit, padding, plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, GraphLevel, ModelSpec
from attnplug.wrappers.hybrid import HybridLinearBackend
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import FIRST, LAYER, Case, Shape, always
from attnplug_conformance.check import Check, Measured, Stand, refused_with_an_error
from attnplug_conformance.diagnosis import Wrong, keeps_settings, wrong_when
from attnplug_conformance.linear_scene import PAGE, LinearScene, tokens_of
from attnplug_conformance.subject import Subject

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
VERIFY = ForwardMode.TARGET_VERIFY
STRONG = 8.0
"""Factor by which decay is stronger than in other cases: 64 tokens then decay by exp(-256)."""
KINDS = tuple(kind for kind in AttentionKind if kind.is_linear)


def _scene(stand: Stand) -> LinearScene:
    return LinearScene(stand.subject, stand.case)


def _measure(stand: Stand, scene: LinearScene, error: float) -> None:
    stand.measured.append(Measured(scene.rows, max(scene.new, default=0), error, scene.tolerance, 0.0, 0.0))


def _accurate(stand: Stand) -> None:
    scene = _scene(stand)
    _measure(stand, scene, scene.check_results(*scene.run()))


def _two_steps(stand: Stand) -> None:
    """An extend, and then a decode from the states that it left."""
    scene = _scene(stand)
    scene.check_results(*scene.run())
    later = replace(scene.case, lengths=tuple((1, 1) for _ in scene.new), mode=DECODE, seed=3)
    second = LinearScene(stand.subject, later, backend=scene.backend)
    second.pool, second.pools, second.slots = scene.pool, scene.pools, scene.slots
    second.before = [[states[slot].clone() for slot in scene.slots] for states in scene.states(LAYER)]
    with wrong_when("in the step after an extend"):
        _measure(stand, second, second.check_results(*second.run()))


def _verify(stand: Stand) -> None:
    scene = _scene(stand)
    before, batch = scene.snapshot(), scene.batch()
    attention = scene.attention()
    attention.plan(batch)
    conv, out = scene.forward(attention, batch)
    if not scene.unchanged(before):
        raise Wrong("a target verify changed states; commit_states advances them, by what was accepted")
    accepted = [count % (new + 1) for count, new in zip((2, 0, 4, 1), scene.new, strict=False)]
    attention.commit_states(batch, torch.tensor(accepted, device=scene.device))
    with wrong_when(f"after commit_states with {accepted} rows accepted"):
        scene.check_states(accepted)
    outs = scene.wanted()[0]
    for found, right, what in ((out, outs[0], "the recurrence"), (conv, outs[1], "the convolution")):
        if found is not None and torch.cat(right).shape == found.shape:
            error = relative_error(found.flatten(1).unsqueeze(1), torch.cat(right).flatten(1).unsqueeze(1))
            if not error <= scene.tolerance:
                raise Wrong(f"in a target verify {what} is wrong by {error:.1e}")
            _measure(stand, scene, error)


def _verify_of_all_layers(stand: Stand) -> None:
    """One plan verifies two layers, and one commit advances the states of both."""
    scene = _scene(stand)
    first = scene.case.layers[0]
    for mine, theirs in zip(scene.states(FIRST), scene.states(LAYER), strict=True):
        mine.copy_(theirs)
    attention, batch = scene.attention(), scene.batch()
    attention.plan(batch)
    for layer in (first, scene.layer):
        scene.forward(attention, batch, layer)
    accepted = [count % (new + 1) for count, new in zip((2, 0, 4, 1), scene.new, strict=False)]
    attention.commit_states(batch, torch.tensor(accepted, device=scene.device))
    right = [states for states in scene.wanted(accepted)[1] if states]
    for states, wanted in zip(scene.states(FIRST), right, strict=True):
        for slot, should in zip(scene.slots, wanted, strict=True):
            if not relative_error(states[slot], should) <= scene.tolerance:
                raise Wrong(f"commit_states left a wrong state in layer {FIRST}: it advances the states of all layers")
        states.fill_(NAN)
    scene.check_states(accepted)


def _verify_two_alive(stand: Stand) -> None:
    """Two batches are verified, and then the states of each are committed."""
    scene = _scene(stand)
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
    with wrong_when("with two batches verified before either was committed"):
        scene.check_states(accepted)


def _anew(stand: Stand) -> None:
    """A batch of as many requests and rows as an earlier one, whose states lie elsewhere."""
    scene = _scene(stand)
    scene.check_results(*scene.run())
    other = LinearScene(stand.subject, replace(scene.case, seed=11), backend=scene.backend)
    for mine, theirs in zip(scene.states(LAYER), other.states(LAYER), strict=True):
        mine.copy_(theirs)
    other.pool, other.pools = scene.pool, scene.pools
    with wrong_when(
        "a batch after another one of as many requests and rows ran by what was planned for that one: plan each "
        "batch from its own geometry"
    ):
        _measure(stand, other, other.check_results(*other.run()))


def _strided(stand: Stand) -> None:
    """Inputs as models have them: parts of one projection."""
    scene = _scene(stand)
    if scene.x is not None:
        scene.x = _part_of_more(scene.x)
    if (kept := scene.inputs) is not None:
        q, k, v = (_part_of_more(each) for each in (kept.q, kept.k, kept.v))
        scene.inputs = replace(kept, q=q, k=k, v=v)
    batch, attention = scene.batch(), scene.attention()
    attention.plan(batch)
    conv = out = None
    if scene.x is not None:
        conv = attention.convolve(scene.x, scene.weight, scene.bias, scene.layer, batch, silu=scene.case.silu)
    if scene.inputs is not None:
        out = attention.attend_linear(scene.inputs, scene.layer, batch)
    with wrong_when("with rows that are not contiguous; take their strides, or copy them"):
        scene.check_results(conv, out)


def _part_of_more(rows: torch.Tensor) -> torch.Tensor:
    """The same numbers as the first part of wider rows."""
    flat = rows.flatten(1)
    return torch.cat([flat, flat + 1], 1)[:, : flat.shape[1]].view(rows.shape)


def _strong_decay(stand: Stand) -> None:
    """Decays whose products leave float32, as trained models have them."""
    scene = _scene(stand)
    if scene.inputs is not None:
        scene.inputs = replace(scene.inputs, log_decay=scene.inputs.log_decay * STRONG)
    _measure(stand, scene, scene.check_results(*scene.run()))


def _idle(stand: Stand) -> None:
    scene = _scene(stand)
    before = scene.snapshot()
    table = torch.zeros(0, 1, dtype=torch.int32, device=scene.device)
    slots = torch.zeros(0, dtype=torch.int64, device=scene.device)
    for rows in (0, 2):
        geometry = Geometry.of_lengths(ForwardMode.IDLE, table, [], [], PAGE, state_slots=slots)
        batch = ForwardBatch(geometry, input_ids=torch.zeros(rows, dtype=torch.int64, device=scene.device))
        attention = scene.attention()
        attention.plan(batch)
        empty = LinearScene(stand.subject, replace(scene.case, lengths=()), backend=scene.backend)
        for found in empty.forward(attention, batch):
            if found is not None and (found.shape[0] != rows or (found != 0).any()):
                raise Wrong("an idle batch gives rows that are not zero")
    if not scene.unchanged(before):
        raise Wrong("an idle batch changed states")


def _two_alive(stand: Stand) -> None:
    scene = _scene(stand)
    attention = scene.attention()
    first = scene.batch()
    attention.plan(first)
    other = LinearScene(stand.subject, replace(scene.case, lengths=((1, 1),) * 2, mode=DECODE), backend=scene.backend)
    attention.plan(other.batch())
    with wrong_when("with two plans alive, the first one ran by the second one's"):
        scene.check_results(*scene.forward(attention, first))


def _unchanged(stand: Stand) -> None:
    keeps_settings(stand.subject, lambda: _only_results(stand))


def _only_results(stand: Stand) -> None:
    scene = _scene(stand)
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
        raise Wrong("it changed its inputs, which are its caller's")
    if not torch.equal(slots, before) or not torch.equal(geometry.seq_lens, lens):
        raise Wrong("it changed the batch's geometry, which is its caller's")


def _kept(stand: Stand) -> None:
    scene = _scene(stand)
    attention, batch = scene.attention(), scene.batch()
    attention.plan(batch)
    first = [t for t in scene.forward(attention, batch) if t is not None]
    copies = [tensor.clone() for tensor in first]
    scene.forward(attention, batch)
    if not all(torch.equal(old, new) for old, new in zip(copies, first, strict=True)):
        raise Wrong("the output is overwritten by the next call: give each call memory of its own")


def _plans(stand: Stand) -> None:
    scene, other = _scene(stand), _scene(stand)
    attention, unplanned = scene.attention(), scene.batch()
    refused_with_an_error(lambda: scene.forward(attention, unplanned), "it ran a batch that has no plan")
    theirs = other.batch()
    other.attention().plan(theirs)
    refused_with_an_error(
        lambda: scene.forward(attention, theirs), "it ran by a plan that another instance of it had made"
    )
    mine = scene.batch()
    attention.plan(mine)
    scene.x = None if scene.x is None else scene.x[:-1]
    if scene.inputs is not None:
        scene.inputs = tokens_of(scene.inputs, slice(0, scene.rows - 1))
    mine.input_ids = mine.input_ids[:-1] if mine.input_ids is not None else None
    refused_with_an_error(lambda: scene.forward(attention, mine), "it was given fewer rows than planned, and ran")


def _hybrid(stand: Stand) -> None:
    """Joined to a model by the wrapper that hosts use."""
    scene = _scene(stand)
    model = ModelSpec("conformance", "conformance", scene.case.layers, 4096)
    scene.backend = HybridLinearBackend(None, scene.backend, model)
    with wrong_when("inside the hybrid wrapper"):
        scene.check_results(*scene.run())


def _twice(stand: Stand) -> None:
    first, second = _scene(stand), LinearScene(stand.subject, replace(stand.case, seed=9))
    second.check_results(*second.run())
    with wrong_when("after a second instance was built in this process, the first is wrong"):
        first.check_results(*first.run())


def _graph(stand: Stand) -> None:
    """A captured decode: the slots of states change from replay to replay, and padded requests have -1."""
    scene = _scene(stand)
    attention = scene.attention()
    requests = len(scene.new)
    attention.reserve(requests, requests)
    device = scene.device
    slots = torch.full((requests,), -1, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        Geometry(
            DECODE,
            torch.zeros(requests, 256, dtype=torch.int32, device=device),
            torch.full((requests,), attention.padding_length(), dtype=torch.int32, device=device),
            PAGE,
            rows=requests,
            max_seq_len=256 * PAGE,
            max_new=1,
            captured=True,
            state_slots=slots,
        )
    )
    attention.capture(batch, in_capture=True)

    def run() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        attention.refill(batch)
        return scene.forward(attention, batch)

    graph, outs = None, run()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = run()
    real = requests - 1
    slots[:real] = torch.tensor(scene.slots[:real], device=device)
    batch.geometry.seq_lens[:real] = 2
    attention.capture(batch)
    if graph is None:
        outs = run()
    else:
        graph.replay()
    wanted, after = scene.wanted()
    for found, right in zip(outs, wanted[::-1], strict=True):
        if found is None:
            continue
        error = relative_error(found[:real].flatten(1).unsqueeze(1), torch.cat(right)[:real].flatten(1).unsqueeze(1))
        if not error <= scene.tolerance:
            raise Wrong(f"a replay with other slots is wrong by {error:.1e}: take state_slots from the device")
        if (found[real:] != 0).any():
            raise Wrong("the output of a padded request of a replay is not zero")
    for states, right, before in zip(scene.states(LAYER), [a for a in after if a], scene.before, strict=True):
        for request, slot in enumerate(scene.slots):
            should = right[request] if request < real else before[request].double()
            if not relative_error(states[slot], should) <= scene.tolerance:
                raise Wrong("a replay left a wrong state: padded requests have the slot -1, and no state")


def linear_checks() -> Iterator[Check]:
    for kind in KINDS:
        yield from _checks_of(kind)


def _checks_of(kind: AttentionKind) -> Iterator[Check]:
    claim = "linear"

    def of(*lengths: tuple[int, int], mode: ForwardMode = EXTEND, **changes: Any) -> Shape:
        return always(replace(Case(lengths, mode, kind), **changes))

    def check(
        name: str,
        says: str,
        case: Shape,
        run: Callable[[Stand], None],
        quick: bool = False,
        applies: Callable[[Subject], str | None] = lambda subject: None,
        claim: str = claim,
    ) -> Check:
        return Check(f"{kind}.{name}", claim, says, case, run, quick, applies)

    some = ((5, 3), (0, 7), (9, 1), (0, 20))
    one = ((5, 1), (0, 1), (9, 1), (2, 1))
    right = "outputs and states are right"
    yield check("decode", right, of(*one, mode=DECODE), _accurate, True)
    yield check("decode.one", right, of((7, 1), mode=DECODE), _accurate)
    yield check("decode.many", right, of(*[(request % 3, 1) for request in range(11)], mode=DECODE), _accurate)
    yield check("extend", right, of(*some), _accurate, True)
    yield check("extend.no_state", right, of((0, 9), (0, 4)), _accurate)
    yield check("extend.long", "requests longer than a chunk of 64", of((3, 65), (0, 130), (1, 64)), _accurate)
    yield check("extend.many", right, of(*[(request % 3, 1 + request % 2) for request in range(20)]), _accurate)
    if kind is not AttentionKind.SHORT_CONV:
        yield check("strong_decay", "states that decay at once give no NaN", of((3, 70), (0, 9)), _strong_decay)
    yield check("mixed", right, of((4, 1), (0, 9), (6, 1), mode=MIXED), _accurate)
    yield check("two_steps", "a decode goes on from the state that an extend left", of(*some), _two_steps, True)
    yield check("padding.rows", "rows of padding give zero", of(*some, padding=4), _accurate, True)
    yield check(
        "padding.requests",
        "a padded request has the slot -1, and no state",
        of(*one, mode=DECODE, padded_requests=2, padding=2),
        _accurate,
        True,
    )
    yield check("idle", "an idle batch gives zeros and changes no state", of(*some), _idle, True)
    yield check("verify", "a verify changes no state, and a commit advances by what was accepted",
                of((5, 4), (0, 4), (9, 4), (1, 4), mode=VERIFY), _verify, True, claim="linear verify")  # fmt: skip
    drafts = of((5, 4), (0, 4), (9, 4), (1, 4), mode=VERIFY, lanes=2)
    yield check("verify.layers", "a commit advances the states of all layers", drafts, _verify_of_all_layers,
                claim="linear verify")  # fmt: skip
    yield check("verify.two_alive", "two batches are verified before either is committed", drafts, _verify_two_alive,
                claim="linear verify")  # fmt: skip
    yield check(
        "plan.anew", "a batch that looks like an earlier one has states of its own", of(*one, mode=DECODE), _anew
    )
    yield check("strides", "rows may be parts of wider ones", of(*some), _strided, True)
    yield check("plan.two_alive", "two plans are alive at once", of(*some), _two_alive, True)
    yield check("plan.refused", "missing and foreign plans, and fewer rows, are errors", of(*some), _plans, True)
    yield check("unchanged", "inputs and the batch are left as they were", of(*some), _unchanged, True)
    yield check("results_kept", "a result is not overwritten by the next call", of(*some), _kept)
    yield check("hybrid", "it runs inside the hybrid wrapper", of(*some), _hybrid, True)
    yield check("built.twice", "two instances in one process share nothing", of(*some), _twice)
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield check(str(dtype), f"results in {dtype} are right", of(*some, dtype=dtype), _accurate, True)
    if kind is not AttentionKind.LIGHTNING:
        yield check("conv.plain", "without bias and SiLU", of(*some, bias=False, silu=False), _accurate)
    yield check(
        "graph.decode",
        "a captured decode is replayed with other states",
        of(*one, mode=DECODE, graph=GraphLevel.DECODE),
        _graph,
        False,
        lambda subject: None if subject.can.cuda_graph else "it claims no CUDA graphs",
        claim="graphs",
    )
