"""Diagnosis of wrong results: hypotheses are tried in order until one explains the output."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from attnplug.contract.batch import describe_result
from attnplug_conformance.arithmetic import changed_inputs, relative_error
from attnplug_conformance.case import FIRST, LAYER
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.scene import GUARD_BYTES, POISONED, SCRATCH_BYTES, Output, Scene
from attnplug_conformance.subject import Subject

BLOCKS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

UNUSUAL_SEED, UNUSUAL_THREADS = 20_611, 3


def explain_changes() -> str:
    """Name the inputs that the calls of the running check changed; empty if there are none."""
    changed = " and ".join(changed_inputs())
    return f"it changed {changed}, which the caller owns and uses again; change a copy" if changed else ""


def check_inputs_unchanged() -> None:
    """Raise :class:`CheckFailure` if a call of the running check changed its inputs."""
    if message := explain_changes():
        raise CheckFailure(message)


def check_output(scene: Scene, output: Output) -> float:
    """Return the relative error of an output; raises :class:`CheckFailure` if rounding does not explain it."""
    wanted, wanted_lse = scene.wanted()
    out, rows = output.out, len(wanted)
    check_result(scene, out, scene.rows)
    error = relative_error(out[:rows], wanted)
    if not error <= scene.tolerance:
        raise CheckFailure(explain(scene, out[:rows], wanted, error))
    check_padding(out, rows)
    return error if output.lse is None else max(error, check_lse(scene, output.lse, wanted_lse))


def check_lse(scene: Scene, lse: Tensor, wanted: Tensor) -> float:
    """Return the error of a log-sum-exp; raises :class:`CheckFailure` if rounding does not explain it."""
    rows = len(wanted)
    error = relative_error(lse[:rows], wanted)
    if not error <= max(scene.tolerance, 1e-5):
        raise CheckFailure(explain_lse(scene, lse[:rows], wanted, error))
    if not (lse[rows:] == float("-inf")).all():
        raise CheckFailure("the log-sum-exp of padding rows is not -inf; a padding row sees no key")
    return error


def check_result(scene: Scene, out: object, rows: int) -> None:
    """Raise :class:`CheckFailure` for a result of wrong shape, dtype or device, or in workspace memory."""
    shape = (rows, scene.layer.num_heads, scene.widths[1])
    check_tensor(out, shape, scene.q, "the result", "rows, heads, v_head_dim")
    assert isinstance(out, Tensor)
    for held, zeroed in scene.scratch:
        if (buffer := held()) is None:
            continue
        if out.numel() and out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            raise CheckFailure(
                "the result lies in the workspace, which the next call overwrites; allocate it separately"
            )
        if zeroed and buffer[:SCRATCH_BYTES].any():
            raise CheckFailure("it left non-zero bytes in a zeroed workspace; every user must leave it zero")
        if not (buffer.as_strided((GUARD_BYTES,), (1,), buffer.numel()) == 0xFF).all():
            raise CheckFailure(
                f"it wrote beyond the end of its workspace of {buffer.numel()} bytes; request all that its kernels use"
            )


def check_tensor(out: object, shape: tuple[int, ...], q: Tensor, what: str, dims: str) -> None:
    """Raise :class:`CheckFailure` unless a result is a tensor of this shape with q's dtype and device."""
    if not isinstance(out, Tensor) or tuple(out.shape) != shape:
        found = f"has shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"is {describe_result(out)}"
        raise CheckFailure(f"{what} {found} and should have the shape {shape} ({dims})")
    if out.dtype is not q.dtype:
        raise CheckFailure(f"{what} is {out.dtype}, but q is {q.dtype}; they must be the same")
    if out.device != q.device:
        raise CheckFailure(f"{what} is on {out.device}, but q is on {q.device}; they must be on one device")
    if out.requires_grad:
        raise CheckFailure(
            f"{what} requires a gradient, which keeps the whole autograd graph in memory; compute under no_grad"
        )


def check_settings_unchanged(subject: Subject, run: Callable[[], None]) -> None:
    """Raise :class:`CheckFailure` if ``run``, which builds a backend, changes process-wide settings.

    It runs twice, the second time with the environment from before any check. Changes made by a library's import do not
    count, and a variable that is already set would hide a change. For the same reason the two runs differ in matmul
    precision.
    """
    before = dict(os.environ)
    try:
        with _settings_unchanged(subject.device, "highest"):
            run()
        _restore(subject.environment)
        with _settings_unchanged(subject.device, "high"):
            run()
        changed = sorted(name for name, value in subject.environment.items() ^ os.environ.items())
    finally:
        _restore(before)
    if changed:
        raise CheckFailure(f"it changed the environment variable {changed[0]}, which belongs to the whole process")


def _restore(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@contextmanager
def _settings_unchanged(device: torch.device, precision: str) -> Iterator[None]:
    """Raise :class:`CheckFailure` if torch's process-wide settings change inside. They are restored on exit.

    They start at values that no backend would set, so that every assignment shows.
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
            raise CheckFailure(f"it changed {name}, which belongs to the whole process: its host depends on it too")


def _precision() -> str | None:
    """float32 matmul precision; ``None`` if torch raises because ``torch.backends.cuda.matmul`` has its own."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _settings(device: torch.device) -> dict[str, object]:
    found: dict[str, object] = {
        "the default dtype": torch.get_default_dtype(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the precision of float32 matmuls": _precision(),
        "the state of torch's random number generator": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        found["the state of the GPU's random number generator"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found


def check_padding(out: Tensor, rows: int) -> None:
    if not (out[rows:] == 0).all():
        bad = int((out[rows:] != 0).flatten(1).any(-1).nonzero()[0])
        raise CheckFailure(f"row {rows + bad} is padding (the requests have {rows} rows), but its output is not zero")


def explain(scene: Scene, out: Tensor, wanted: Tensor, error: float) -> str:
    """Diagnose a wrong output."""
    if not scene.diagnosed:
        return f"the output is wrong by {error:.1e}"
    place, scope = locate(scene, out, wanted)
    for message, tables in _wrong_tables(scene):
        if _same_with_nan(out, other := scene.read_by_tables(tables), scene.tolerance) and _differs_where_finite(
            wanted, other, scene.tolerance
        ):
            return f"{message} ({place})"
    if math.isnan(error):
        return _explain_nan(scene, out, place, scope)
    if (out == 0).all():
        return "the output is all zero"
    mistakes = list(_hypotheses(scene))
    if found := _explained_by(mistakes, slice(None), scene, out, wanted, error):
        return f"{found} ({place})"
    wrong = _wrong_rows(scene, out, wanted).any(-1)
    counts = torch.tensor(scene.new)
    request = torch.arange(len(counts)).repeat_interleave(counts).to(wrong.device)
    for rows in (wrong, wrong & (request == request[wrong][:1])):
        found = "the output is zero" if (out[rows] == 0).all() else ""
        if found := found or _explained_by(mistakes, rows, scene, out, wanted, error):
            return f"in some rows {found} (first at {place}{scope})"
    return f"the output is wrong by {error:.2e}; {scene.tolerance:.2e} is allowed, first at {place}{scope}"


def _explained_by(
    mistakes: list[tuple[str, Tensor]], rows: slice | Tensor, scene: Scene, out: Tensor, wanted: Tensor, error: float
) -> str:
    """Return the mistake that gives these rows of an output; empty if none does."""
    best, found = min(2 * scene.tolerance, error / 3), ""
    for message, other in mistakes:
        near = relative_error(out[rows], other[rows])
        # The first one of several that explain it equally well. In 8 bits, many are within the tolerance.
        if relative_error(other[rows], wanted[rows]) > 2 * scene.tolerance and near <= (best / 2 if found else best):
            best, found = near, message
    return found


def _wrong_rows(scene: Scene, out: Tensor, wanted: Tensor) -> Tensor:
    """Return the rows and heads ``[rows, heads]`` in which an output is wrong."""
    wanted = wanted.to(out.device)
    difference = (out.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-3)
    wrong: Tensor = ~(difference <= scene.tolerance)
    return wrong


def _wrong_tables(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Yield page tables that a faulty backend might read by, with the diagnosis."""
    table = scene.page_table
    if not table.numel():
        return
    rows = torch.tensor(scene.totals)[:, None]
    used = torch.arange(table.shape[1]) * scene.page_size < rows
    for message, other in (
        ("it read a request's pages as if they were contiguous", table[:, :1] + torch.arange(table.shape[1])),
        ("it read the pages of request 0 for other requests", table[:1].expand_as(table)),
        ("it read the pages of the next request", table.roll(-1, 0)),
    ):
        if not torch.equal(other[used], table[used]):
            yield message, other


def _same_with_nan(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if two outputs agree, with NaN in the same rows."""
    one, other = one.double().cpu(), other.double().cpu()
    finite = ~other.isnan().flatten(1).any(-1)
    if not finite.any() or not torch.equal(~one.isnan().flatten(1).any(-1), finite):
        return False
    return relative_error(one[finite], other[finite]) <= 4 * tolerance


def _differs_where_finite(wanted: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return True if another output is wrong in a row without NaN. NaN alone proves little."""
    finite = ~other.isnan().flatten(1).any(-1)
    return bool(finite.any()) and not relative_error(wanted[finite], other[finite]) <= 4 * tolerance


def _explain_nan(scene: Scene, out: Tensor, place: str, scope: str) -> str:
    for region, message in POISONED.items():
        try:
            again = scene.with_zeros(region).run().out[: len(out)]
        except Exception:
            continue
        if not again.isnan().any():
            return f"it read {message} ({place})"
    if scene.case.magnitude != 1.0:
        return f"it overflows with large inputs; subtract each row's largest logit before exp, in float32 ({place})"
    return f"the output is NaN, first at {place}{scope}"


def locate(scene: Scene, out: Tensor, wanted: Tensor) -> tuple[str, str]:
    """Locate the first wrong row by request and token, and describe which requests or heads are wrong."""
    bad = _wrong_rows(scene, out, wanted)
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
    scope = ""
    if 0 < len(wrong) < len(scene.new):
        scope = f"; requests {', '.join(map(str, wrong))} of {len(scene.new)} are wrong"
        shorter = max(total for request, total in enumerate(scene.totals) if request not in wrong)
        if min(scene.totals[request] for request in wrong) > shorter:
            scope = f"; only requests of more than {shorter} rows are wrong"
        elif wrong == list(range(wrong[0], len(scene.new))):
            scope = f"; only the first {wrong[0]} of {len(scene.new)} requests are right"
    heads = bad.any(0)
    if not heads.all():
        scope += f"; heads {', '.join(map(str, heads.nonzero().flatten().tolist()))} are wrong"
    return place, scope


def _hypotheses(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Yield diagnoses of common mistakes, each with the output that the mistake would give."""
    right, layer, case = scene.rules(), scene.layer, scene.case
    width = layer.head_dim
    if case.kv_scales != (1.0, 1.0):
        for scaled, message in (
            ((False, False), "keys and values"),
            ((False, True), "keys"),
            ((True, False), "values"),
        ):
            yield f"it ignored the layer's scale of {message}", scene.wanted(scaled=scaled)[0]
        yield from _scale_hypotheses(scene)
    if scene.format.in_bytes:
        yield f"it ignored the scales of {scene.format} rows", scene.wanted(scaled=(False, False))[0]
    if right.window is not None:
        yield "it ignored the sliding window", scene.wanted(replace(right, window=None))[0]
        for change, message in ((1, "one key too many"), (-1, "one key too few")):
            yield (
                f"its sliding window has {message}: a query sees {right.window} keys, itself included",
                scene.wanted(replace(right, window=right.window + change))[0],
            )
    yield (
        f"it multiplied logits by head_dim ** -0.5 ({width**-0.5:.4g}), not by the layer's scale ({layer.scale:.4g})",
        scene.wanted(replace(right, scale=width**-0.5))[0],
    )
    if case.mla is not None:
        yield from _rope_hypotheses(scene)
        row = case.mla.row_dim
        yield (
            f"it multiplied logits by {row**-0.5:.4g} (row_dim ** -0.5 of a latent row), not by the layer's scale",
            scene.wanted(replace(right, scale=row**-0.5))[0],
        )
    yield "it did not scale the logits", scene.wanted(replace(right, scale=1.0))[0]
    yield "it multiplied logits by the layer's scale twice", scene.wanted(replace(right, scale=layer.scale**2))[0]
    first = case.layers[0]
    yield (
        f"it used the scale of layer {FIRST} ({first.scale:.4g}) in layer {LAYER} ({layer.scale:.4g})",
        scene.wanted(replace(right, scale=first.scale))[0],
    )
    if case.trees is not None:
        yield "it treated a draft tree as a chain: each row saw all rows before it", scene.wanted(trees=False)[0]
    if case.magnitude != 1.0:
        for masked in (-1e3, -1e4):
            yield (
                "it masks logits with a finite number, which exceeds very low logits; mask with -inf",
                scene.wanted(replace(right, masked=masked))[0],
            )
    yield "it applied no causal mask", scene.wanted(replace(right, aligned="none", window=None))[0]
    yield (
        "its causal mask is aligned to the first key, which is wrong with a prefix; align it to the last key",
        scene.wanted(replace(right, aligned="first"))[0],
    )
    yield "each query misses its own key", scene.wanted(replace(right, hidden=1))[0]
    yield "each query sees one key too many, that of the next token", scene.wanted(replace(right, hidden=-1))[0]
    if right.cap is not None:
        yield "it ignored the logit cap", scene.wanted(replace(right, cap=None))[0]
    if scene.sinks is not None:
        yield "it ignored the sinks", scene.wanted(sinks=False)[0]
        multiplied, base_2 = scene.sinks * layer.scale, scene.sinks * math.log(2)
        yield "it multiplied the sinks by the layer's scale; they are logits", scene.wanted(sinks=multiplied)[0]
        yield "it took the sinks for logits in base 2; multiply them by log2(e)", scene.wanted(sinks=base_2)[0]
        for count in range(2, 9):
            yield (
                f"it added the sinks {count} times, such as in each split",
                scene.wanted(sinks=scene.sinks + math.log(count))[0],
            )
        if right.cap is not None:
            capped = right.cap * torch.tanh(scene.sinks / right.cap)
            yield "it capped the sinks, which are not capped", scene.wanted(sinks=capped)[0]
    if case.mla is None and case.kv_heads > 1 and case.group > 1:
        yield (
            "query head h used KV head h % kv_heads; consecutive query heads share a KV head",
            scene.wanted(replace(right, interleaved=True))[0],
        )
    longest = max(scene.totals, default=0)
    for block in BLOCKS:
        if block < longest:
            yield (
                f"it attends to the first {block} rows of a request only",
                scene.wanted(replace(right, longest=block))[0],
            )


def _scale_hypotheses(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in the use of a cache's layer scales. A result is proportional to its values."""
    keys, values = scene.case.kv_scales if scene.case.mla is None else scene.case.kv_scales[:1] * 2
    right, rules = scene.wanted()[0], scene.rules()
    twice = scene.wanted(replace(rules, scale=rules.scale * keys))[0]
    yield "it applied the layer's scales of keys and values twice", twice * values
    yield "it applied the layer's scale of keys twice", twice
    yield "it applied the layer's scale of values twice", right * values
    yield "it multiplied values by the layer's scale of keys", right * (keys / values)
    crossed = scene.wanted(replace(rules, scale=rules.scale * values / keys))[0]
    yield "it exchanged the layer's scales of keys and values", crossed * (keys / values)


def _rope_hypotheses(scene: Scene) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in handling MLA rows, which consist of a latent part followed by a rotary part."""
    assert scene.case.mla is not None
    rank, rope, scale = scene.case.mla.kv_lora_rank, scene.case.mla.qk_rope_head_dim, scene.layer.scale
    if not rope:
        return
    q, original = scene.q.double(), scene.q
    for message, other in (
        (
            "it ignored the rotary part of rows (the last qk_rope_head_dim values)",
            torch.cat([q[..., :rank], q[..., rank:] * 0], -1),
        ),
        ("it did not scale the rotary part of the logits", torch.cat([q[..., :rank], q[..., rank:] / scale], -1)),
        ("it read the rotary part from the start of a row; it follows the latent part", q.roll(-rope, -1)),
    ):
        scene.q = other
        try:
            yield message, scene.wanted()[0]
        finally:
            scene.q = original


def explain_lse(scene: Scene, lse: Tensor, wanted: Tensor, error: float) -> str:
    """Diagnose a wrong log-sum-exp."""
    if not scene.diagnosed:
        return f"the log-sum-exp is wrong by {error:.1e}"
    right, largest = scene.rules(), _max_logits(scene)
    others = [
        ("the log-sum-exp is base 2; the contract requires the natural logarithm", wanted / math.log(2)),
        ("the log-sum-exp is base 10; the contract requires the natural logarithm", wanted / math.log(10)),
        (
            "the log-sum-exp is laid out [heads, tokens]; the contract requires [tokens, heads]",
            wanted.T.reshape(wanted.shape),
        ),
        ("the log-sum-exp is the largest logit, without the sum", largest),
        ("the log-sum-exp lacks the largest logit, which was subtracted before exp; add it back", wanted - largest),
        ("the log-sum-exp has the wrong sign", -wanted),
        ("the log-sum-exp is the sum of exponentials, without the logarithm", wanted.exp()),
        ("the log-sum-exp is of unscaled logits", scene.wanted(replace(right, scale=1.0))[1]),
    ]
    if right.window is not None:
        others.append(("the log-sum-exp is of all rows, not of those in the window",
                       scene.wanted(replace(right, window=None))[1]))  # fmt: skip
    if scene.sinks is not None:
        extra = scene.sinks.double()
        others.append(("the log-sum-exp includes the sinks; it must not", torch.logaddexp(wanted, extra[None])))
    for message, other in others:
        if relative_error(lse, other) <= max(4 * scene.tolerance, 1e-4):
            return message
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if error < 2e-2 and relative_error(lse, wanted.to(dtype).double()) <= error / 10:
            return f"the log-sum-exp is rounded to {name}; compute and store it in float32"
    if lse.isnan().all():
        return "the log-sum-exp was requested but not written"
    if lse.isnan().any():
        wrong = "NaN"
    elif (lse[wanted.isfinite().to(lse.device)] == float("-inf")).any():
        wrong = "-inf for rows that see keys"
    else:
        wrong = f"wrong by {error:.1e}"
    place, scope = locate(scene, lse.unsqueeze(-1), wanted.unsqueeze(-1))
    return f"the log-sum-exp is {wrong}, first at {place}{scope}"


def _max_logits(scene: Scene) -> Tensor:
    """Largest logit of each row, from the log-sum-exp of logits so large that only the maximum contributes."""
    sharp, rules = 4096.0, scene.rules()
    if rules.cap is not None:
        return torch.full((sum(scene.new), scene.layer.num_heads), math.inf, device=scene.device)
    return scene.wanted(replace(rules, scale=rules.scale * sharp))[1] / sharp
