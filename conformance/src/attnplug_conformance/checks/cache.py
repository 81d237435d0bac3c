"""Checks of the memory that a call may write: the cache, its inputs, its batch and earlier results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from attnplug import AttentionKind, ForwardBatch, ForwardExtras, ForwardMode, Geometry, KVFormat, Role
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.arithmetic import NAN, as_bytes, relative_error
from attnplug_conformance.case import FIRST, LAYER, Case, always
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.diagnosis import (
    check_inputs_unchanged,
    check_output,
    check_padding,
    check_result,
    check_settings_unchanged,
)
from attnplug_conformance.failure import CheckFailure, failure_prefix
from attnplug_conformance.scene import NotATensor, Output, Scene
from attnplug_conformance.scene_pools import far_apart
from attnplug_conformance.stored_rows import coded_formats

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE


def check_written(scene: Scene, before: dict[int, list[torch.Tensor]], *, saved: bool = True) -> None:
    """Raise :class:`CheckFailure` unless exactly the new rows were written since a snapshot."""
    tokens = [(request, token) for request, (start, new) in enumerate(scene.case.lengths) for token in
              range(start, start + new)]  # fmt: skip
    places = [scene.places(request, start, start + new) for request, (start, new) in enumerate(scene.case.lengths)]
    pages, offsets = (torch.cat(each) for each in zip(*places, strict=True))
    wanted = set(zip(pages.tolist(), offsets.tolist(), strict=True))
    for layer_id, page, offset in scene.changes(before):
        if layer_id != LAYER:
            raise CheckFailure(f"it wrote to the cache of layer {layer_id} while it ran layer {LAYER}: page {page}")
        if not saved:
            raise CheckFailure(f"it wrote to the cache with save_kv_cache=False: {scene.describe_row(page, offset)}")
        if (page, offset) not in wanted:
            raise CheckFailure(f"it wrote to a row of the cache that is not new: {scene.describe_row(page, offset)}")
    if not saved:
        return
    contents = zip(scene.read(pages, offsets), scene.cache_rows(), scene.scales(LAYER), scene.stored_rows, strict=True)
    for found, rows, scale, stored in contents:
        new = scene.new_rows(rows)
        right = stored.read_back(new, scale).to(found.device)
        wrong = ~_stored_alike(found, right, scene.format).flatten(1).all(-1)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise CheckFailure(_explain_row(scene, found[row], new[row].float(), *tokens[row], scale))


def _stored_alike(found: torch.Tensor, right: torch.Tensor, format: KVFormat) -> torch.Tensor:
    """Return for every value whether rows read back are equal, but for values that a kernel rounds the other way.

    A step between two values of a format is at most about four times its error.
    """
    if format.codec is None:
        return torch.isclose(found, right, rtol=1e-6, atol=1e-2)
    sizes = right.square().mean(-1, keepdim=True).sqrt()
    apart = (found - right).abs()
    few = (apart.square().mean(-1, keepdim=True).sqrt() <= format.error / 2 * sizes + 1e-6).expand_as(apart)
    return few & (apart <= 4 * format.error * (right.abs() + sizes) + 1e-6)


def _explain_row(scene: Scene, found: torch.Tensor, row: torch.Tensor, request: int, token: int, scale: float) -> str:
    place = f"request {request}, token {token}"
    if found.isnan().all():
        return f"it did not write a new row to the cache ({place})"
    if found.isnan().any():
        return f"it wrote only part of a new row to the cache ({place})"
    if scene.format.layer_scale and torch.allclose(found / scale, row, rtol=4 * scene.format.error, atol=1e-2):
        return f"it stored a row without dividing by the layer's scale, which is {scale} ({place})"
    return f"it wrote wrong values for a new row to the cache ({place})"


def _writes(context: CheckContext) -> None:
    scene = context.scene()
    before = scene.snapshot()
    output = scene.run()
    check_written(scene, before)
    context.check_output(scene, output)


def _saturates(context: CheckContext) -> None:
    """Values that a format cannot represent with its layer scale are stored as its largest value."""
    scene = context.scene()
    for rows, (start, _) in zip(scene.keys, scene.case.lengths, strict=True):
        rows[start:, ..., :4] = 1e4 * max(scene.case.kv_scales)
    before = scene.snapshot()
    scene.run()
    with failure_prefix("if a new row has values beyond the format's range, clamp them before rounding"):
        check_written(scene, before)


def _table_view(context: CheckContext) -> None:
    """The page table of a batch is a view of the host's wider one."""
    scene = context.scene()
    made = scene.geometry()
    rows, columns = made.page_table.shape
    whole = torch.full((rows, columns + 5), scene.poisoned_page, dtype=torch.int32, device=scene.device)
    whole[:, 2 : 2 + columns] = made.page_table
    batch = ForwardBatch(replace(made, page_table=whole[:, 2 : 2 + columns]))
    with failure_prefix("with a page table that is not contiguous; use its strides, or copy it"):
        check_output(scene, scene.run(scene.plan(batch)))


def _split_roles(context: CheckContext) -> None:
    """One instance prefills and another decodes, behind one split backend."""
    scene = context.scene()
    problem = replace(scene.case, mode=DECODE).problem(
        scene.device.type, context.subject.sm, context.subject.architecture
    )
    role = Role.DECODE
    decode = context.subject.build(scene.model, problem, role, scene.pools, scene.limits, frozenset({role}))
    scene.backend = SplitBackend(scene.backend, decode)
    with failure_prefix("with one instance for prefill and another for decode"):
        _extend_and_decode(context, scene)


def _round_trip(context: CheckContext) -> None:
    _extend_and_decode(context, context.scene())


def _extend_and_decode(context: CheckContext, scene: Scene) -> None:
    """Extend, then decode over the rows that the backend wrote."""
    context.check_output(scene, scene.run())
    grown = replace(scene.case, lengths=tuple((total, 1) for total in scene.totals), mode=DECODE)
    later = Scene(context.subject, grown, backend=scene.backend)
    later.page_table, later.poisoned_page, later.pools = _grown_table(scene), scene.poisoned_page, scene.pools
    later.keys = [torch.cat([old, new[-1:]]) for old, new in zip(scene.keys, later.keys, strict=True)]
    later.values = [torch.cat([old, new[-1:]]) for old, new in zip(scene.values, later.values, strict=True)]
    if scene.case.mla is not None:
        later.values = [keys[..., : scene.widths[1]] for keys in later.keys]
    context.check_output(later, later.run())


def _grown_table(scene: Scene) -> torch.Tensor:
    """Page table with an additional page for requests whose last page is full."""
    table = scene.page_table.clone()
    used = set(table.flatten().tolist())
    free = [page for page in range(scene.num_pages) if page not in used]
    for request, total in enumerate(scene.totals):
        if total % scene.page_size == 0:
            table[request, total // scene.page_size] = free.pop()
    return table


def _not_saved(context: CheckContext) -> None:
    scene = context.scene()
    scene.store(LAYER, [(before, before + new) for before, new in scene.case.lengths])
    before = scene.snapshot()
    output = scene.run(save=False)
    check_written(scene, before, saved=False)
    context.check_output(scene, output)


def _not_saved_with_rows(context: CheckContext) -> None:
    """k and v are passed, but must not be written."""
    scene = context.scene()
    scene.store(LAYER, [(before, before + new) for before, new in scene.case.lengths])
    before, batch = scene.snapshot(), scene.plan(scene.batch())
    q, k, v = scene.inputs(batch.num_tokens)
    out = scene.forward(batch, (q, k * 0 + 7, None if v is None else v * 0 + 7), save=False)
    check_written(scene, before, saved=False)
    check_output(scene, Output(out, None, 0.0, 0.0))


def _padding(context: CheckContext) -> None:
    scene = context.scene()
    before = scene.snapshot()
    output = scene.run(lse="lse" in context.subject.capabilities.extras)
    check_written(scene, before)
    if len(output.out) != sum(scene.new) + scene.case.padding:
        check_result(scene, output.out, sum(scene.new) + scene.case.padding)
    context.check_output(scene, output)


def _padded_bounds(context: CheckContext) -> None:
    """Plan padded requests without exact lengths: they have rows, and length 0."""
    scene = context.scene()
    before = scene.snapshot()
    output = scene.run()
    check_padding(output.out, sum(scene.new))
    check_written(scene, before)
    context.check_output(scene, output)


def _idle(context: CheckContext) -> None:
    scene = context.scene()
    table = torch.zeros(0, 1, dtype=torch.int32, device=scene.device)
    before = scene.snapshot()
    for rows in (0, 3):
        geometry = Geometry.of_lengths(ForwardMode.IDLE, table, [], [], scene.page_size)
        batch = ForwardBatch(geometry, input_ids=torch.zeros(rows, dtype=torch.int64, device=scene.device))
        shape = (rows, scene.layer.num_heads, scene.widths[0])
        q = torch.full(shape, NAN, dtype=scene.dtype, device=scene.device)
        k = torch.full((rows, *scene.keys[0].shape[1:]), NAN, dtype=scene.dtype, device=scene.device)
        v = torch.full((rows, *scene.values[0].shape[1:]), NAN, dtype=scene.dtype, device=scene.device)
        scene.plan(batch)
        out = scene.forward(batch, (q, k, None if scene.case.mla is not None else v))
        check_result(scene, out, rows)
        check_padding(out, 0)
    if any(scene.changes(before)):
        raise CheckFailure("it wrote to the cache in an idle batch")


def _host_slots(context: CheckContext) -> None:
    """A host marks cached rows of one request with slot -1: the k and v passed for them are not written."""
    scene = context.scene()
    slots = scene.geometry().new_slots().clone()
    first = scene.new[0]
    scene.store(LAYER, [(before, before + new if number == 0 else before) for number, (before, new) in
                        enumerate(scene.case.lengths)])  # fmt: skip
    slots[:first] = -1
    before = scene.snapshot()
    batch = scene.plan(scene.batch(slots=slots))
    q, k, v = scene.inputs(batch.num_tokens)
    for given in (k, v):
        if given is not None:
            given[:first] = 7.0
    for _ in range(2):  # again by the same plan, as for the next layer
        out = scene.forward(batch, (q, k, v))
    marked, *others = (
        {tuple(place) for place in torch.stack(scene.places(request, start, scene.totals[request]), 1).tolist()}
        for request, (start, _) in enumerate(scene.case.lengths)
    )
    for layer_id, page, offset in scene.changes(before):
        if layer_id != LAYER or not any((page, offset) in places for places in others):
            target = "a row" if (page, offset) in marked else "elsewhere for a row"
            raise CheckFailure(
                f"it wrote {target} that the host marks with slot -1 ({scene.describe_row(page, offset)}): write new "
                "rows to geometry.new_slots(), which honours the host's slots, and do not modify the slots"
            )
    check_output(scene, Output(out, None, 0.0, 0.0))


def _inputs_unchanged(context: CheckContext) -> None:
    check_settings_unchanged(context.subject, lambda: _only_results(context))


def _only_results(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.batch()
    geometry = batch.geometry
    scene.forward(scene.plan(batch))
    check_inputs_unchanged()
    if batch.geometry is not geometry:
        raise CheckFailure("it replaced the batch's geometry")


def _results_kept(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    out = scene.forward(batch)
    copy = out.clone()
    q, k, v = scene.inputs(batch.num_tokens)
    other = scene.forward(batch, (q.flip(0).contiguous() * 0.5, k, v))
    if not torch.equal(out, copy) or (out.numel() and out.data_ptr() == other.data_ptr()):
        raise CheckFailure("the output is overwritten by the next call; allocate it per call")
    check_output(scene, Output(copy, None, 0.0, 0.0))


def run_first_layer(context: CheckContext, scene: Scene) -> None:
    """Run the layer under test and the first layer by one plan, each with its own rows, and check both."""
    batch = scene.plan(scene.batch())
    first = scene.case.layers[0]
    with _rows_of_other_layer(scene):
        scene.store(FIRST, [(0, before) for before, _ in scene.case.lengths])
        out_first = scene.forward(batch, layer=first)
        wanted, own = (scene.wanted(rules)[0] for rules in (scene.rules(first), None))
    output = Output(scene.forward(batch), None, 0.0, 0.0)
    check_result(scene, output.out, scene.rows)
    if relative_error(output.out[: len(own)], own) <= scene.tolerance:
        raise CheckFailure(f"it ran layer {LAYER} over the rows of layer {FIRST}; cache no rows between layers")
    context.check_output(scene, output)
    error = relative_error(out_first[: len(wanted)], wanted)
    if not error <= scene.tolerance:
        if relative_error(out_first[: len(own)], own) <= scene.tolerance:
            raise CheckFailure(
                f"it ran layer {FIRST} with the parameters of layer {LAYER}; take scale and window from the layer"
            )
        raise CheckFailure(
            f"one plan does not serve two layers: layer {FIRST} is wrong by {error:.1e}, layer {LAYER} right"
        )


@contextmanager
def _rows_of_other_layer(scene: Scene) -> Iterator[None]:
    """Replace the requests' rows and the scales of the layer under test by those of the first layer."""
    kept, case, scales = (scene.keys, scene.values), scene.case, scene.scales(FIRST)
    scene.case = replace(case, kv_scales=(scales[0], scales[-1]))
    scene.keys, scene.values = ([rows.flip(-1) for rows in each] for each in kept)
    if scene.case.mla is not None:
        scene.values = [rows[..., : scene.widths[1]] for rows in scene.keys]
    try:
        yield
    finally:
        scene.keys, scene.values = kept
        scene.case = case


def _two_layers(context: CheckContext) -> None:
    run_first_layer(context, context.scene())


def _split(context: CheckContext) -> None:
    """The same tokens give the same rows in one extend and in two."""
    whole = context.scene()
    context.check_output(whole, whole.run())
    lengths = whole.case.lengths
    parts = [(before + new // 2, new - new // 2) for before, new in lengths]
    scene = context.scene(lengths=tuple(parts))
    context.check_output(scene, scene.run())


def _out(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    rows = batch.num_tokens
    given = torch.full((rows, scene.layer.num_heads, scene.widths[1]), NAN, dtype=scene.dtype, device=scene.device)
    found = scene.forward(batch, extras=ForwardExtras(out=given))
    if found.data_ptr() != given.data_ptr():
        raise CheckFailure("extras.out was given, but the result is in other memory; write it to out, and return out")
    check_output(scene, Output(given, None, 0.0, 0.0))


def _unclaimed_extra(context: CheckContext) -> None:
    scene = context.scene()
    batch, claimed = scene.plan(scene.batch()), context.subject.capabilities.extras
    q = scene.inputs(batch.num_tokens)[0]
    offers = {
        "lse": ForwardExtras(lse=torch.zeros(q.shape[:2], device=scene.device)),
        "out": ForwardExtras(out=torch.zeros(*q.shape[:2], scene.widths[1], dtype=q.dtype, device=scene.device)),
        "sinks": ForwardExtras(sinks=torch.zeros(q.shape[1], device=scene.device)),
        "q_rope": ForwardExtras(q_rope=torch.zeros(*q.shape[:2], 8, dtype=q.dtype, device=scene.device)),
    }
    for name, extras in offers.items():
        if name in claimed:
            continue
        try:
            scene.forward(batch, extras=extras)
        except Exception:
            continue
        raise CheckFailure(f"the extra {name}, which it does not claim, was requested, and it ignored it silently")


def _q_rope(context: CheckContext) -> None:
    scene = context.scene()
    assert scene.case.mla is not None
    rank = scene.case.mla.kv_lora_rank
    batch = scene.plan(scene.batch())
    q, k, _ = scene.inputs(batch.num_tokens)
    apart = q[..., rank:].transpose(0, 1).contiguous().transpose(0, 1)  # with different strides
    try:
        out = scene.forward(batch, (q[..., :rank].contiguous(), k, None), extras=ForwardExtras(q_rope=apart))
        check_output(scene, Output(out, None, 0.0, 0.0))
    except CheckFailure as failure:
        raise CheckFailure(f"with a separate rotary part of q (extras.q_rope): {failure}") from None
    except NotATensor:
        raise
    except Exception as error:
        raise CheckFailure(
            f"with a separate rotary part of q (extras.q_rope) it raised {type(error).__name__}: {error}; concatenate "
            "both, or do not claim the extra q_rope"
        ) from None


def uncontiguous(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries and new rows as hosts have them: heads-first memory, and slices of one projection."""
    wide = [None if each is None else torch.cat([each, each + 1], -1)[..., : each.shape[-1]] for each in (k, v)]
    assert wide[0] is not None
    return q.transpose(0, 1).contiguous().transpose(0, 1), wide[0], wide[1]


def _strided(context: CheckContext) -> None:
    """Inputs of the same shapes, contiguous and not, in turn: a call keeps no strides of an earlier one."""
    scene = context.scene()
    batch = scene.plan(scene.batch())
    plain = scene.inputs(batch.num_tokens)
    strided = uncontiguous(*plain)
    before = scene.snapshot()
    for which, inputs in (("", strided), (" after others that are not", plain), (" after others that are", strided)):
        for memory, copy in zip(scene.cache_tensors(LAYER), before[LAYER], strict=True):
            as_bytes(memory).copy_(copy)
        output = Output(scene.forward(batch, inputs), None, 0.0, 0.0)
        state = "contiguous" if inputs is plain else "not contiguous"
        with failure_prefix(f"with q, k and v that are {state}{which}; use the strides of each call, or copy them"):
            check_output(scene, output)
            check_written(scene, before)


def _far_rows(context: CheckContext) -> None:
    scene = context.scene()
    batch = scene.plan(scene.batch())
    q, k, v = scene.inputs(batch.num_tokens)
    before = scene.snapshot()
    out = scene.forward(batch, (far_apart(q), far_apart(k), None if v is None else far_apart(v)))
    with failure_prefix("with rows of q, k and v so far apart that offsets exceed 32 bits; use 64 bits"):
        check_output(scene, Output(out, None, 0.0, 0.0))
        check_written(scene, before)


EXTENDS = ((5, 3), (9, 6), (0, 4))
DECODES = ((5, 1), (20, 1), (0, 1), (31, 1))


def _format_rows(kind: AttentionKind) -> Iterator[tuple[str, str, str, Callable[[CheckContext], None], dict[str, Any]]]:
    for format in coded_formats(kind):
        scales = {"kv_scales": (0.4, 1.7)} if format.layer_scale else {}
        changes = {"kv_dtype": format.name, **scales}
        yield f"cache.writes_{format}", f" {format}", f"rows are stored as {format} writes them", _writes, changes
        if format.layer_scale:
            requirement = f"values beyond the range of {format} are clamped when stored"
            yield f"cache.saturates_{format}", f" {format}", requirement, _saturates, changes


def cache_checks(kind: AttentionKind) -> Iterator[Check]:
    """Each check for an extend and, with another name, for a decode; the extend is part of the quick run."""
    padding = "rows beyond the planned ones are padding: zero output, nothing written"
    padded = "padded requests have length 0: nothing is read or written for them"
    both: list[tuple[str, str, str, Callable[[CheckContext], None], dict[str, Any]]] = [
        ("cache.writes", "", "exactly the new rows are written", _writes, {}),
        *_format_rows(kind),
        ("cache.not_saved", "", "save_kv_cache=False writes nothing", _not_saved, {}),
        ("cache.not_saved_rows", "", "save_kv_cache=False writes nothing, even if k and v are passed",
         _not_saved_with_rows, {}),
        ("cache.host_slots", "", "new rows are written to the host's slots; slot -1 is not written", _host_slots, {}),
        ("padding.rows", "", padding, _padding, {"padding": 5}),
        ("padding.requests", "", padded, _padding, {"padded_requests": 3, "padding": 3}),
        ("idle", "", "an idle batch gives zeros and writes nothing", _idle, {}),
        ("unchanged", "", "q, k, v, the batch and process settings are not modified", _inputs_unchanged, {}),
        ("cut_table", "", "a page table may be a view of a wider one", _table_view, {}),
        ("strides", "", "q, k and v may have any strides between rows and heads", _strided, {}),
        ("strides.wide", "", "offsets of rows of q, k and v may exceed 32 bits", _far_rows, {}),
        ("results_kept", "", "a result is not overwritten by the next call", _results_kept, {}),
        ("two_layers", "", "one plan serves all layers, each with its own parameters", _two_layers, {}),
        ("extras.out", "out", "the result is written to extras.out", _out, {"extras": frozenset({"out"})}),
        ("extras.unclaimed", "", "an extra that is not claimed is an error", _unclaimed_extra, {}),
    ]  # fmt: skip
    for name, part, requirement, run, changes in both:
        claim = part if part == "out" else f"{kind}{part}"
        for suffix, lengths, mode in (("", EXTENDS, EXTEND), ("_decode", DECODES, DECODE)):
            case = Case(lengths, mode, kind, **changes)
            quick = not part and (mode is EXTEND or name == "padding.requests")
            yield Check(
                f"{kind}.{name}{suffix}", claim, requirement, always(case), run, quick or (name == "extras.out")
            )
    yield Check(
        f"{kind}.padding.bounds",
        f"{kind} bounds",
        "padded requests have rows if the host knows only bounds: their output is zero, and nothing is written",
        always(Case(DECODES, DECODE, kind, padded_requests=2, exact=False)),
        _padded_bounds,
    )
    yield Check(
        f"{kind}.cache.round_trip",
        str(kind),
        "a decode reads what an extend wrote",
        lambda p, longest: Case(((5, 3), (p - 1, 1), (0, 2 * p)), kind=kind),
        _round_trip,
        True,
        lambda subject: None if subject.serves(DECODE, kind) else "it does not serve decode",
    )
    yield Check(
        f"{kind}.split_roles",
        str(kind),
        "one instance prefills and another decodes, as one backend",
        lambda p, longest: Case(((5, 3), (p - 1, 1), (0, 2 * p)), kind=kind),
        _split_roles,
        False,
        lambda subject: None if subject.serves(DECODE, kind) else "it does not serve decode",
    )
    yield Check(
        f"{kind}.split",
        str(kind),
        "a prompt gives the same result in one extend and in two",
        lambda p, longest: Case(((0, 2 * p + 5), (3, p)), kind=kind),
        _split,
    )
    if kind is AttentionKind.MLA:
        for name, lengths, mode in (("q_rope", DECODES, DECODE), ("q_rope_extend", EXTENDS, EXTEND)):
            case = Case(lengths, mode, kind, extras=frozenset({"q_rope"}))
            requirement = "the rotary part of q may be a separate tensor"
            yield Check(f"mla.extras.{name}", "q_rope", requirement, always(case), _q_rope, True)
