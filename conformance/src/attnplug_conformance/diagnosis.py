"""Diagnosis of wrong results, in the domain's words: hypotheses are tried in order until one explains the output."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import FIRST, LAYER
from attnplug_conformance.scene import POISONS, SCRATCH_BYTES, Output, Scene
from attnplug_conformance.subject import Subject

BLOCKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

UNUSUAL_SEED, UNUSUAL_THREADS = 20_611, 3


class Wrong(Exception):
    """A mistake of a backend."""


@contextmanager
def wrong_when(words: str) -> Iterator[None]:
    """Say of what goes wrong inside when that was."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{words}: {wrong}") from None


def check_output(scene: Scene, output: Output) -> float:
    """The relative error of an output; raises :class:`Wrong` if rounding does not explain it."""
    wanted, wanted_lse = scene.wanted()
    out, rows = output.out, len(wanted)
    check_result(scene, out, scene.rows)
    error = relative_error(out[:rows], wanted)
    if not error <= scene.tolerance:
        raise Wrong(explain(scene, out[:rows], wanted, error))
    check_padding(out, rows)
    if output.lse is not None:
        wrong = relative_error(output.lse[:rows], wanted_lse)
        if not wrong <= max(scene.tolerance, 1e-5):
            raise Wrong(explain_lse(scene, output.lse[:rows], wanted_lse, wrong))
        if not (output.lse[rows:] == float("-inf")).all():
            raise Wrong("the log-sum-exp of rows of padding is not -inf: such a row sees no key")
        error = max(error, wrong)
    return error


def check_result(scene: Scene, out: object, rows: int) -> None:
    """Raise :class:`Wrong` for a result of another form than the contract's, or in memory that is not its own."""
    shape = (rows, scene.layer.num_heads, scene.widths[1])
    check_form(out, shape, scene.q, "the result", "rows, heads, width of a value")
    assert isinstance(out, Tensor)
    for held, zeroed in scene.scratch:
        if (buffer := held()) is None:
            continue
        if out.numel() and out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            raise Wrong("the result lies in the workspace, where whoever runs next writes: give it memory of its own")
        if zeroed and buffer[:SCRATCH_BYTES].any():
            raise Wrong("it left numbers in a workspace of a zeroed kind: each user leaves it zero, as it finds it")


def check_form(out: object, shape: tuple[int, ...], q: Tensor, what: str, dims: str) -> None:
    """Raise :class:`Wrong` unless a result is a tensor of this shape, of q's type and where q is."""
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        found = f"has shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"is {out!r:.80}"
        raise Wrong(f"{what} {found} and should have the shape {shape} ({dims})")
    if out.dtype is not q.dtype:
        raise Wrong(f"{what} is {out.dtype}, but q is {q.dtype}; they must be the same")
    if out.device != q.device:
        raise Wrong(f"{what} is on {out.device}, but q is on {q.device}; they must be on one device")
    if out.requires_grad:
        raise Wrong(f"{what} requires a gradient, so all that it was made of stays in memory; compute under no_grad")


def keeps_settings(subject: Subject, run: Callable[[], None]) -> None:
    """Raise :class:`Wrong` if ``run``, which builds a backend, changes what is the whole process's.

    It runs twice, the second time with the environment as it was before any check: what a library does to it when it is
    imported is not the backend's doing, and a variable that is set already would not show. Nor would a precision, which
    is another one each time.
    """
    before = dict(os.environ)
    try:
        with _settings_kept(subject.device, "highest"):
            run()
        _restore(subject.environment)
        with _settings_kept(subject.device, "high"):
            run()
        changed = sorted(name for name, value in subject.environment.items() ^ os.environ.items())
    finally:
        _restore(before)
    if changed:
        raise Wrong(f"it changed the environment variable {changed[0]}, which is the whole process's")


def _restore(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def _settings_kept(device: torch.device, precision: str) -> Iterator[None]:
    """Raise :class:`Wrong` if what torch keeps for a whole process is changed inside. It is put back afterwards.

    Before, it is what no backend would set: one that sets what is there already would not show.
    """
    dtype, threads, precise = torch.get_default_dtype(), torch.get_num_threads(), _precision()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(UNUSUAL_SEED)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(UNUSUAL_THREADS)
        torch.set_float32_matmul_precision(precision)
        before = _settings(device)
        try:
            yield
            after = _settings(device)
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precise or "highest")
    for name, value in before.items():
        if after[name] != value:
            raise Wrong(f"it changed {name}, which is the whole process's: its host samples and computes by it too")


def _precision() -> str | None:
    """``None`` where torch refuses to say: a device has another one (``torch.backends.cuda.matmul.fp32_precision``)."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _settings(device: torch.device) -> dict[str, object]:
    found: dict[str, object] = {
        "the default dtype": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 products": _precision(),
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        found["the state of the GPU's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found


def check_padding(out: Tensor, rows: int) -> None:
    if not (out[rows:] == 0).all():
        bad = int((out[rows:] != 0).flatten(1).any(-1).nonzero()[0])
        raise Wrong(f"row {rows + bad} is padding (past the {rows} rows of requests), and its output is not zero")


def explain(scene: Scene, out: Tensor, wanted: Tensor, error: float) -> str:
    """The words for a wrong output."""
    place, few = where(scene, out, wanted)
    for words, tables in _tables(scene):
        if _same(out, other := scene.misread(tables), scene.tolerance) and _differ(wanted, other, scene.tolerance):
            return f"{words} ({place})"
    if math.isnan(error):
        return _explain_nan(scene, out, place, few)
    for words, other in _hypotheses(scene):
        near = relative_error(out, other)
        if relative_error(other, wanted) > 2 * scene.tolerance and near <= 2 * scene.tolerance and near < error / 3:
            return f"{words} ({place})"
    if (out == 0).all():
        return "the output is all zero"
    return f"the output is wrong by {error:.1e} where {scene.tolerance:.0e} is allowed, first at {place}{few}"


def _tables(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Page tables by which a mistake reads."""
    table = scene.page_table
    if not table.numel():
        return
    yield "it read pages as if a request's pages followed each other", table[:, :1] + torch.arange(table.shape[1])
    yield "it read the pages of request 0 for other requests", table[:1].expand_as(table)
    if len(table) > 1:
        yield "it read the pages of another request: the next one's", table.roll(-1, 0)


def _same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two outputs agree, with NaN in the same rows."""
    one, other = one.double().cpu(), other.double().cpu()
    finite = ~other.isnan().flatten(1).any(-1)
    if not finite.any() or not torch.equal(~one.isnan().flatten(1).any(-1), finite):
        return False
    return relative_error(one[finite], other[finite]) <= 4 * tolerance


def _differ(wanted: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if another output is wrong in a row that is not NaN: NaN alone says little."""
    finite = ~other.isnan().flatten(1).any(-1)
    return bool(finite.any()) and not relative_error(wanted[finite], other[finite]) <= 4 * tolerance


def _explain_nan(scene: Scene, out: Tensor, place: str, few: str) -> str:
    for what, words in POISONS.items():
        try:
            again = scene.healed(what).run().out[: len(out)]
        except Exception:
            continue
        if not again.isnan().any():
            return f"it read {words} ({place})"
    if scene.case.magnitude != 1.0:
        return f"it overflows with large inputs: subtract each row's largest logit before exp, in float32 ({place})"
    return f"the output is NaN, first at {place}{few}"


def where(scene: Scene, out: Tensor, wanted: Tensor) -> tuple[str, str]:
    """The first wrong row, by request and token, and which requests or heads are right in spite of it."""
    wanted = wanted.to(out.device)
    difference = (out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-3)
    bad = ~(difference <= scene.tolerance)
    if not bad.any():
        return "no single row", ""
    row = int(bad.any(-1).nonzero()[0])
    starts, wrong = 0, []
    place = ""
    for request, new in enumerate(scene.new):
        if bad[starts : starts + new].any():
            wrong.append(request)
        if starts <= row < starts + new:
            place = f"request {request}, token {scene.totals[request] - new + row - starts}"
        starts += new
    few = ""
    if 0 < len(wrong) < len(scene.new):
        few = f"; requests {', '.join(map(str, wrong))} of {len(scene.new)} are wrong"
        shorter = max(total for request, total in enumerate(scene.totals) if request not in wrong)
        if min(scene.totals[request] for request in wrong) > shorter:
            few = f"; only requests of more than {shorter} rows are wrong"
        elif wrong == list(range(wrong[0], len(scene.new))):
            few = f"; only the first {wrong[0]} of {len(scene.new)} requests are right"
    heads = bad.any(0)
    if not heads.all():
        few += f"; heads {', '.join(map(str, heads.nonzero().flatten().tolist()))} are wrong"
    return place, few


def _hypotheses(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Every mistake that can be computed, with the output that it gives."""
    right, layer, case = scene.rules(), scene.layer, scene.case
    width = layer.head_dim
    if case.kv_scales != (1.0, 1.0):
        for scaled, words in (
            ((False, False), "keys and values"),
            ((False, True), "keys"),
            ((True, False), "values"),
        ):
            yield f"it ignored the fp8 scale of {words}", scene.wanted(scaled=scaled)[0]
    if scene.packed:
        yield "it ignored the scales that a row of fp8_ds_mla has", scene.wanted(scaled=(False, False))[0]
    if right.window is not None:
        yield "it ignored the sliding window", scene.wanted(replace(right, window=None))[0]
        for change, words in ((1, "one key too many"), (-1, "one key too few")):
            yield (
                f"its sliding window has {words}: a query sees {right.window} keys, itself included",
                scene.wanted(replace(right, window=right.window + change))[0],
            )
    yield (
        f"it multiplied logits by head_dim ** -0.5 ({width**-0.5:.4g}), not by the layer's scale ({layer.scale:.4g})",
        scene.wanted(replace(right, scale=width**-0.5))[0],
    )
    if case.mla is not None:
        yield from _rotary(scene)
        row = case.mla.row_dim
        yield (
            f"it multiplied logits by {row**-0.5:.4g}, that of a latent row, not by the layer's scale",
            scene.wanted(replace(right, scale=row**-0.5))[0],
        )
    yield "it did not scale the logits", scene.wanted(replace(right, scale=1.0))[0]
    first = case.layers[0]
    yield (
        f"it used the scale of layer {FIRST} ({first.scale:.4g}) in layer {LAYER} ({layer.scale:.4g})",
        scene.wanted(replace(right, scale=first.scale))[0],
    )
    if case.trees is not None:
        yield "it ran a tree of drafts as a chain: each row saw all rows before it", scene.wanted(right)[0]
    if case.magnitude != 1.0:
        yield (
            "it masks logits with a number: a query whose own are lower sees what it must not; mask with -inf",
            scene.wanted(replace(right, masked=-1e3))[0],
        )
    yield "it applied no causal mask", scene.wanted(replace(right, aligned="none", window=None))[0]
    yield (
        "its causal mask is aligned to the first key: a prefix shifts what each query sees",
        scene.wanted(replace(right, aligned="first"))[0],
    )
    yield "each query misses its newest key, its own", scene.wanted(replace(right, hidden=1))[0]
    yield "each query sees one key too many, the next token's", scene.wanted(replace(right, hidden=-1))[0]
    if right.cap is not None:
        yield "it ignored the logit cap", scene.wanted(replace(right, cap=None))[0]
    if scene.sinks is not None:
        yield "it ignored the sinks", scene.wanted(sinks=False)[0]
    if case.mla is None and case.kv_heads > 1 and case.group > 1:
        yield (
            "it gave query head h the KV head h % kv_heads; neighbouring query heads share one",
            scene.wanted(replace(right, interleaved=True))[0],
        )
    longest = max(scene.totals, default=0)
    for block in BLOCKS:
        if block < longest:
            yield (
                f"it attends to the first {block} rows of a request only",
                scene.wanted(replace(right, longest=block))[0],
            )


def _rotary(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Mistakes with the parts of an MLA row: the latent one, then the rotary one."""
    assert scene.case.mla is not None
    rank, rope, scale = scene.case.mla.kv_lora_rank, scene.case.mla.qk_rope_head_dim, scene.layer.scale
    if not rope:
        return
    q, kept = scene.q.double(), scene.q
    for words, other in (
        ("it ignored the rotary part of rows, their last values", torch.cat([q[..., :rank], q[..., rank:] * 0], -1)),
        ("it did not scale the logits' rotary part", torch.cat([q[..., :rank], q[..., rank:] / scale], -1)),
        ("it took the rotary part for the first of a row; it follows the latent part", q.roll(-rope, -1)),
    ):
        scene.q = other
        try:
            yield words, scene.wanted()[0]
        finally:
            scene.q = kept


def explain_lse(scene: Scene, lse: Tensor, wanted: Tensor, error: float) -> str:
    """The words for a wrong log-sum-exp."""
    right, largest = scene.rules(), _largest(scene)
    others = [
        ("the log-sum-exp is base 2; it is the natural logarithm here", wanted / math.log(2)),
        ("the log-sum-exp is base 10; it is the natural logarithm here", wanted / math.log(10)),
        ("the log-sum-exp is laid out [heads, tokens]; it is [tokens, heads]", wanted.T.reshape(wanted.shape)),
        ("the log-sum-exp is the largest logit, without the sum", largest),
        ("the log-sum-exp lacks the largest logit, which was subtracted before exp: add it again", wanted - largest),
        ("the log-sum-exp has the wrong sign", -wanted),
        ("the log-sum-exp is the sum of exponentials, without the logarithm", wanted.exp()),
        ("the log-sum-exp is of unscaled logits", scene.wanted(replace(right, scale=1.0))[1]),
    ]
    if scene.sinks is not None:
        extra = scene.sinks.double()
        others.append(("the log-sum-exp counts the sinks; they are not in it", torch.logaddexp(wanted, extra[None])))
    for words, other in others:
        if relative_error(lse, other) <= max(4 * scene.tolerance, 1e-4):
            return words
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if error < 2e-2 and relative_error(lse, wanted.to(dtype).double()) <= error / 10:
            return f"the log-sum-exp is rounded to {name}; compute and store it in float32"
    if lse.isnan().all():
        return "the log-sum-exp was asked for and not filled"
    return f"the log-sum-exp is wrong by {error:.1e}"


def _largest(scene: Scene) -> Tensor:
    """The largest logit of each row, from a scale of them all that leaves nothing else of the sum."""
    sharp, rules = 4096.0, scene.rules()
    if rules.cap is not None:
        return torch.full((sum(scene.new), scene.layer.num_heads), math.inf, device=scene.device)
    return scene.wanted(replace(rules, scale=rules.scale * sharp))[1] / sharp
