"""MLA prefill as MHA: calls over rows at hand, and the three paths of an extend against the model's equations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ExtendPath, ForwardBatch, RaggedCall
from attnplug.contract.backend import optional_hooks
from attnplug.contract.hooks import bind_hook
from attnplug.host import ExtendPolicy, ModelAttention
from attnplug.mla.weights import MLAWeights
from attnplug.wrappers.split import SplitBackend
from attnplug_conformance.arithmetic import NAN, relative_error, tail, zero_by_chance_is_nan
from attnplug_conformance.case import FP8_CACHES, Case, always
from attnplug_conformance.check import Check, Measured, Stand
from attnplug_conformance.checks.plans import Around
from attnplug_conformance.diagnosis import Wrong, check_form, wrong_when
from attnplug_conformance.reference import Rules, attention
from attnplug_conformance.scene import Scene
from attnplug_conformance.subject import Subject

MLA = AttentionKind.MLA


class Ragged:
    """Rows at hand for one call of ``forward_ragged``, and its float64 result."""

    def __init__(self, scene: Scene, queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, index: int) -> None:
        layer, self.scene = scene.layer, scene
        self.call = RaggedCall.of(index, queries, keys, causal=causal, device=scene.device)
        self.q = scene.normal(sum(queries), layer.num_heads, layer.head_dim)
        self.k = scene.normal(sum(keys), layer.num_heads, layer.head_dim)
        self.v = scene.normal(sum(keys), layer.num_heads, layer.v_head_dim)

    def wanted(self, *, scale: float | None = None, aligned: str | None = None) -> tuple[Tensor, Tensor]:
        call, outs = self.call, []
        rules = Rules(scale or self.scene.layer.scale, aligned=aligned or ("last" if call.causal else "none"))
        starts = zip(accumulate(call.query_lens, initial=0), accumulate(call.kv_lens, initial=0), strict=True)
        for (query, key), queries, keys in zip(starts, call.query_lens, call.kv_lens, strict=False):
            rows = slice(key, key + keys)
            outs.append(attention(self.q[query : query + queries], self.k[rows], self.v[rows], rules))
        return torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])


def _ragged(stand: Stand, queries: tuple[int, ...], keys: tuple[int, ...], causal: bool) -> None:
    scene = stand.scene()
    hook = bind_hook(scene.backend, "forward_ragged", optional_hooks()["forward_ragged"], ())
    if hook is None:
        raise Wrong("it claims to extend MLA as MHA, and has no forward_ragged")
    made = Ragged(scene, queries, keys, causal, 0)
    plan = _chunk_plan(scene, made.call)
    before = scene.snapshot()
    for asked in (False, True):
        lse = torch.full(made.q.shape[:2], NAN, device=scene.device) if asked else None
        given = {"q": made.q.clone(), "k": made.k.clone(), "v": made.v.clone()}
        with zero_by_chance_is_nan(scene.device):
            out = hook(*given.values(), scene.layer, made.call, plan, lse)
        _check_ragged(stand, made, out, lse)
        for name, rows in given.items():
            if not torch.equal(rows, getattr(made, name)):
                raise Wrong(f"forward_ragged changed {name}, which is its caller's: the next call is given the same")
    if any(scene.changes(before)):
        raise Wrong("forward_ragged wrote to the cache; it attends to rows at hand, and touches no cache")


def _two_alive(stand: Stand) -> None:
    """Calls of two batches are planned, and then that of the first one runs."""
    scene = stand.scene()
    hook = bind_hook(scene.backend, "forward_ragged", optional_hooks()["forward_ragged"], ())
    assert hook is not None
    first, second = Ragged(scene, (5, 3), (11, 7), False, 0), Ragged(scene, (3, 5), (9, 9), False, 0)
    plan = _chunk_plan(scene, first.call)
    _chunk_plan(scene, second.call)
    with wrong_when(
        "with the calls of two batches planned, that of the first one ran by the second one's lengths: keep what "
        "init_mha_chunk_metadata plans in the plan that it returns"
    ):
        with zero_by_chance_is_nan(scene.device):
            out = hook(first.q.clone(), first.k.clone(), first.v.clone(), scene.layer, first.call, plan, None)
        _check_ragged(stand, first, out, None)


def _chunk_plan(scene: Scene, call: RaggedCall) -> object:
    """Plan of the backend's own hook for a batch of this call, or ``None`` if it has no hook."""
    hook = bind_hook(
        scene.backend,
        "init_mha_chunk_metadata",
        optional_hooks()["init_mha_chunk_metadata"],
        ("disable_flashinfer_ragged",),
    )
    if hook is None:
        return None
    batch = scene.batch()
    batch.geometry = geometry = replace(batch.geometry, calls=(call,))
    table, lens = geometry.page_table.clone(), geometry.seq_lens.clone()
    plan = hook(batch, False)
    if not torch.equal(geometry.page_table, table) or not torch.equal(geometry.seq_lens, lens):
        raise Wrong("init_mha_chunk_metadata changed the batch's geometry, which is its caller's")
    return plan


def _check_ragged(stand: Stand, made: Ragged, out: Tensor, lse: Tensor | None) -> None:
    scene, (wanted, wanted_lse) = made.scene, made.wanted()
    check_form(out, tuple(wanted.shape), made.q, "the result of forward_ragged", "query rows, heads, width of a value")
    error = relative_error(out, wanted)
    if not error <= scene.tolerance:
        layer, words = scene.layer, f"forward_ragged is wrong by {error:.1e}"
        for why, other in (
            ("it multiplied logits by head_dim ** -0.5", made.wanted(scale=layer.head_dim**-0.5)),
            ("it applied no causal mask to a causal call", made.wanted(aligned="none")),
            ("its causal mask is aligned to the first key, not to the last", made.wanted(aligned="first")),
            ("it applied a causal mask to a call that is not causal", made.wanted(aligned="last")),
        ):
            near = relative_error(out, other[0])
            if near <= 4 * scene.tolerance and near < error / 3:
                words = f"forward_ragged: {why}"
                break
        raise Wrong(words)
    if lse is not None:
        wrong = relative_error(lse, wanted_lse)
        if not wrong <= max(scene.tolerance, 1e-5):
            base2 = relative_error(lse, wanted_lse / torch.tensor(2.0).log().double()) <= 4 * scene.tolerance
            unfilled = "it was not filled" if lse.isnan().any() else f"it is wrong by {wrong:.1e}"
            raise Wrong(f"the log-sum-exp of forward_ragged: {'it is base 2' if base2 else unfilled}")
    stand.measured.append(Measured(len(out), max(made.call.kv_lens), error, scene.tolerance, 0.0, 0.0))


def _wrapped(stand: Stand) -> None:
    """Extend as MHA through wrappers, which forward the backend's hooks."""
    scene = stand.scene()
    scene.backend = SplitBackend(Around(Around(scene.backend)), scene.backend)
    paths = stand.subject.can.mla_extend
    path = ExtendPath.CHUNKED if ExtendPath.CHUNKED in paths else ExtendPath.ONE_SHOT
    with wrong_when("inside wrappers"):
        _extend(path, stand, scene)


class UpProjected:
    """One layer with random up-projections on a scene: what the three paths of an extend must agree on."""

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
        """Plan by the policy, and attend; the batch is kept, and the seconds of both."""
        scene = self.scene
        attention, self.batch = ModelAttention(scene.backend, scene.pools, policy), batch or scene.batch()
        rows = tail(scene.new_rows(scene.keys).squeeze(1), self.batch.num_tokens)
        started = scene.now()
        with zero_by_chance_is_nan(scene.device):
            attention.plan(self.batch)
            planned = scene.now()
            q = tail(self.q, self.batch.num_tokens)
            out = attention.attend_mla(q, rows, scene.layer, self.weights, self.batch)
        self.plan_s, self.run_s = planned - started, scene.now() - planned
        return out

    def wanted(self) -> Tensor:
        """By the model's equations: up-project every row, then plain attention."""
        scene, outs = self.scene, []
        for request, queries in enumerate(self.q.split(scene.new)):
            stored = scene.stored(request)[0].squeeze(1)
            latent, rope = stored.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], -1)
            keys = torch.einsum("rl,hnl->rhn", latent, self.weights.w_kc.double())
            keys = torch.cat([keys, rope[:, None].expand(-1, keys.shape[1], -1)], -1)
            values = torch.einsum("rl,hlv->rhv", latent, self.weights.w_vc.double())
            outs.append(attention(queries, keys, values, Rules(scene.layer.scale))[0])
        return torch.cat(outs)


def _extend(path: ExtendPath, stand: Stand, scene: Scene | None = None) -> None:
    """One layer with random up-projections, by one of the three paths."""
    scene = scene or stand.scene()
    layer = UpProjected(scene)
    out = layer.run(ExtendPolicy(chunk_threshold=0, chunk_capacity=24, forced=path))
    wanted = layer.wanted()
    error, allowed = relative_error(out[: len(wanted)], wanted), 4 * scene.tolerance
    if not error <= allowed:
        raise Wrong(f"an extend by the path {path} is wrong by {error:.1e} where {allowed:.0e} is allowed")
    if not (out[len(wanted) :] == 0).all():
        raise Wrong(f"an extend by the path {path} gives padding rows that are not zero")
    stand.measured.append(Measured(len(wanted), max(scene.totals), error, allowed, layer.plan_s, layer.run_s))


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
            "attention over rows at hand, with its natural log-sum-exp",
            lambda p, longest: some,
            partial(_ragged, queries=queries, keys=keys, causal=causal),
            name not in ("one", "long", "causal_long", "many"),
        )
    for name, says, case, applies in (
        ("large_inputs", "logits that exp overflows give the right result", replace(some, magnitude=60.0), _not_in_fp8),
        ("heads_24", "24 heads are attended to right", replace(some, mla_heads=24), lambda subject: None),
    ):
        yield Check(
            f"mla.ragged.{name}",
            "mla as mha",
            f"{says} over rows at hand",
            always(case),
            partial(_ragged, queries=calls["prefix"][0], keys=calls["prefix"][1], causal=False),
            False,
            applies,
        )
    yield Check(
        "mla.ragged.two_alive",
        "mla as mha",
        "calls of two batches are planned at once",
        always(some),
        _two_alive,
        True,
        lambda subject: None if subject.can.mla_extend - {ExtendPath.ABSORBED} else "it extends MLA absorbed only",
    )
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        yield Check(
            f"mla.ragged.{dtype}",
            "mla as mha",
            f"attention over rows at hand is right in {dtype}",
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
            partial(_extend, path),
            True,
            partial(_extends_by, path),
        )


def _not_in_fp8(subject: Subject) -> str | None:
    return "it attends in fp8, which holds no large numbers" if subject.can.kv_dtypes <= FP8_CACHES else None


def _path_case(path: ExtendPath, p: int, longest: int) -> Case:
    return Case(((2 * p + 3, 5), (0, 9), (p, 2)), kind=MLA, ragged=path is not ExtendPath.ABSORBED, padding=2)


def _extends_by(path: ExtendPath, subject: Subject) -> str | None:
    return None if path in subject.can.mla_extend else f"it does not extend MLA {path}"
