"""Plans as values: what they say, which ones are refused, and how many may be alive (B5)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnplug import AttentionBackend, AttentionKind, ForwardBatch, ForwardMode, LayerSpec, Plan, Role
from attnplug.contract.backend import optional_hooks
from attnplug.contract.batch import BatchPlan
from attnplug.contract.hooks import bind_hook
from attnplug.host import ForwardingBackend, plan_forward
from attnplug_conformance.arithmetic import poison, relative_error
from attnplug_conformance.case import LAYER, Case, always
from attnplug_conformance.check import Check, Stand, refused_with_an_error
from attnplug_conformance.diagnosis import Wrong, wrong_when
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.subject import Subject

KEPT = 6
"""Number of batches that reveals memory kept per batch."""
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


def _values(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.batch()
    plan: object = scene.backend.init_forward_metadata(batch)
    if not isinstance(plan, Plan):
        raise Wrong(f"init_forward_metadata returned {type(plan).__name__}, not a Plan")
    geometry, name = batch.geometry, scene.backend.backend_id
    if plan.planner is not name:
        raise Wrong(f"its plan is stamped by {plan.planner!r}, not with its own backend_id")
    if plan.mode is not geometry.mode:
        raise Wrong(f"its plan is for mode {plan.mode}, and the batch is in mode {geometry.mode}")
    if plan.query_rows != geometry.rows:
        raise Wrong(f"it planned {plan.query_rows} query rows, and the batch has {geometry.rows}")
    if plan.kv_rows is not None and plan.kv_rows != sum(scene.totals):
        raise Wrong(f"it planned {plan.kv_rows} cache rows, and the batch has {sum(scene.totals)}")
    if batch.plan is not None or batch.plan_record is not None:
        raise Wrong("init_forward_metadata changed the batch: the caller publishes the plan")


def _run_with(scene: Scene, batch: ForwardBatch, plan: BatchPlan | None) -> None:
    batch.plan = plan
    scene.forward(batch)


def _missing(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.batch()
    refused_with_an_error(lambda: scene.forward(batch), "it ran a batch that has no plan")


def _foreign(stand: Stand) -> None:
    scene, other = stand.scene(), stand.scene()
    batch, theirs = scene.batch(), other.plan(other.batch())
    refused_with_an_error(
        lambda: _run_with(scene, batch, theirs.plan), "it ran by a plan that another instance of it had made"
    )


def _other_mode(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.plan(scene.batch())
    planned = batch.plan
    assert planned is not None
    wrong = replace(planned.attention, mode=ForwardMode.MIXED if scene.case.mode is not ForwardMode.MIXED else EXTEND)
    refused_with_an_error(
        lambda: _run_with(scene, batch, replace(planned, attention=wrong)), "it ran by a plan for another mode"
    )


def _shrunk(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.plan(scene.batch())
    rows = batch.geometry.rows
    q, k, v = scene.inputs(batch.num_tokens)
    less = (q[: rows - 2], k[: rows - 2], None if v is None else v[: rows - 2])
    refused_with_an_error(
        lambda: scene.forward(batch, less), f"it was given {rows - 2} query rows for {rows} planned ones, and ran"
    )


def _stale(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.plan(scene.batch())
    batch.geometry = replace(batch.geometry)
    refused_with_an_error(
        lambda: scene.forward(batch), "it ran by a stale plan: the batch's geometry was replaced after it was planned"
    )


def _two_alive(stand: Stand) -> None:
    """Plan one batch, then another of other lengths, and run the first: nothing of a batch is on the backend."""
    scene = stand.scene()
    new = scene.case.lengths[0][1] if scene.case.mode is not EXTEND else 2
    other = Scene(
        stand.subject,
        replace(scene.case, lengths=tuple((before // 2 + 1, new) for before, _ in scene.case.lengths), seed=7),
        backend=scene.backend,
    )
    first = scene.plan(scene.batch())
    plan_forward(scene.backend, other.batch())
    output = scene.run(first)
    with wrong_when(
        "with two plans alive, the first one ran by the second one's lengths: keep nothing of a batch on the backend"
    ):
        stand.check_output(scene, output)


def _anew(stand: Stand) -> None:
    """Batches that look like an earlier one: as many rows and requests of other lengths, and the same lengths on other
    pages."""
    scene = stand.scene()
    stand.check_output(scene, scene.run())
    lengths = scene.case.lengths
    for like, case in (
        ("of as many requests and rows", replace(scene.case, lengths=lengths[::-1])),
        ("of the same lengths", replace(scene.case, seed=scene.case.seed + 7)),
    ):
        other = Scene(stand.subject, case, backend=scene.backend)
        other.pools, other.scratch = scene.pools, scene.scratch
        for memory in other.memories(LAYER):
            poison(memory)
        other.store(LAYER, [(0, before) for before, _ in case.lengths])
        with wrong_when(
            f"a batch after another one {like} ran by what was planned for that one: plan each batch from its own "
            "geometry"
        ):
            stand.check_output(other, other.run())


def _let_go(stand: Stand) -> None:
    """Nothing of a batch stays behind: a server plans millions of them."""
    scene, counts = stand.scene(), []
    for _ in range(2):
        for _ in range(KEPT):
            scene.forward(scene.plan(scene.batch()))
        counts.append(_tensors_alive())
    if counts[1] - counts[0] >= KEPT:
        raise Wrong(
            f"it keeps what it made for earlier batches: {KEPT} batches left {counts[1] - counts[0]} tensors behind; "
            "what belongs to a batch is in its plan, and goes with it"
        )


def _tensors_alive() -> int:
    gc.collect()
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def _plans_once(stand: Stand) -> None:
    scene = stand.scene()
    batch = scene.plan(scene.batch())
    planned = 0
    own = scene.backend.init_forward_metadata

    def counted(batch: ForwardBatch) -> Plan:
        nonlocal planned
        planned += 1
        return own(batch)

    scene.backend.init_forward_metadata = counted  # type: ignore[method-assign] # for as long as it is counted
    before = batch.plan
    scene.forward(batch)
    if planned or batch.plan is not before:
        raise Wrong("it planned again inside forward: a batch is planned once, for all its layers")


def _again(stand: Stand) -> None:
    """One plan runs any number of times."""
    scene = stand.scene()
    batch = scene.plan(scene.batch())
    for _ in range(3):
        out = scene.forward(batch)
    stand.check_output(scene, Output(out, None, 0.0, 0.0))


class Around(ForwardingBackend):
    """A wrapper with one child."""

    def __init__(self, child: AttentionBackend) -> None:
        super().__init__("around", {"child": child})

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        return ("child",)


def _wrapped(stand: Stand) -> None:
    scene = stand.scene()
    inner, outer = scene.backend, Around(Around(scene.backend))
    for name, offered in optional_hooks().items():
        if (bind_hook(inner, name, offered, offered) is None) != (bind_hook(outer, name, offered, offered) is None):
            raise Wrong(f"its hook {name} is not the same through a wrapper")
    scene.backend = outer
    try:
        stand.check_output(scene, scene.run())
    except Wrong as wrong:
        raise Wrong(f"inside a wrapper: {wrong}") from None
    except Exception as error:
        raise Wrong(
            f"inside a wrapper it raised {type(error).__name__}: {error}; find the plan by batch.plan_for(…)"
        ) from None


def _lanes(stand: Stand) -> None:
    """Plans of two lanes alive at once, run in turn; on a GPU on two streams."""
    scene = stand.scene()
    half = len(scene.totals) // 2
    rows = sum(scene.new[:half])
    both = scene.batch().split(half, lanes=(0, 1))
    spans = (slice(0, rows), slice(rows, None))
    q, k, v = scene.inputs(sum(scene.new))
    parts = [(q[span].clone(), k[span].clone(), None if v is None else v[span].clone()) for span in spans]
    for batch in both:
        scene.plan(batch)
    wanted = scene.wanted()[0]
    outs: list[list[torch.Tensor]] = [[], []]
    on_gpu = scene.device.type == "cuda"
    streams = [torch.cuda.Stream() for _ in both] if on_gpu else [None, None]
    if on_gpu:
        torch.cuda.synchronize()
    for _ in range(20 if on_gpu else 2):
        for lane, (batch, given, stream) in enumerate(zip(both, parts, streams, strict=True)):
            with torch.cuda.stream(stream):
                outs[lane].append(scene.forward(batch, given))
    if on_gpu:
        torch.cuda.synchronize()
    for lane, span in enumerate(spans):
        for out in outs[lane]:
            error = relative_error(out, wanted[span])
            if not error <= scene.tolerance:
                raise Wrong(
                    f"two lanes at once: lane {lane} is wrong by {error:.1e}; scratch memory and state are one for "
                    "each lane"
                )


def _built_for(role: Role, stand: Stand) -> None:
    scene = Scene(stand.subject, stand.case, roles=frozenset({role}))
    stand.check_output(scene, scene.run())


def _built_twice(stand: Stand) -> None:
    """Two instances in one process share nothing: the first is right after the second was built and run."""
    first = stand.scene()
    second = stand.scene(seed=5)
    stand.check_output(second, second.run())
    with wrong_when("after a second instance was built in this process, the first is wrong"):
        stand.check_output(first, first.run())


def _claims(stand: Stand) -> None:
    """The built backend claims what its spec does or less, and refuses what it does not claim."""
    scene = stand.scene()
    claims, can = scene.backend.claims, stand.subject.can
    for wider in claims.exceeding(can):
        raise Wrong(wider)
    if scene.backend.backend_id.name != stand.subject.name:
        raise Wrong(f"its backend_id is named {scene.backend.backend_id.name!r}, not {stand.subject.name!r}")


def _trees_refused(stand: Stand) -> None:
    scene = stand.scene()
    geometry = scene.geometry()
    tree = torch.ones(geometry.requests, geometry.max_new, dtype=torch.int64, device=scene.device)
    batch = ForwardBatch(replace(geometry, tree=tree))
    refused_with_an_error(
        lambda: scene.backend.init_forward_metadata(batch), "it planned trees of drafts, which it does not claim"
    )


def _no_trees(subject: Subject) -> str | None:
    return "it claims trees" if subject.can.trees else None


def plan_checks(kind: AttentionKind) -> Iterator[Check]:
    some = ((5, 3), (9, 6), (0, 4))
    one = tuple((before, 1) for before in (5, 20, 0, 31))
    for mode, lengths, suffix in ((EXTEND, some, ""), (DECODE, one, "_decode")):
        case, extend = Case(lengths, mode, kind), mode is EXTEND
        for name, says, run, quick in (
            ("values", "a plan says who planned, for which mode and for how many rows", _values, True),
            ("missing", "a batch without a plan is an error", _missing, extend),
            ("foreign", "a plan of another instance is an error", _foreign, extend),
            ("mode", "a plan for another mode is an error", _other_mode, extend),
            ("shrunk", "fewer rows than planned are an error", _shrunk, extend),
            ("stale", "a plan for another geometry is an error", _stale, extend),
            ("two_alive", "two plans are alive at once", _two_alive, True),
            ("anew", "a batch that looks like an earlier one is planned by its own lengths and pages", _anew, extend),
            ("once", "forward plans nothing", _plans_once, extend),
            ("again", "one plan runs any number of times", _again, False),
            ("wrapped", "it runs inside wrappers, and its hooks are found there", _wrapped, extend),
        ):
            yield Check(f"{kind}.plan.{name}{suffix}", str(kind), says, always(case), run, quick)
        yield Check(
            f"{kind}.lanes{suffix}",
            str(kind),
            "plans of two lanes run at the same time",
            always(replace(case, lengths=((5, 3), (9, 6), (4, 3), (8, 6)) if extend else one, lanes=2)),
            _lanes,
            extend,
        )
    yield Check(
        f"{kind}.plan.let_go",
        str(kind),
        "nothing of a batch is kept after it",
        always(Case(one, DECODE, kind)),
        _let_go,
        applies=lambda subject: None if subject.seam is None else f"what runs {subject.seam} may remember its calls",
    )
    for role in (Role.PREFILL, Role.DECODE, Role.DRAFT):
        case = Case(one, DECODE, kind) if role is not Role.PREFILL else Case(some, EXTEND, kind)
        yield Check(
            f"{kind}.built.{role}",
            f"{kind} {role}",
            f"it is built for the role {role} alone",
            always(replace(case, only_role=role)),
            partial(_built_for, role),
        )
    for suffix, case in (("", Case(some, EXTEND, kind)), ("_decode", Case(one, DECODE, kind))):
        yield Check(
            f"{kind}.built.twice{suffix}",
            str(kind),
            "two instances in one process share nothing",
            always(case),
            _built_twice,
            suffix == "",
        )
        yield Check(
            f"{kind}.built.claims{suffix}",
            str(kind),
            "what is built claims no more than its spec",
            always(case),
            _claims,
        )
    yield Check(
        f"{kind}.trees.refused",
        str(kind),
        "trees that are not claimed are an error",
        lambda p, longest: Case(((4, 3), (9, 3)), VERIFY, kind),
        _trees_refused,
        applies=_no_trees,
    )
