"""Runners for comparisons of bits: one backend runs several steps that contain the same rows of one request.

The request under test has the same queries and cache rows in every step. The other requests, and all page numbers,
depend on the step's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, starmap
from typing import Protocol

import torch
from torch import Tensor

from attnplug import ForwardExtras, ForwardMode, Geometry
from attnplug.host import KVPools, ModelAttention, TypicalLens
from attnplug.linear import LinearInputs
from attnplug.machine.runtime import runtime_of
from attnplug.sparse import CompressorInputs
from attnplug_conformance.arithmetic import NAN, as_bytes, poison
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.check import CheckContext
from attnplug_conformance.checks.cache import uncontiguous
from attnplug_conformance.checks.compressed import CompressedScene, ReferenceCompressor, check_compressed
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.checks.sparse import SparseCapture, SparseScene, check_selected
from attnplug_conformance.invariant_case import Step
from attnplug_conformance.linear_scene import LinearScene
from attnplug_conformance.scene import Scene
from attnplug_sparse.pools import COMPRESSED, INDEX_KEYS, EntryCache

Results = Mapping[str, Tensor]
"""Results ``[new rows, …]`` of the request under test, by name."""
TIES = 3
"""Number of adjacent rows of the request under test with the same index key, so that their scores are equal."""


class StepRunner(Protocol):
    """Runs steps one after the other on one backend."""

    def run(self, step: Step, *, check: bool = False) -> Results:
        """Run a step; return the results of the request under test. ``check``: also compare them with float64."""


def make_runner(context: CheckContext, case: Case, steps: Iterable[Step]) -> StepRunner:
    """Build the backend for the layer of ``case``, with capacity for all ``steps``."""
    if case.compressed is not None:
        return CompressedRunner(context, case, tuple(steps))
    kind = LinearRunner if case.kind.is_linear else SparseRunner if case.index is not None else DenseRunner
    return kind(context, case, tuple(steps))


class StepScene(Scene):
    """Scene of one step, in the cache of its runner, which is poisoned first."""

    __test__ = False

    def __init__(self, runner: DenseRunner, step: Step) -> None:
        self.base, self.step, self.place = runner.base, step, len(step.ahead)
        cached = [before // (runner.case.page_size or 1) for before, _ in step.lengths]
        case = replace(
            runner.case,
            lengths=step.lengths,
            mode=step.mode,
            pages=step.pages,
            shared=(0, *starmap(min, pairwise(cached))) if step.shared else (),
            padding=step.padded,
            padded_requests=step.padded,
            exact=step.exact,
            seed=step.seed,
        )
        super().__init__(runner.context.subject, case, backend=runner.base.backend)
        q, keys, values, self.sinks = runner.rows
        start, total = sum(self.new[: self.place]), step.total
        self.q[start : start + step.new] = q[step.before : total]
        self.keys[self.place] = keys[:total]
        self.values[self.place] = keys[:total, :, : self.widths[1]] if case.mla is not None else values[:total]
        for rows in self.cache_rows():
            self.share(rows)
        self.store(LAYER, [(0, before) for before, _ in case.lengths])

    def _pools(self, zero_region: str | None) -> KVPools:
        for memory in self.base.cache_tensors(LAYER):
            poison(memory)
        return self.base.pools

    def share(self, rows: list[Tensor]) -> None:
        """Copy the rows of shared pages, from the request under test outwards."""
        for request in sorted(range(len(self.case.shared)), key=lambda each: abs(each - self.place))[1:]:
            nearer = request + (1 if request < self.place else -1)
            stop = self.case.shared[max(request, nearer)] * self.page_size
            rows[request][:stop] = rows[nearer][:stop]

    def geometry(self, *, lane: int = 0, slots: Tensor | None = None) -> Geometry:
        made = super().geometry(lane=self.step.lane)
        if self.step.typical:
            made = replace(made, typical=TypicalLens.of(self.totals))
        if self.step.strided:
            made = replace(made, page_table=torch.cat([made.page_table] * 2, 1)[:, : made.page_table.shape[1]])
        return replace(made, slots=made.new_slots()) if self.step.slots else made

    def inputs(self, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return uncontiguous(*super().inputs(rows)) if self.step.strided else super().inputs(rows)

    def _page_table(self) -> tuple[Tensor, int, int]:
        table, pages, unused = super()._page_table()
        more = table.new_full((len(table), self.step.width), unused if self.case.unused is None else self.case.unused)
        return torch.cat([table, more], 1), pages, unused


class DenseRunner:
    """Runner of MHA or dense MLA layers."""

    def __init__(self, context: CheckContext, case: Case, steps: tuple[Step, ...]) -> None:
        self.context, self.case, self.steps = context, case, steps
        self.lse = "lse" in case.extras
        self._build()

    def _build(self) -> None:
        """Build the backend and capture every shape that a step replays."""
        case, steps = self.case, self.steps
        captured = [step for step in steps if step.shape is not None]
        requests = max(max(len(step.lengths) + step.padded, (step.shape or (0, 0))[0]) for step in steps)
        rows = max(max(step.rows, (step.shape or (0, 0))[1]) for step in steps)
        size = case.page_size or 1
        total = max(max(sum(each) for each in step.lengths) + step.width * size for step in steps)
        mode = captured[0].mode if captured else case.mode
        new = 1 if not captured else captured[0].new if mode is not ForwardMode.EXTEND else -(-rows // requests)
        lanes = 1 + max(step.lane for step in steps)
        # As many requests of this length as have the pages of every step; page tables may be wider than all pages.
        pages = max(len(step.lengths) * (2 + max(map(sum, step.lengths)) // size) for step in steps)
        full = min(requests, 1 + pages * size // total)
        largest = replace(
            case,
            lengths=((total, new),) * full,
            mode=mode,
            padding=rows,
            padded_requests=requests - full,
            lanes=lanes,
        )
        self.base = self._base(largest)
        self.captures: dict[tuple[int, int], Capture] = {}
        if captured:
            attention = ModelAttention(self.base.backend, self.base.pools)
            shapes = sorted({step.shape for step in captured if step.shape is not None})
            attention.reserve(max(shape[0] for shape in shapes), max(shape[1] for shape in shapes))
            for number, shape in enumerate(shapes):
                capture = self.captures[shape] = self._capture(attention, shape)
                if number % 2:
                    capture.batch.geometry = replace(capture.batch.geometry, typical=TypicalLens(total // 2, total))
                capture.capture()

    def _base(self, case: Case) -> Scene:
        return Scene(self.context.subject, case)

    def _capture(self, attention: ModelAttention, shape: tuple[int, int]) -> Capture:
        return Capture(self.base, 0, attention, *shape, lse=self.lse)

    def _scene(self, step: Step) -> StepScene:
        return StepScene(self, step)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values and sinks of the request under test, for every position."""
        scene, (key_dim, value_dim, kv_heads) = self.base, self.base.widths
        heads = scene.layer.num_heads
        q, keys, values = (
            self._positions(*shape) for shape in ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
        )
        if self.case.mla is not None:
            q = (q.float() * (scene.layer.head_dim / key_dim) ** 0.5).to(q.dtype)
        return q, keys, values, scene.normal(heads).float() if self.case.sinks else None

    def _positions(self, *shape: int) -> Tensor:
        """Random rows ``[positions, *shape]``. Those of a position do not depend on the number of positions."""
        blocks = []
        for start in range(0, max(step.total for step in self.steps), 128):
            self.base.random = torch.Generator().manual_seed(hash((self.case.seed, start, shape)) % (1 << 60))
            blocks.append(self.base.normal(128, *shape))
        return torch.cat(blocks)

    def run(self, step: Step, *, check: bool = False) -> Results:
        if step.fresh:
            self._build()
        scene = self._scene(step)
        module = runtime_of(scene.device).module if step.stream else None
        scene.now()
        with nullcontext() if module is None else module.stream(module.Stream()):
            found = self._results(scene, self.captures[step.shape] if step.shape is not None else None, check)
        scene.now()
        start = sum(scene.new[: scene.place])
        return {name: rows[start : start + step.new].clone() for name, rows in found.items()}

    def _results(self, scene: StepScene, capture: Capture | None, check: bool) -> dict[str, Tensor]:
        if capture is not None:
            capture.put(scene)
            out, lse = capture.replay(), None if capture.extras is None else capture.extras.lse
        else:
            output = scene.run(lse=self.lse)
            out, lse = output.out, output.lse
            if check:
                self.context.check_output(scene, output)
        return {"output": out} if lse is None else {"output": out, "log-sum-exp": lse}


class SparseStepScene(SparseScene, StepScene):
    """Scene of one step of a sparse layer. Each ``TIES`` adjacent rows of the request under test have equal scores."""

    def __init__(self, runner: SparseRunner, step: Step) -> None:
        super().__init__(runner, step)
        keys, q, weights = runner.index_rows
        start, rows = sum(self.new[: self.place]), slice(step.before, step.total)
        self.index_inputs(sum(self.new))
        assert self.queries is not None
        self.queries[0][start : start + step.new], self.queries[1][start : start + step.new] = q[rows], weights[rows]
        self.index_rows[self.place] = keys[: step.total]
        self.share(self.index_rows)
        pool = self.pools.cache(INDEX_KEYS)
        page, offset = self.places(self.place, 0, step.before)
        cells = self.stored_keys.encode(keys[: step.before].unsqueeze(1))
        for memory, part in zip(pool.parts(LAYER), cells, strict=True):
            as_bytes(memory)[page, offset] = as_bytes(part)


class SparseRunner(DenseRunner):
    """Runner of sparse MLA layers: selection by the index, and attention to the selected rows."""

    base: SparseScene

    def _base(self, case: Case) -> Scene:
        return SparseScene(self.context.subject, case)

    def _capture(self, attention: ModelAttention, shape: tuple[int, int]) -> Capture:
        return SparseCapture(self.base, attention, *shape)

    def _scene(self, step: Step) -> StepScene:
        return SparseStepScene(self, step)

    @cached_property
    def index_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Index keys, queries and weights of the request under test, for every position."""
        index = self.base.index
        keys, q, weights = (
            self._positions(*shape) for shape in ((index.head_dim,), (index.heads, index.head_dim), (index.heads,))
        )
        alike = torch.arange(len(keys), device=keys.device) // TIES * TIES
        return keys[alike], q, weights.float().abs() if self.base.index_coded else weights.float()

    def _results(self, scene: StepScene, capture: Capture | None, check: bool) -> dict[str, Tensor]:
        assert isinstance(scene, SparseStepScene)
        lse = None
        if capture is not None:
            assert isinstance(capture, SparseCapture)
            capture.put(scene)
            out = capture.replay()
            scene.check_selection(capture.selected)
        else:
            for theirs, memory in zip(
                scene.pools.cache(INDEX_KEYS).parts(LAYER), self.base.pools.cache(INDEX_KEYS).parts(LAYER), strict=True
            ):
                poison(memory)
                as_bytes(memory)[: len(theirs)] = as_bytes(theirs)
            batch = scene.plan(scene.batch())
            selected = scene.select(batch)
            lse = torch.full((batch.num_tokens, scene.layer.num_heads), NAN, device=scene.device) if self.lse else None
            out = scene.forward(batch, extras=ForwardExtras(selected=selected, lse=lse))
            if check:
                check_selected(self.context, scene, out, lse)
        width = scene.index.topk
        chosen = torch.tensor([[*rows, *[-1] * (width - len(rows))] for rows in scene.chosen])
        return {"selected rows": chosen, "output": out} | ({} if lse is None else {"log-sum-exp": lse})


class CompressedStepScene(CompressedScene, StepScene):
    """Scene of one step of a compressed layer. Entries of the cached rows of the request under test are those that the
    backend makes, so that a row sees the same ones in every step."""

    def __init__(self, runner: CompressedRunner, step: Step) -> None:
        self.runner = runner
        super().__init__(runner, step)
        if self.index is not None:
            self.index_inputs(sum(self.new))
            assert self.queries is not None
            start = sum(self.new[: self.place])
            for rows, own in zip(self.queries, runner.index_rows, strict=True):
                rows[start : start + step.new] = own[step.before : step.total]

    def _pools(self, zero_region: str | None) -> KVPools:
        pools = super()._pools(zero_region)
        if self.step.before >= self.dims.ratio:
            for cache, made in zip(_entry_caches(pools), self.runner.cached, strict=True):
                page, offset = self._last_tokens(0, self.step.before)
                cache.entries[page, offset // self.dims.ratio] = made[: len(page)]
        return pools

    def _last_tokens(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return pages and offsets of the last tokens of windows of the request under test."""
        pages, offsets = self.places(self.place, start, stop)
        first = -(start + 1) % self.dims.ratio
        return pages[first :: self.dims.ratio], offsets[first :: self.dims.ratio]

    def compressor(self, dim: int, name: str) -> ReferenceCompressor:
        made, base = super().compressor(dim, name), self.runner.base
        given = base.own if name == "entries" else base.index_compressor
        assert given is not None
        made.weights = given.weights
        for rows, own in zip((made.values, made.gates), self.runner.compressor_rows[name], strict=True):
            rows[self.place] = own[: self.step.total]
            self.share(rows)
        return made

    def entry_inputs(self, compressor: ReferenceCompressor, rows: int) -> CompressorInputs:
        given = super().entry_inputs(compressor, rows)
        if not self.step.strided:
            return given
        values, gates = torch.cat((given.values, given.gates), 1).chunk(2, 1)
        return replace(given, values=values, gates=gates)

    def new_entries(self) -> dict[str, Tensor]:
        """Return the stored entries that new tokens of the request under test complete, by row; zeros elsewhere."""
        found, step, ratio = {}, self.step, self.dims.ratio
        page, offset = self._last_tokens(step.before, step.total)
        first = sum(self.new[: self.place]) + -(step.before + 1) % ratio
        rows = first + ratio * torch.arange(len(page), device=self.device)
        for name, cache in zip(("entries", "index keys"), _entry_caches(self.base.pools), strict=False):
            stored = cache.entries.new_zeros(sum(self.new), cache.entries.shape[-1])
            stored[rows] = cache.entries[page, offset // ratio]
            found[name] = stored
        return found


def _entry_caches(pools: KVPools) -> list[EntryCache]:
    """Return the caches of the entries and, with an index, of the index keys of the layer under test."""
    pool = pools.cache(COMPRESSED)
    return [cache for cache in (pool.entries(LAYER), pool.index(LAYER)) if cache is not None]


class CompressedRunner(DenseRunner):
    """Runner of compressed layers."""

    base: CompressedScene

    def __init__(self, context: CheckContext, case: Case, steps: tuple[Step, ...]) -> None:
        self._prefill = Step(0, max(step.total for step in steps))
        super().__init__(context, case, (*steps, self._prefill))

    def _base(self, case: Case) -> Scene:
        return CompressedScene(self.context.subject, case)

    def _scene(self, step: Step) -> StepScene:
        return CompressedStepScene(self, step)

    @cached_property
    def cached(self) -> list[Tensor]:
        """Entries, and index keys if there are any, of the request under test: those of one prefill."""
        found, ratio = self.run(self._prefill), self.base.dims.ratio
        return [found[name][ratio - 1 :: ratio] for name in ("entries", "index keys") if name in found]

    @cached_property
    def compressor_rows(self) -> dict[str, tuple[Tensor, ...]]:
        """Values and gates of every position of the request under test, for entries and index keys."""
        series, index = self.base.dims.series, self.base.index
        found = {"entries": self._positions(2, series * self.base.widths[0]).unbind(1)}
        if index is not None:  # another shape has other random values
            found["index keys"] = self._positions(2, 1, series * index.head_dim).flatten(2).unbind(1)
        return found

    @cached_property
    def index_rows(self) -> tuple[Tensor, Tensor]:
        """Index queries and weights of every position of the request under test."""
        index = self.base.index
        assert index is not None
        return self._positions(index.heads, index.head_dim), self._positions(index.heads).float()

    def _results(self, scene: StepScene, capture: Capture | None, check: bool) -> dict[str, Tensor]:
        assert isinstance(scene, CompressedStepScene)
        for theirs, ours in zip(_entry_caches(scene.pools), _entry_caches(self.base.pools), strict=True):
            for given, memory in ((theirs.entries, ours.entries), (theirs.tokens, ours.tokens)):
                poison(memory)
                as_bytes(memory)[: len(given)] = as_bytes(given)
        batch, results, selected = scene.plan(scene.batch()), dict[str, Tensor](), None
        if scene.index is not None:
            selected = scene.select(batch)
            if check:
                scene.check_selection(selected)
            results["selected entries"] = selected.positions.sort(1).values
        lse = torch.full((batch.num_tokens, scene.layer.num_heads), NAN, device=scene.device) if self.lse else None
        inputs = scene.entry_inputs(scene.own, batch.num_tokens)
        out = scene.forward(batch, extras=ForwardExtras(selected=selected, lse=lse, entries=inputs))
        if check:
            check_compressed(self.context, scene, out, lse)
        results |= scene.new_entries() | {"output": out}
        return results if lse is None else results | {"log-sum-exp": lse}


class LinearRunner:
    """Runner of linear layers. Cached rows of the request under test are first run as one extend from a zero state."""

    def __init__(self, context: CheckContext, case: Case, steps: tuple[Step, ...]) -> None:
        self.context, self.case, self.steps = context, case, steps
        self._build()

    def _build(self) -> None:
        requests = max(len(step.lengths) + step.padded for step in self.steps)
        rows = max(max(step.rows, step.total) for step in self.steps)
        lengths, lanes = ((0, -(-rows // requests)),) * requests, 1 + max(step.lane for step in self.steps)
        self.states: dict[int, list[Tensor] | None] = {}
        """States of the request under test after a number of rows."""
        self.base = LinearScene(self.context.subject, replace(self.case, lengths=lengths, lanes=lanes))

    @cached_property
    def tested(self) -> LinearScene:
        """Inputs of every position of the request under test, and the layer's weights."""
        total = max(step.total for step in self.steps)
        case = replace(self.case, lengths=((0, total),), seed=1_000_003 + self.case.seed)
        return LinearScene(self.context.subject, case, backend=self.base.backend)

    def run(self, step: Step, *, check: bool = False) -> Results:
        if step.fresh:
            self._build()
        if step.before not in self.states:
            self.states[step.before] = self._run(Step(0, step.before), None, False)[1] if step.before else None
        return self._run(step, self.states[step.before], check)[0]

    def _run(self, step: Step, states: list[Tensor] | None, check: bool) -> tuple[Results, list[Tensor]]:
        scene, place = self._scene(step, states), len(step.ahead)
        module = runtime_of(scene.device).module if step.stream else None
        if module is not None:
            module.synchronize()
        with nullcontext() if module is None else module.stream(module.Stream()):
            batch = scene.batch(lane=step.lane)
            conv, out = scene.run(batch)
            if step.mode is ForwardMode.TARGET_VERIFY:
                accepted = torch.tensor([*scene.new, *[0] * step.padded], device=scene.device)
                scene.attention().commit_states(batch, accepted)
        if module is not None:
            module.synchronize()
        if check and step.mode is not ForwardMode.TARGET_VERIFY:
            scene.check_results(conv, out)
        start = sum(scene.new[:place])
        named = {"convolution": conv, "recurrence": out}
        results = {name: each[start : start + step.new].clone() for name, each in named.items() if each is not None}
        after = [each[scene.slots[place]].clone() for each in scene.states(LAYER)]
        for number, state in enumerate(after):  # in the last of the rows; only steps that end there have it
            rows = results[f"state {number} behind {step.total} rows"] = state.new_zeros(step.new, state.numel())
            rows[-1] = state.flatten()
        return results, after

    def _scene(self, step: Step, states: list[Tensor] | None) -> LinearScene:
        """Return the scene of one step, with its states in the runner's pool."""
        case = replace(self.case, lengths=step.lengths, mode=step.mode, padded_requests=step.padded, seed=step.seed)
        scene, place, tested = LinearScene(self.context.subject, case, self.base.backend), len(step.ahead), self.tested
        scene.weight, scene.bias = tested.weight, tested.bias
        start = sum(scene.new[:place])
        mine, rows = slice(start, start + step.new), slice(step.before, step.total)
        if scene.x is not None and tested.x is not None:
            scene.x[mine] = tested.x[rows]
        if scene.inputs is not None and tested.inputs is not None:
            scene.inputs = _with_rows(scene.inputs, mine, tested.inputs, rows)
        for index, own in enumerate(scene.states(LAYER)):
            own[scene.slots[place]] = 0.0 if states is None else states[index]
        scene.before = [[own[slot].clone() for slot in scene.slots] for own in scene.states(LAYER)]
        for memory, own in zip(self.base.states(LAYER), scene.states(LAYER), strict=True):
            memory.fill_(NAN)
            memory[: len(own)] = own
        scene.pool, scene.pools = self.base.pool, self.base.pools
        return scene


def _with_rows(inputs: LinearInputs, mine: slice, tested: LinearInputs, rows: slice) -> LinearInputs:
    """Return inputs with rows of the request under test. Decays per head belong to the layer."""
    for name in ("q", "k", "v", "log_decay", "beta"):
        target, source = getattr(inputs, name), getattr(tested, name)
        if name == "log_decay" and target.dim() == 1:
            inputs = replace(inputs, log_decay=source)
        elif target is not None:
            target[mine] = source[rows]
    return inputs
