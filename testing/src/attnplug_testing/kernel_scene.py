"""The conformance kit's scene for plugins' own tests: fully specified cases, and any function as the factory.

The model is one rank's share of two, so every test detects a backend that divides the rank's heads again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    MHAPool,
    MLAPool,
    ModelSpec,
    Problem,
    Role,
    Serving,
)
from attnplug.declare.spec import Registered
from attnplug.host import KVPools, Limits, MLADims, ModelAttention, Parallel, WorkspaceOwner, load_registry
from attnplug.sparse import Coordinator
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.case import LAYER, Case
from attnplug_conformance.checks.cache import check_written
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.diagnosis import check_output, check_padding
from attnplug_conformance.scene import Output, Scene
from attnplug_conformance.subject import Allocate, Subject

DEEPSEEK = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
Lengths = tuple[tuple[int, int], ...]
Make = Callable[[BackendContext], AttentionBackend]


@dataclass(frozen=True)
class KernelCase(Case):
    """A case with the serving settings and options of its backend."""

    serving: Serving = field(default_factory=Serving)
    options: Any = None
    lse: bool = True
    """Request the log-sum-exp."""
    levels: frozenset[str] = frozenset()
    """Requested levels of invariance."""


def mha(
    lengths: Lengths,
    mode: ForwardMode = ForwardMode.EXTEND,
    page_size: int = 64,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    *,
    dtype: DType = DType.BFLOAT16,
    **changes: Any,
) -> KernelCase:
    """Return a case of an MHA layer with ``heads`` query heads."""
    dims = head_dim, head_dim if v_head_dim is None else v_head_dim
    return KernelCase(lengths, mode, AttentionKind.MHA, page_size, kv_heads, heads // kv_heads, dims, dtype=dtype,
                      **changes)  # fmt: skip


def mla(
    lengths: Lengths,
    mode: ForwardMode = ForwardMode.EXTEND,
    page_size: int = 64,
    heads: int = 16,
    *,
    dims: MLADims = DEEPSEEK,
    v_head_dim: int = 128,
    dtype: DType = DType.BFLOAT16,
    layers_alike: bool = True,
    **changes: Any,
) -> KernelCase:
    """Return a case of an MLA layer with the dimensions of DeepSeek-V3."""
    return KernelCase(lengths, mode, AttentionKind.MLA, page_size, mla=dims, v_head_dim=v_head_dim, mla_heads=heads,
                      dtype=dtype, layers_alike=layers_alike, **changes)  # fmt: skip


def lengths(count: int, longest: int, new: int, seed: int) -> Lengths:
    """Draw ``(prefix, new)`` per request: prefixes of no row, one row, whole pages, or up to ``longest`` rows."""
    chance = random.Random(seed)
    prefixes = [chance.choice([0, 1, 63, 64, 65, chance.randint(2, longest)]) for _ in range(count)]
    return tuple((prefix, new) for prefix in prefixes)


def ragged(count: int, longest: int, most: int, seed: int) -> Lengths:
    """Draw the same with 0 to ``most`` new tokens per request."""
    chance, prefixes = random.Random(seed), lengths(count, longest, 1, seed)
    return tuple((prefix, chance.choice([0, 1, chance.randint(1, most)])) for prefix, _ in prefixes)


@dataclass(frozen=True, eq=False)
class Made(Subject):
    """A subject whose backend ``make`` builds, even if no spec serves the case. ``contexts`` records its arguments."""

    make: Make = field(kw_only=True)
    serving: Serving = field(default_factory=Serving)
    levels: frozenset[str] = frozenset()
    contexts: list[BackendContext] = field(default_factory=list)

    def build(
        self,
        model: ModelSpec,
        problem: Problem,
        role: Role,
        pools: KVPools,
        limits: Limits,
        roles: frozenset[Role] | None = None,
        coordinator: Coordinator | None = None,
        allocate: Allocate | None = None,
        ranks: int = 1,
    ) -> AttentionBackend:
        pool = pools.mla or pools.mha
        assert pool is not None
        context = BackendContext(
            name="under_test",
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model=model,
            device=self.device,
            dtype=getattr(torch, str(problem.dtype)),
            kv_dtype=pool.dtype,
            page_size=pool.page_size,
            limits=replace(limits, max_context=max(limits.max_context, 4096)),
            pools=pools,
            workspace=WorkspaceOwner() if allocate is None else WorkspaceOwner(allocate),
            parallel=Parallel(max(ranks, 2) - 1, max(ranks, 2)),
            serving=self.serving,
            declared=self.capabilities,
            options=self.options,
            coordinator=coordinator,
            invariant=self.levels,
        )
        self.contexts.append(context)
        return self.make(context)


@cache
def _registered(name: str) -> Registered:
    return load_registry().backends[name]


class KernelScene(Scene):
    """A scene of a case, for a backend that ``make`` builds. ``declares`` names the backend whose spec it is given."""

    declares: ClassVar[str] = "torch_native"

    def __init__(self, case: KernelCase, device: str, make: Make) -> None:
        self.made = Made(
            _registered(self.declares),
            torch.device(device),
            options=case.options,
            make=make,
            serving=case.serving,
            levels=case.levels,
        )
        super().__init__(self.made, case)
        self.with_lse = case.lse

    @property
    def pool(self) -> MHAPool | MLAPool:
        pool = self.pools.mla or self.pools.mha
        assert pool is not None
        return pool

    @property
    def workspace(self) -> WorkspaceOwner:
        return self.made.contexts[0].workspace

    def over(self, pool: MHAPool | MLAPool) -> None:
        """Store the prefixes in another pool, over which the backend was built."""
        self.pools = KVPools(mla=pool) if isinstance(pool, MLAPool) else KVPools(mha=pool)
        self.store(LAYER, [(0, before) for before, _ in self.case.lengths])

    def results(self, batch: ForwardBatch | None = None, *, save: bool = True) -> tuple[Tensor, Tensor | None]:
        """Plan the batch if necessary and run it; returns output and log-sum-exp, padding rows included."""
        output = self.run(batch, lse=self.with_lse, save=save)
        return output.out, output.lse

    def error(self, batch: ForwardBatch | None = None) -> float:
        """Return the relative error of a run."""
        wanted = self.wanted()[0]
        return relative_error(self.results(batch)[0][: len(wanted)], wanted)

    def written(self) -> int:
        """Count the cache rows that have been written; all tensors of the cache that can hold NaN must agree."""
        tensors = [memory for memory in self.cache_tensors(LAYER) if memory.is_floating_point()]
        full = [~memory.float().isnan().flatten(2).all(-1) for memory in tensors]
        assert all(torch.equal(each, full[0]) for each in full)
        return int(full[0].sum())

    def halves(self) -> list[KernelScene]:
        """Split into two scenes over the same pool and backend, with half of the requests each."""
        found, half = [], len(self.new) // 2
        for part_slice in (slice(0, half), slice(half, None)):
            part = copy(self)
            part.case = replace(self.case, lengths=self.case.lengths[part_slice])
            part.new, part.totals = self.new[part_slice], self.totals[part_slice]
            part.page_table = self.page_table[part_slice]
            part.keys, part.values = self.keys[part_slice], self.values[part_slice]
            begin = sum(self.new[: part_slice.start])
            part.q = self.q[begin : begin + sum(part.new)]
            found.append(part)
        return found


def check(stage: KernelScene) -> KernelScene:
    """Check output and log-sum-exp against float64, zero and -inf for padding, and that only new rows were written."""
    before = stage.snapshot()
    out, lse = stage.results()
    check_written(stage, before)
    check_output(stage, Output(out, lse, 0.0, 0.0))
    return stage


def check_stored(stage: KernelScene, most: float) -> KernelScene:
    """Check results against float64 over the cache's rounded fp8 contents, to the relative error ``most``."""
    before = stage.snapshot()
    found = stage.results()
    check_written(stage, before)
    for result, wanted in zip(found, stage.wanted(), strict=True):
        assert result is not None
        assert relative_error(result[: len(wanted)], wanted) <= most
    return stage


def replayed(capture: Capture, other: Scene) -> Tensor:
    """Replay a capture with another scene's batch."""
    capture.put(other)
    return capture.replay()


def check_replay(capture: Capture, other: KernelScene, most: float | None = None) -> None:
    """Check a replay against float64, and that padded requests read and write nothing (all else is NaN)."""
    out, wanted = replayed(capture, other), other.wanted()[0]
    error = relative_error(out[: len(wanted)], wanted)
    assert error <= (most or other.tolerance), error
    check_padding(out, len(wanted))
    assert isinstance(capture.scene, KernelScene)
    assert capture.scene.written() == sum(other.totals)


class CaptureInParts(Capture):
    """A capture that passes queries in two parts, views of the whole ones."""

    def run(self) -> None:
        backend, mla = self.scene.backend, self.scene.case.mla
        assert mla is not None
        forward = backend.forward_decode if self.batch.forward_mode.is_decode else backend.forward_extend
        latent, rope = self.q.split((mla.kv_lora_rank, mla.qk_rope_head_dim), -1)
        self.attention.refill(self.batch)
        extras = ForwardExtras(q_rope=rope)
        self.out = forward(latent, self.k, None, self.scene.layer, self.batch, extras=extras)


def check_replays_in_parts(stage: KernelScene, others: Iterable[KernelScene]) -> None:
    """Check replays of a capture that takes queries in two parts."""
    capture = CaptureInParts(stage).reserve().capture()
    for other in others:
        check_replay(capture, other)


def check_captured_lanes(stage: KernelScene) -> None:
    """Check, on a GPU, captured batches of two lanes that replay concurrently on two streams."""
    halves, attention = stage.halves(), ModelAttention(stage.backend, stage.pools)
    captures = [Capture(half, lane, attention) for lane, half in enumerate(halves)]
    captures[0].reserve()
    for capture, half in zip(captures, halves, strict=True):
        capture.capture()
        geometry, real = capture.batch.geometry, half.geometry()
        targets = geometry.seq_lens, geometry.page_table, capture.q, capture.k, capture.v
        sources = real.seq_lens, real.page_table, *half.inputs(len(half.q))
        for target, source in zip(targets, sources, strict=True):
            if target is not None and source is not None:
                target.copy_(source)
        attention.capture(capture.batch)
    streams = [torch.cuda.Stream() for _ in captures]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(20):
        for found, capture, stream in zip(outs, captures, streams, strict=True):
            with torch.cuda.stream(stream):
                assert capture.graph is not None
                capture.graph.replay()
                found.append(capture.out.clone())
    torch.cuda.synchronize()
    for found, half in zip(outs, halves, strict=True):
        wanted = half.wanted()[0]
        assert max(relative_error(out, wanted) for out in found) <= stage.tolerance
