"""Checks of plans as values: contents, refusals, and several plans alive at the same time (B5)."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from attnplug import AttentionBackend, AttentionKind, ForwardBatch, ForwardMode, LayerSpec, Plan, Role
from attnplug.contract.backend import bind_hook, hook_signatures
from attnplug.contract.batch import BatchPlan
from attnplug.host import ForwardingBackend, plan_forward
from attnplug.machine.runtime import runtime_of
from attnplug_conformance.arithmetic import poison, relative_error
from attnplug_conformance.case import LAYER, Case, always
from attnplug_conformance.check import Check, CheckContext, expect_error
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.scene import NotATensor, Output, Scene
from attnplug_conformance.subject import Subject

ROUNDS = (6, 6, 24, 96)
"""Numbers of batches between measurements of memory. A leak grows in every round; caches and allocators do not."""
_IN_PLAN = "store them in the plan, so that they are freed with it"
LEAKS = {
    "tensors": (1, _IN_PLAN),
    "bytes of tensors": (8, "allocate them per batch, or once for all"),
    "Python objects": (1, _IN_PLAN),
    "bytes of the process": (64, "free what a batch allocates"),
}
"""Kinds of memory with the amount that a leak keeps per batch, and the advice."""
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


def _values(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.batch()
    plan: object = scene.backend.init_forward_metadata(batch)
    if not isinstance(plan, Plan):
        raise CheckFailure(f"init_forward_metadata returned {type(plan).__name__}, not a Plan")
    geometry, name = batch.geometry, scene.backend.backend_id
    if plan.planner is not name:
        raise CheckFailure(f"its plan is stamped with {plan.planner!r}, not with its own backend_id")
    if plan.mode is not geometry.mode:
        raise CheckFailure(f"its plan is for mode {plan.mode}, but the batch has mode {geometry.mode}")
    if plan.query_rows != geometry.rows:
        raise CheckFailure(f"it planned {plan.query_rows} query rows, but the batch has {geometry.rows}")
    if plan.kv_rows is not None and plan.kv_rows != sum(scene.totals):
        raise CheckFailure(f"it planned {plan.kv_rows} cache rows, but the batch has {sum(scene.totals)}")
    if batch.plan is not None or batch.plan_record is not None:
        raise CheckFailure("init_forward_metadata changed the batch; the caller publishes the plan")


def _run_with(scene: Scene, batch: ForwardBatch, plan: BatchPlan | None) -> None:
    batch.plan = plan
    scene.forward(batch)


def _missing(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.batch()
    expect_error(lambda: scene.forward(batch), "it ran a batch that has no plan")


def _foreign(context: CheckContext) -> None:
    scene, other = context.scene(), context.scene()
    batch, theirs = scene.batch(), other.plan(other.batch())
    expect_error(lambda: _run_with(scene, batch, theirs.plan), "it accepted a plan of another instance")


def _other_mode(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    planned = batch.plan
    assert planned is not None
    other_mode = replace(
        planned.attention, mode=ForwardMode.MIXED if scene.case.mode is not ForwardMode.MIXED else EXTEND
    )
    expect_error(
        lambda: _run_with(scene, batch, replace(planned, attention=other_mode)), "it accepted a plan for another mode"
    )


def _shrunk(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    rows = batch.geometry.rows
    q, k, v = scene.inputs(batch.num_tokens)
    less = (q[: rows - 2], k[: rows - 2], None if v is None else v[: rows - 2])
    expect_error(lambda: scene.forward(batch, less), f"it accepted {rows - 2} query rows with a plan for {rows}")


def _stale(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    batch.geometry = replace(batch.geometry)
    expect_error(
        lambda: scene.forward(batch), "it accepted a stale plan: the batch's geometry was replaced after planning"
    )


def _two_alive(context: CheckContext) -> None:
    """Plan one batch, then another with other lengths, and run the first: the backend keeps no state of a batch."""
    scene = context.scene()
    new = scene.case.lengths[0][1] if scene.case.mode is not EXTEND else 2
    other = Scene(
        context.subject,
        replace(scene.case, lengths=tuple((before // 2 + 1, new) for before, _ in scene.case.lengths), seed=7),
        backend=scene.backend,
    )
    first = scene.plan(scene.batch())
    plan_forward(scene.backend, other.batch())
    output = scene.run(first)
    with failure_prefix(
        "with two plans alive, the first batch ran with the second one's lengths; keep no batch state on the backend"
    ):
        context.check_output(scene, output)


def _replans(context: CheckContext) -> None:
    """Batches similar to an earlier one: the same size with other lengths, and the same lengths on other pages."""
    scene = context.scene()
    context.check_output(scene, scene.run())
    lengths = scene.case.lengths
    for like, case in (
        ("with as many requests and rows", replace(scene.case, lengths=lengths[::-1])),
        ("with the same lengths", replace(scene.case, seed=scene.case.seed + 7)),
    ):
        other = Scene(context.subject, case, backend=scene.backend)
        other.pools, other.scratch = scene.pools, scene.scratch
        for memory in other.cache_tensors(LAYER):
            poison(memory)
        other.store(LAYER, [(0, before) for before, _ in case.lengths])
        with failure_prefix(
            f"a batch following another one {like} ran by the earlier plan; plan each batch from its own geometry"
        ):
            context.check_output(other, other.run())


def _releases_batches(context: CheckContext) -> None:
    """Memory of a batch is released with its plan: a server plans millions of batches."""
    scene = context.scene()
    suspected = dict(LEAKS)
    with _only_new_objects():
        before = None
        for batches in ROUNDS:
            for _ in range(batches):
                scene.forward(scene.plan(scene.batch()))
            after = _memory_in_use()
            if before is not None:  # the first batches may allocate memory for all
                kept = {name: after[name] - before[name] for name in suspected}
                suspected = {name: LEAKS[name] for name in suspected if kept[name] >= batches * LEAKS[name][0]}
                if not suspected:
                    return
            before = after
    for name, (_, advice) in suspected.items():
        raise CheckFailure(f"it keeps memory of earlier batches: {batches} batches left {kept[name]} {name}; {advice}")


@contextmanager
def _only_new_objects() -> Iterator[None]:
    """Exclude all existing objects from garbage collection, which makes looking at the new ones cheap.

    If the process had excluded objects before, they stay excluded.
    """
    frozen_before = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def _memory_in_use() -> dict[str, int]:
    """Tensors and Python objects that are alive, and the resident bytes of the process, if the system tells."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [found for found in objects if issubclass(type(found), torch.Tensor)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return {
        "tensors": len(tensors),
        "bytes of tensors": sum(storages.values()),
        "Python objects": len(objects),
        "bytes of the process": _allocated_bytes(),
    }


def _allocated_bytes() -> int:
    """Bytes that all malloc calls of the process hold; 0 without glibc 2.33. The resident size shows no small leak."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return int(found.hblkhd + found.uordblks)


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``. ``hblkhd`` and ``uordblks`` are the bytes in use, mapped and in arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _plans_once(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    planned = 0
    own = scene.backend.init_forward_metadata

    def counted(batch: ForwardBatch) -> Plan:
        nonlocal planned
        planned += 1
        return own(batch)

    scene.backend.init_forward_metadata = counted  # type: ignore[method-assign] # counts the calls
    before = batch.plan
    scene.forward(batch)
    if planned or batch.plan is not before:
        raise CheckFailure("it planned again inside forward; a batch is planned once for all layers")


def _again(context: CheckContext) -> None:
    """One plan runs any number of times."""
    scene = context.scene()
    batch = scene.plan(scene.batch())
    for _ in range(3):
        out = scene.forward(batch)
    context.check_output(scene, Output(out, None, 0.0, 0.0))


class PassThrough(ForwardingBackend):
    """Wrapper that forwards everything to one child."""

    def __init__(self, child: AttentionBackend) -> None:
        super().__init__("around", {"child": child})

    def route(self, batch: ForwardBatch | None, layer: LayerSpec | None) -> tuple[str, ...]:
        return ("child",)


def _wrapped(context: CheckContext) -> None:
    scene = context.scene()
    inner, outer = scene.backend, PassThrough(PassThrough(scene.backend))
    for name, signature in hook_signatures().items():
        offered = tuple(signature.parameters)
        if (bind_hook(inner, name, offered, offered) is None) != (bind_hook(outer, name, offered, offered) is None):
            raise CheckFailure(f"its hook {name} is not the same through a wrapper")
    scene.backend = outer
    try:
        context.check_output(scene, scene.run())
    except CheckFailure as failure:
        raise CheckFailure(f"inside a wrapper: {failure}") from None
    except NotATensor:
        raise
    except Exception as error:
        raise CheckFailure(
            f"inside a wrapper it raised {type(error).__name__}: {error}; get the plan from batch.plan_for(…)"
        ) from None


def _lanes(context: CheckContext) -> None:
    """Run plans of two lanes alternately; on a GPU on two streams."""
    scene = context.scene()
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
    module = runtime_of(scene.device).module
    streams = [nullcontext() if module is None else module.stream(module.Stream()) for _ in both]
    scene.now()  # waits for the device
    for _ in range(2 if module is None else 20):
        for lane, (batch, given, stream) in enumerate(zip(both, parts, streams, strict=True)):
            with stream:
                outs[lane].append(scene.forward(batch, given))
    scene.now()
    for lane, span in enumerate(spans):
        for out in outs[lane]:
            error = relative_error(out, wanted[span])
            if not error <= scene.tolerance:
                raise CheckFailure(
                    f"with two lanes, lane {lane} is wrong by {error:.1e}; scratch and state must be separate for "
                    "each lane"
                )


def _built_for(role: Role, context: CheckContext) -> None:
    scene = Scene(context.subject, context.case, roles=frozenset({role}))
    context.check_output(scene, scene.run())


def _built_twice(context: CheckContext) -> None:
    """Two instances in one process share no state: the first is right after the second was built and run."""
    first = context.scene()
    second = context.scene(seed=5)
    context.check_output(second, second.run())
    with failure_prefix("after a second instance was built in this process, the first is wrong"):
        context.check_output(first, first.run())


def _claims(context: CheckContext) -> None:
    """The built backend claims no more than its spec."""
    scene = context.scene()
    claims, capabilities = scene.backend.claims, context.subject.capabilities
    for wider in claims.exceeding(capabilities):
        raise CheckFailure(wider)
    if scene.backend.backend_id.name != context.subject.name:
        raise CheckFailure(f"its backend_id is named {scene.backend.backend_id.name!r}, not {context.subject.name!r}")


def _trees_refused(context: CheckContext) -> None:
    scene = context.scene()
    geometry = scene.geometry()
    tree = torch.ones(geometry.requests, geometry.max_new, dtype=torch.int64, device=scene.device)
    batch = ForwardBatch(replace(geometry, tree=tree))
    expect_error(lambda: scene.backend.init_forward_metadata(batch), "it planned draft trees, which it does not claim")


def _no_trees(subject: Subject) -> str | None:
    return "it claims trees" if subject.capabilities.trees else None


def plan_checks(kind: AttentionKind) -> Iterator[Check]:
    some = ((5, 3), (9, 6), (0, 4))
    one = tuple((before, 1) for before in (5, 20, 0, 31))
    for mode, lengths, suffix in ((EXTEND, some, ""), (DECODE, one, "_decode")):
        case, extend = Case(lengths, mode, kind), mode is EXTEND
        for name, requirement, run, quick in (
            ("values", "a plan has its planner, mode and number of rows", _values, True),
            ("missing", "a batch without a plan is an error", _missing, extend),
            ("foreign", "a plan of another instance is an error", _foreign, extend),
            ("mode", "a plan for another mode is an error", _other_mode, extend),
            ("shrunk", "fewer rows than planned are an error", _shrunk, extend),
            ("stale", "a plan for another geometry is an error", _stale, extend),
            ("two_alive", "two plans may be alive at the same time", _two_alive, True),
            (
                "anew",
                "a batch similar to an earlier one is planned by its own lengths and pages",
                _replans,
                extend,
            ),
            ("once", "forward plans nothing", _plans_once, extend),
            ("again", "one plan runs any number of times", _again, False),
            ("wrapped", "it runs inside wrappers, which expose its hooks", _wrapped, extend),
        ):
            yield Check(f"{kind}.plan.{name}{suffix}", str(kind), requirement, always(case), run, quick)
        yield Check(
            f"{kind}.lanes{suffix}",
            str(kind),
            "plans of two lanes run at the same time",
            always(replace(case, lengths=((5, 3), (9, 6), (4, 3), (8, 6)) if extend else one, lanes=2)),
            _lanes,
            extend,
        )
    for suffix, case in (("", Case(one, DECODE, kind)), ("_extend", Case(some, EXTEND, kind))):
        yield Check(
            f"{kind}.plan.let_go{suffix}",
            str(kind),
            "no memory of a batch is kept",
            always(case),
            _releases_batches,
            applies=lambda subject: (
                None if subject.seam is None else f"reference kernels ({subject.seam}) may record their calls"
            ),
        )
    for role in (Role.PREFILL, Role.DECODE, Role.DRAFT):
        case = Case(one, DECODE, kind) if role is not Role.PREFILL else Case(some, EXTEND, kind)
        yield Check(
            f"{kind}.built.{role}",
            f"{kind} {role}",
            f"it can be built for the role {role} alone",
            always(replace(case, forced_role=role)),
            partial(_built_for, role),
        )
    for suffix, case in (("", Case(some, EXTEND, kind)), ("_decode", Case(one, DECODE, kind))):
        yield Check(
            f"{kind}.built.twice{suffix}",
            str(kind),
            "two instances in one process share no state",
            always(case),
            _built_twice,
            suffix == "",
        )
        yield Check(
            f"{kind}.built.claims{suffix}",
            str(kind),
            "a built backend claims no more than its spec",
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
