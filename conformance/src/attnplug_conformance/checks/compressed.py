"""Checks of compressed layers: one softmax over the window's rows, compressed entries of older tokens, and a sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from attnplug import AttentionKind, ForwardBatch, ForwardExtras
from attnplug.contract.backend import bind_optional_hook
from attnplug.host import KVPools, MLADims
from attnplug.sparse import (
    CompressedDims,
    CompressorInputs,
    CompressorWeights,
    IndexerDims,
    IndexInputs,
    SelectedPositions,
)
from attnplug_conformance.arithmetic import NAN, pad_rows, poison, relative_error, uninitialized_as_nan
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.check import Check, CheckContext, Measured
from attnplug_conformance.checks.sparse import DECODE, EXTEND
from attnplug_conformance.diagnosis import check_padding, check_result
from attnplug_conformance.failure import CheckFailure
from attnplug_conformance.reference import Rules, attention, entries
from attnplug_conformance.scene import Scene
from attnplug_sparse.pools import COMPRESSED, CompressedPool

EPS = 1e-6
Lengths = Callable[[int], tuple[tuple[int, int], ...]]


class ReferenceCompressor:
    """Inputs of one compressor of a layer for all tokens of all requests, and the resulting entries."""

    def __init__(self, scene: Scene, dims: CompressedDims, dim: int) -> None:
        self.scene, self.dims, width = scene, dims, dims.series * dim
        rope = dim // 4 * 2
        self.weights = CompressorWeights(
            scene.normal(dims.ratio, width).float(),
            1 + 0.2 * scene.normal(dim).float(),
            EPS,
            100.0 ** -(torch.arange(0, rope, 2, device=scene.device) / rope),
        )
        self.values = [scene.normal(total, width) for total in scene.totals]
        self.gates = [scene.normal(total, width) for total in scene.totals]

    @cached_property
    def entries(self) -> list[Tensor]:
        """Entries of each request, in float64."""
        own, made = self.weights, zip(self.values, self.gates, strict=True)
        weights = own.bias, own.norm, own.eps, own.frequencies
        return [entries(values, gates, *weights, overlap=self.dims.overlap) for values, gates in made]

    def store(self, entries: Tensor, tokens: Tensor) -> None:
        """Fill the caches as the prefixes leave them: entries of complete windows, and each page's newest tokens."""
        scene, ratio, kept = self.scene, self.dims.ratio, tokens.shape[1]
        for request, (before, _) in enumerate(scene.case.lengths):
            pages, offsets = scene.places(request, 0, before)
            last = slice(ratio - 1, None, ratio)
            made = self.entries[request][: before // ratio].to(entries.dtype)
            entries[pages[last], offsets[last] // ratio] = made
            position = torch.arange(before, device=pages.device)
            newest = position >= (position - offsets + scene.page_size).clamp(max=before) - kept
            rows = torch.cat((self.values[request], self.gates[request]), 1)[:before]
            tokens[pages[newest], offsets[newest] % kept] = rows[newest]

    def inputs(self, rows: int) -> CompressorInputs:
        """Inputs of the new tokens, with NaN for padding."""
        new = self.scene.new_rows
        return CompressorInputs(pad_rows(new(self.values), rows), pad_rows(new(self.gates), rows), self.weights)


class CompressedScene(Scene):
    """Scene with compressed entries, poisoned like the rows."""

    queries: tuple[Tensor, Tensor] | None = None
    """Index queries and their weights."""

    def _pools(self, zero_region: str | None) -> KVPools:
        plain, case = super()._pools(zero_region), self.case
        assert case.compressed is not None and case.dtype is not None
        self.dims, self.index = case.compressed, case.index
        pool = CompressedPool(
            case.layers, num_pages=self.num_pages, page_size=self.page_size, dtype=case.dtype, device=self.device
        )
        self.own = self.compressor(self.widths[0], "entries")
        self.index_compressor = None if self.index is None else self.compressor(self.index.head_dim, "index keys")
        for layer_id in pool.layer_ids:
            for compressor, cache in (
                (self.own, pool.entries(layer_id)),
                (self.index_compressor, pool.index(layer_id)),
            ):
                if compressor is not None and cache is not None:
                    poison(cache.entries)
                    poison(cache.tokens)
                    if layer_id == LAYER:
                        compressor.store(cache.entries, cache.tokens)
        self.chosen: list[list[int]] | None = None
        return KVPools(mla=plain.mla, caches={COMPRESSED: pool})

    def compressor(self, dim: int, name: str) -> ReferenceCompressor:
        """Return the compressor of the layer's ``entries`` or ``index keys``."""
        return ReferenceCompressor(self, self.dims, dim)

    def entry_inputs(self, compressor: ReferenceCompressor, rows: int) -> CompressorInputs:
        return compressor.inputs(rows)

    def index_inputs(self, rows: int) -> IndexInputs:
        """Index inputs of the new tokens in ``rows`` rows, with NaN for padding."""
        assert self.index is not None and self.index_compressor is not None
        if self.queries is None:
            tokens, heads = sum(self.new), self.index.heads
            self.queries = self.normal(tokens, heads, self.index.head_dim), self.normal(tokens, heads).float()
        q, weights = (pad_rows(each, rows) for each in self.queries)
        return IndexInputs(q, None, weights, self.entry_inputs(self.index_compressor, rows))

    def places_of_tokens(self) -> Iterator[tuple[int, int]]:
        """Request and position of each new token."""
        for request, (before, new) in enumerate(self.case.lengths):
            for position in range(before, before + new):
                yield request, position

    def select(self, batch: ForwardBatch) -> SelectedPositions:
        """Return the entries that the backend selects."""
        hook = bind_optional_hook(self.backend, "select")
        if hook is None:
            raise CheckFailure("it claims sparse layers but has no select")
        inputs = self.index_inputs(batch.num_tokens)
        with uninitialized_as_nan(self.device):
            found: object = hook(inputs, self.layer, batch)
        if not isinstance(found, SelectedPositions):
            raise CheckFailure(f"select returned {type(found).__name__} for entries, not SelectedPositions")
        return found

    def check_selection(self, found: SelectedPositions) -> None:
        """Check that a selection has the right number of entries and the best scores."""
        assert self.index is not None and self.index_compressor is not None and self.queries is not None
        q, weights = self.queries
        self.chosen = []
        for token, (request, position) in enumerate(self.places_of_tokens()):
            selected = [number for number in found.positions[token].tolist() if number >= 0]
            visible, place = (position + 1) // self.dims.ratio, f"request {request}, token {position}"
            wanted = min(self.index.topk, visible)
            if (
                len(set(selected)) != wanted
                or len(selected) != wanted
                or not all(number < visible for number in selected)
            ):
                right = f"{wanted} distinct entries of the {visible} complete windows"
                raise CheckFailure(f"select chose entries {sorted(selected)} ({place}), not {right}")
            if selected:
                keys = self.index_compressor.entries[request][:visible]
                scores = weights[token].double() @ torch.relu(q[token].double() @ keys.T * self.index.scale)
                best = scores.sort(descending=True).values[:wanted]
                largest = scores.abs().max().clamp(min=1e-30)
                short = float((best - scores[selected].sort(descending=True).values).max() / largest)
                if not short <= self.tolerance:
                    raise CheckFailure(
                        f"select chose entries whose scores fall short of the best by {short:.1e} ({place})"
                    )
            self.chosen.append(selected)

    def wanted_compressed(
        self, *, with_entries: bool = True, sinks: bool = True, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Expected output and log-sum-exp. Parameters other than the defaults give the result of a mistake."""
        found, window = [], window or self.case.window
        assert window is not None
        for token, (request, position) in enumerate(self.places_of_tokens()):
            rows = self.stored(request)[0][max(0, position - window + 1) : position + 1]
            visible = [*range((position + 1) // self.dims.ratio)]
            if with_entries:
                seen = self.own.entries[request][visible if self.chosen is None else self.chosen[token]]
                rows = torch.cat((rows, seen.unsqueeze(1)))
            rules = Rules(self.layer.scale, aligned="none")
            found.append(attention(self.q[token][None], rows, rows, rules, self.sinks if sinks else None))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def _compressed(context: CheckContext) -> None:
    scene = CompressedScene(context.subject, context.case)
    batch = scene.plan(scene.batch())
    rows = batch.num_tokens
    selected = None
    if scene.index is not None:
        selected = scene.select(batch)
        scene.check_selection(selected)
    lse = None
    if "lse" in context.subject.capabilities.extras:
        lse = torch.full((rows, scene.layer.num_heads), NAN, device=scene.device)
    out = scene.forward(batch, extras=ForwardExtras(selected=selected, lse=lse, entries=scene.own.inputs(rows)))
    check_result(scene, out, rows)
    check_compressed(context, scene, out, lse)


def check_compressed(context: CheckContext, scene: CompressedScene, out: Tensor, lse: Tensor | None) -> None:
    """Raise :class:`CheckFailure` unless a result agrees with float64."""
    wanted, wanted_lse = scene.wanted_compressed()
    allowed, attended = 2 * scene.tolerance, out[: len(wanted)]
    error = relative_error(attended, wanted)
    if not error <= allowed:
        raise CheckFailure(_explained(scene, attended, error, allowed))
    check_padding(out, len(wanted))
    if lse is not None and not relative_error(lse[: len(wanted)], wanted_lse) <= max(allowed, 1e-5):
        raise CheckFailure("the log-sum-exp is wrong; it covers the window's rows and the entries, without the sink")
    context.measured.append(Measured(len(wanted), max(scene.totals), error, allowed, 0.0, 0.0))


def _explained(scene: CompressedScene, out: Tensor, error: float, allowed: float) -> str:
    window = scene.case.window
    assert window is not None
    for message, (other, _) in (
        ("it attended only to the window's rows and ignored the entries", scene.wanted_compressed(with_entries=False)),
        ("it ignored the sinks", scene.wanted_compressed(sinks=False)),
        ("it ignored the sliding window, which limits the rows", scene.wanted_compressed(window=1 << 20)),
        ("its sliding window has one key too many", scene.wanted_compressed(window=window + 1)),
        ("its sliding window has one key too few", scene.wanted_compressed(window=window - 1)),
    ):
        if relative_error(out, other) <= allowed:
            return message
    if error != error:
        return "the output is NaN: it read an entry, row or token that belongs to no complete window of a request"
    return f"attention to rows, entries and sink is wrong by {error:.2e}; {allowed:.2e} is allowed"


def compressed_checks() -> Iterator[Check]:
    plain, overlap = CompressedDims(8), CompressedDims(4, overlap=True)
    index = IndexerDims(heads=8, head_dim=16, topk=3)
    one = "the window's rows, entries of complete windows and the sink are in one softmax"
    two = "an entry is computed from its own window and the previous one, whose tokens may come from an earlier step"
    best = "it selects the best entries by its index, and attends to these and the window"

    def extend(p: int) -> tuple[tuple[int, int], ...]:
        return (0, 2 * p + 3), (9, 7), (p + 1, 6), (p - 1, 2)

    def decode(p: int) -> tuple[tuple[int, int], ...]:
        return (6, 1), (7, 1), (p - 1, 1), (2 * p + 3, 1), (0, 1)

    shapes: dict[str, tuple[str, Case, Lengths]] = {
        "extend": (one, Case((), EXTEND, compressed=plain, padding=2), extend),
        "decode": (one, Case((), DECODE, compressed=plain), decode),
        "overlap.extend": (two, Case((), EXTEND, compressed=overlap), extend),
        "overlap.decode": (two, Case((), DECODE, compressed=overlap), decode),
        "index.extend": (best, Case((), EXTEND, compressed=overlap, index=index, padding=2), extend),
        "index.decode": (best, Case((), DECODE, compressed=overlap, index=index), decode),
    }
    for name, (requirement, case, lengths) in shapes.items():
        extras = {"entries", "sinks"} | ({"selected"} if case.index is not None else set())
        whole = replace(case, kind=AttentionKind.MLA, window=6, sinks=True, extras=frozenset(extras))
        yield Check(
            f"mla.compressed.{name}",
            "compressed",
            requirement,
            partial(_with_lengths, whole, lengths),
            _compressed,
            name.startswith("index"),
        )


def sized(case: Case, p: int, longest: int) -> Case:
    """Set sizes: small on a CPU, a model's on a GPU. A page holds complete windows."""
    dim = 512 if longest > 2000 else 16
    size = None if p % 8 == 0 else 16
    return replace(case, page_size=size, mla=MLADims(dim, dim, 0), v_head_dim=dim)


def _with_lengths(case: Case, lengths: Lengths, p: int, longest: int) -> Case:
    fitted = sized(case, p, longest)
    return replace(fitted, lengths=lengths(fitted.page_size or p))
