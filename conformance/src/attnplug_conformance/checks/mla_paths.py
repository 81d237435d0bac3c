"""Checks of MLA prefill as MHA: ragged calls, and the three extend paths against the model's equations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ExtendPath, ForwardBatch, RaggedCall
from attnplug.contract.backend import bind_optional_hook
from attnplug.host import ExtendPolicy, MLAWeights, ModelAttention
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.arithmetic import NAN, pad_rows, relative_error, uninitialized_as_nan, watched
from attnplug_conformance.case import Case, always
from attnplug_conformance.check import Check, CheckContext, Measured
from attnplug_conformance.checks.plans import PassThrough
from attnplug_conformance.diagnosis import check_inputs_unchanged, check_tensor
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.reference import Rules, attention
from attnplug_conformance.scene import Scene
from attnplug_conformance.stored_rows import only_coded
from attnplug_conformance.subject import Subject

MLA = AttentionKind.MLA


class Ragged:
    """Arguments of one call of ``forward_ragged``, and its float64 result."""

    def __init__(self, scene: Scene, queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, index: int) -> None:
        layer, self.scene = scene.layer, scene
        self.call = RaggedCall.of(index, queries, keys, causal=causal, device=scene.device)
        self.q = scene.normal(sum(queries), layer.num_heads, layer.head_dim)
        self.k = scene.normal(sum(keys), layer.num_heads, layer.head_dim)
        self.v = scene.normal(sum(keys), layer.num_heads, layer.v_head_dim)

    def wanted(self, rules: Rules | None = None, keys_of: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
        """Expected output and log-sum-exp. ``keys_of`` has the sequence whose keys each sequence attends to."""
        call, outs = self.call, []
        rules = rules or self.rules()
        k, v = self.k.split(call.kv_lens), self.v.split(call.kv_lens)
        for own, q in enumerate(self.q.split(call.query_lens)):
            source = own if keys_of is None else keys_of[own]
            outs.append(attention(q, k[source], v[source], rules))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])

    def rules(self) -> Rules:
        return Rules(self.scene.layer.scale, aligned="last" if self.call.causal else "none")

    def mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield diagnoses of common mistakes, each with the output that the mistake would give."""
        layer, call, right = self.scene.layer, self.call, self.rules()
        first, mla = self.scene.case.layers[0], layer.mla
        assert mla is not None
        for scale, why in (
            (layer.head_dim**-0.5, "by head_dim ** -0.5"),
            (1.0, "by nothing"),
            (mla.row_dim**-0.5, "by row_dim ** -0.5 of a latent row"),
            (layer.v_head_dim**-0.5, "by v_head_dim ** -0.5"),
            (first.scale, f"by the scale of layer {first.layer_id}"),
        ):
            message = f"it multiplied logits {why}, not by the layer's scale ({layer.scale:.4g})"
            yield message, self.wanted(replace(right, scale=scale))[0]
        if call.causal:
            yield "it applied no causal mask to a causal call", self.wanted(replace(right, aligned="none"))[0]
            yield (
                "its causal mask is aligned to the first key; align it to the last key of each sequence",
                self.wanted(replace(right, aligned="first"))[0],
            )
            yield "each query misses its own key", self.wanted(replace(right, hidden=1))[0]
            yield "each query sees one key too many", self.wanted(replace(right, hidden=-1))[0]
        else:
            yield (
                "it applied a causal mask to a call that is not causal",
                self.wanted(replace(right, aligned="last"))[0],
            )
        yield from self._wrong_orders()

    def _wrong_orders(self) -> Iterator[tuple[str, Tensor]]:
        call, right = self.call, self.wanted()[0].split(self.call.query_lens)
        count = len(right)
        others = {
            "the next sequence": [(own + 1) % count for own in range(count)],
            "the sequence in reverse order": list(reversed(range(count))),
            "the first sequence": [0] * count,
        }
        for which, sources in others.items():
            yield f"each sequence attends to the keys of {which}", self.wanted(keys_of=sources)[0]
        by_length = sorted(range(count), key=lambda own: -call.query_lens[own])
        for how, order in (
            ("sorted by their number of queries", by_length),
            ("sorted by their number of keys", sorted(range(count), key=lambda own: -call.kv_lens[own])),
            ("in reverse order", list(reversed(range(count)))),
        ):
            yield f"it returned the sequences {how}, not in the order of the call", torch.cat([right[i] for i in order])
        whole = attention(self.q, self.k, self.v, replace(self.rules(), aligned="none"))[0]
        yield "each query attends to the keys of all sequences", whole


def _ragged(context: CheckContext, queries: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> None:
    scene = context.scene()
    hook = bind_optional_hook(scene.backend, "forward_ragged")
    if hook is None:
        raise CheckFailure("it claims to extend MLA as MHA but has no forward_ragged")
    ragged = Ragged(scene, queries, keys, causal, 0)
    plan = _chunk_plan(scene, ragged.call)
    before = scene.snapshot()
    for with_lse in (False, True):
        lse = torch.full(ragged.q.shape[:2], NAN, device=scene.device) if with_lse else None
        given = {"q": ragged.q.clone(), "k": ragged.k.clone(), "v": ragged.v.clone()}
        with uninitialized_as_nan(scene.device), watched(given):
            out = hook(*given.values(), scene.layer, ragged.call, plan, lse)
        _check_ragged(context, ragged, out, lse)
        check_inputs_unchanged()
    if any(scene.changes(before)):
        raise CheckFailure("forward_ragged wrote to the cache; it must only use the rows passed as arguments")


def _captured_call(context: CheckContext) -> None:
    """Run a captured call again and again, by lengths that only the device knows."""
    scene = context.scene()
    hook = bind_optional_hook(scene.backend, "forward_ragged")
    if hook is None:
        raise CheckFailure("it claims ragged_graphs but has no forward_ragged")
    call = RaggedCall.captured(4, 40, device=scene.device)
    for lens in ((5, 0, 17, 3), (0, 1, 0, 0), (7, 7, 6, 20)):
        live = tuple(filter(None, lens))
        ragged = Ragged(scene, live, live, True, 0)
        call.refill(torch.tensor(lens, dtype=torch.int32, device=scene.device))
        rows = len(ragged.q)
        given = [
            torch.cat([each, each.new_full((call.query_rows - rows, *each.shape[1:]), unused)])
            for each, unused in ((ragged.q, 1.0), (ragged.k, NAN), (ragged.v, NAN))
        ]
        with failure_prefix("a captured call with other lengths on the device"), uninitialized_as_nan(scene.device):
            out = hook(*given, scene.layer, call, _chunk_plan(scene, call), None)
            if not torch.equal(out[rows:], torch.zeros_like(out[rows:])):
                raise CheckFailure("forward_ragged wrote something else than zeros to padded rows, or left them out")
            _check_ragged(context, ragged, out[:rows], None)


def _two_alive(context: CheckContext) -> None:
    """Plan calls of two batches, then run the call of the first."""
    scene = context.scene()
    hook = bind_optional_hook(scene.backend, "forward_ragged")
    assert hook is not None
    first, second = Ragged(scene, (5, 3), (11, 7), False, 0), Ragged(scene, (3, 5), (9, 9), False, 0)
    plan = _chunk_plan(scene, first.call)
    _chunk_plan(scene, second.call)
    with failure_prefix(
        "with the calls of two batches planned, the first ran with the second one's lengths; keep what "
        "init_mha_chunk_metadata plans in the plan that it returns"
    ):
        with uninitialized_as_nan(scene.device):
            out = hook(first.q.clone(), first.k.clone(), first.v.clone(), scene.layer, first.call, plan, None)
        _check_ragged(context, first, out, None)


def _chunk_plan(scene: Scene, call: RaggedCall) -> object:
    """Plan of the backend's own hook for a batch of this call, or ``None`` if it has no hook."""
    hook = bind_optional_hook(scene.backend, "init_mha_chunk_metadata")
    if hook is None:
        return None
    batch = scene.batch()
    batch.geometry = geometry = replace(batch.geometry, calls=(call,))
    table, lens = geometry.page_table.clone(), geometry.seq_lens.clone()
    plan = hook(batch, False)
    if not torch.equal(geometry.page_table, table) or not torch.equal(geometry.seq_lens, lens):
        raise CheckFailure("init_mha_chunk_metadata changed the batch's geometry, which the caller owns")
    return plan


def _check_ragged(context: CheckContext, ragged: Ragged, out: Tensor, lse: Tensor | None) -> None:
    scene, (wanted, wanted_lse) = ragged.scene, ragged.wanted()
    check_tensor(out, tuple(wanted.shape), ragged.q, "the result of forward_ragged", "query rows, heads, v_head_dim")
    error = relative_error(out, wanted)
    if not error <= scene.tolerance:
        raise CheckFailure(f"forward_ragged: {_explain_ragged(ragged, out, wanted, error)}")
    if lse is not None:
        lse_error = relative_error(lse, wanted_lse)
        if not lse_error <= max(scene.tolerance, 1e-5):
            base2 = relative_error(lse, wanted_lse / torch.tensor(2.0).log().double()) <= 4 * scene.tolerance
            unfilled = "it was not filled" if lse.isnan().any() else f"it is wrong by {lse_error:.1e}"
            raise CheckFailure(f"the log-sum-exp of forward_ragged: {'it is base 2' if base2 else unfilled}")
    context.measured.append(Measured(len(out), max(ragged.call.kv_lens), error, scene.tolerance, 0.0, 0.0))


def _explain_ragged(ragged: Ragged, out: Tensor, wanted: Tensor, error: float) -> str:
    allowed = ragged.scene.tolerance
    finite = ~out.isnan().flatten(1).any(-1)  # a mask may leave queries without keys
    for message, other in ragged.mistakes() if finite.any() else ():
        near, far = relative_error(out[finite], other[finite]), relative_error(wanted[finite], other[finite])
        if near <= 4 * allowed and near < far / 3 and far > 2 * allowed:
            return message
    if (out == 0).all():
        return "the output is all zero"
    wrong = [
        str(number)
        for number, (one, right) in enumerate(
            zip(*(t.split(ragged.call.query_lens) for t in (out, wanted)), strict=True)
        )
        if not relative_error(one, right) <= allowed
    ]
    scope = f"; sequences {', '.join(wrong)} of {len(ragged.call.query_lens)} are wrong" if wrong else ""
    return f"the output is wrong by {error:.2e}; {allowed:.2e} is allowed{scope}"


def _wrapped(context: CheckContext) -> None:
    """Extend as MHA through wrappers, which forward the backend's hooks."""
    scene = context.scene()
    scene.backend = SplitBackend(PassThrough(PassThrough(scene.backend)), scene.backend)
    paths = context.subject.capabilities.mla_extend
    path = ExtendPath.CHUNKED if ExtendPath.CHUNKED in paths else ExtendPath.ONE_SHOT
    with failure_prefix("inside wrappers"):
        check_path(path, context, scene)


class UpProjected:
    """One layer with random up-projections, on which the three extend paths must agree."""

    def __init__(self, scene: Scene) -> None:
        self.scene, layer = scene, scene.layer
        assert scene.case.mla is not None
        self.mla = scene.case.mla
        rank, nope = self.mla.kv_lora_rank, self.mla.qk_nope_head_dim
        self.weights = MLAWeights(
            (scene.normal(layer.num_heads, nope, rank) * rank**-0.5).to(scene.dtype),
            (scene.normal(layer.num_heads, rank, layer.v_head_dim) * rank**-0.5).to(scene.dtype),
        )
        self.q = scene.normal(sum(scene.new), layer.num_heads, layer.head_dim)

    def run(self, policy: ExtendPolicy, batch: ForwardBatch | None = None) -> Tensor:
        """Plan by the policy and attend. Stores the batch, and the seconds of planning and running."""
        scene = self.scene
        attention, self.batch = ModelAttention(scene.backend, scene.pools, policy), batch or scene.batch()
        rows = pad_rows(scene.new_rows(scene.keys).squeeze(1), self.batch.num_tokens)
        started = scene.now()
        with uninitialized_as_nan(scene.device):
            attention.plan(self.batch)
            planned = scene.now()
            q = pad_rows(self.q, self.batch.num_tokens)
            out = attention.attend_mla(q, rows, scene.layer, self.weights, self.batch)
        self.plan_s, self.run_s = planned - started, scene.now() - planned
        return out

    def wanted(self, *, new_as_given: bool = False) -> Tensor:
        """Expected output by the model's equations: up-project every row, then plain attention.

        Paths as MHA may attend to new rows as given, absorbed ones read them from the cache, rounded to its format.
        """
        scene, outs = self.scene, []
        for request, queries in enumerate(self.q.split(scene.new)):
            stored = scene.stored(request)[0].squeeze(1)
            if new_as_given:
                before = scene.case.lengths[request][0]
                stored[before:] = scene.keys[request][before:].squeeze(1)
            latent, rope = stored.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], -1)
            keys = torch.einsum("rl,hnl->rhn", latent, self.weights.w_kc.double())
            keys = torch.cat([keys, rope[:, None].expand(-1, keys.shape[1], -1)], -1)
            values = torch.einsum("rl,hlv->rhv", latent, self.weights.w_vc.double())
            outs.append(attention(queries, keys, values, scene.rules())[0])
        return torch.cat(outs)


def check_path(path: ExtendPath, context: CheckContext, scene: Scene | None = None, chunk: int = 24) -> None:
    """Check one layer with random up-projections by one of the three extend paths, ``chunk`` prefix rows at a time."""
    scene = scene or context.scene()
    layer = UpProjected(scene)
    out = layer.run(ExtendPolicy(chunk_threshold=0, chunk_capacity=chunk, forced=path))
    either = (False,) if path is ExtendPath.ABSORBED else (False, True)
    expected = [layer.wanted(new_as_given=given) for given in either]
    wanted, allowed = expected[0], 4 * scene.tolerance
    errors = [relative_error(out[: len(wanted)], each) for each in expected]
    error = min(errors) if all(each == each for each in errors) else NAN
    if not error <= allowed:
        raise CheckFailure(f"an extend by the path {path} is wrong by {error:.2e}; {allowed:.2e} is allowed")
    if not (out[len(wanted) :] == 0).all():
        raise CheckFailure(f"an extend by the path {path} gives padding rows that are not zero")
    context.measured.append(Measured(len(wanted), max(scene.totals), error, allowed, layer.plan_s, layer.run_s))


def path_checks() -> Iterator[Check]:
    some = Case(((5, 3), (9, 6), (0, 4)), kind=MLA, ragged=True)
    calls = {
        "causal": ((5, 3, 7), (5, 3, 7), True),
        "causal_prefix": ((5, 1, 7), (9, 30, 7), True),
        "prefix": ((5, 3, 7), (11, 40, 9), False),
        "short_prefix": ((5, 3), (2, 1), False),
        "one": ((1,), (1,), True),
        "long": ((70, 3), (300, 150), False),
        "causal_long": ((70, 2), (140, 65), True),
        "many": ((3, 1, 4, 1, 5, 9, 2, 6, 5), (5, 3, 5, 8, 9, 7, 9, 3, 2), False),
    }
    for name, (queries, keys, causal) in calls.items():
        yield Check(
            f"mla.ragged.{name}",
            "mla as mha",
            "attention over rows passed as arguments, with its natural log-sum-exp",
            lambda p, longest: some,
            partial(_ragged, queries=queries, keys=keys, causal=causal),
            name not in ("one", "long", "causal_long", "many"),
        )
    for name, requirement, case, applies in (
        (
            "large_inputs",
            "logits that overflow exp give the right result",
            replace(some, magnitude=60.0),
            _not_only_coded,
        ),
        ("heads_24", "24 heads give the right result", replace(some, mla_heads=24), lambda subject: None),
    ):
        yield Check(
            f"mla.ragged.{name}",
            "mla as mha",
            f"{requirement} over rows passed as arguments",
            always(case),
            partial(_ragged, queries=calls["prefix"][0], keys=calls["prefix"][1], causal=False),
            False,
            applies,
        )
    yield Check(
        "mla.ragged.two_alive",
        "mla as mha",
        "calls of two batches may be planned at the same time",
        always(some),
        _two_alive,
        True,
        lambda subject: (
            None if subject.capabilities.mla_extend - {ExtendPath.ABSORBED} else "it extends MLA absorbed only"
        ),
    )
    yield Check(
        "mla.ragged.captured",
        "mla as mha",
        "a captured call runs by lengths on the device, and gives padded rows zeros",
        always(some),
        _captured_call,
        True,
        lambda subject: None if subject.capabilities.ragged_graphs else "it captures no ragged calls",
    )
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield Check(
            f"mla.ragged.{dtype}",
            "mla as mha",
            f"attention over rows passed as arguments is right in {dtype}",
            always(replace(some, dtype=dtype)),
            partial(_ragged, queries=calls["prefix"][0], keys=calls["prefix"][1], causal=False),
            True,
        )
    yield Check(
        "mla.path.wrapped",
        "mla as mha",
        "hooks of MLA as MHA are found through every wrapper",
        lambda p, longest: Case(((2 * p + 3, 5), (0, 9), (p, 2)), kind=MLA, ragged=True),
        _wrapped,
    )
    for path in ExtendPath:
        yield Check(
            f"mla.path.{path}",
            "mla" if path is ExtendPath.ABSORBED else "mla as mha",
            f"an extend by the path {path} gives what the model's equations give",
            partial(_path_case, path),
            partial(check_path, path),
            True,
            partial(_extends_by, path),
        )


def _not_only_coded(subject: Subject) -> str | None:
    coded = only_coded(subject.capabilities.kv_dtypes)
    return "it attends in formats that hold no large numbers" if coded else None


def _path_case(path: ExtendPath, p: int, longest: int) -> Case:
    return Case(((2 * p + 3, 5), (0, 9), (p, 2)), kind=MLA, ragged=path is not ExtendPath.ABSORBED, padding=2)


def _extends_by(path: ExtendPath, subject: Subject) -> str | None:
    return None if path in subject.capabilities.mla_extend else f"it does not extend MLA {path}"
