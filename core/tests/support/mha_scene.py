"""An MHA backend on a scene: scattered pages, NaN in all that must not be read, and the float64 result.

As in ``mla_scene`` a layer that nobody runs comes first, all NaN and of another scale, and the model is one rank's.
Made for kernels, as that is: many heads, long requests; float64 runs on the case's device, in pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

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
    LayerSpec,
    MHAPool,
    ModelSpec,
    Role,
    Serving,
)
from attnplug.host import KVPools, Limits, Parallel, WorkspaceOwner, plan_forward, torch_dtype
from attnplug.kv import LayoutName
from support.batches import capabilities, geometry, padded
from support.devices import nothing_is_zero_by_chance
from support.mla_scene import FIRST_LAYER, LAYER, NAN, RANKS, attention, kept, relative_error
from support.trees import Parents, tree_attention, tree_bits

__all__ = ["LAYER", "MHACase", "MHAScene"]


@dataclass(frozen=True)
class MHACase:
    """One batch on one layer of a rank. Lengths are (rows in the cache before, new tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    page_size: int = 64
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    dtype: DType = DType.BFLOAT16
    kv_dtype: DType | None = None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """Of fp8 keys and values."""
    layout: LayoutName = "token_major"
    pages: str = "permuted"
    padding: int = 0
    exact_lengths: bool = True
    """Whether the host knows them, or upper bounds only."""
    trees: tuple[Parents, ...] | None = None
    """The tree of each request's new rows; ``None``: chains."""
    lanes: int = 1
    lse: bool = True
    seed: int = 0
    serving: Serving = field(default_factory=Serving)
    options: Any = None

    @property
    def layer(self) -> LayerSpec:
        return LayerSpec(
            LAYER,
            AttentionKind.MHA,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.head_dim if self.v_head_dim is None else self.v_head_dim,
            self.head_dim**-0.5,
            sliding_window=self.window,
            logit_cap=self.cap,
            sinks=self.sinks,
        )

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        return replace(self.layer, layer_id=FIRST_LAYER, scale=2 * self.layer.scale), self.layer


class MHAScene:
    """A backend with a poisoned pool that holds the prefixes of the case's requests, and the rows they bring."""

    def __init__(self, case: MHACase, device: str, build: Callable[[BackendContext], AttentionBackend]) -> None:
        self.case, self.device, self.layer = case, torch.device(device), case.layer
        self.random = torch.Generator(self.device).manual_seed(case.seed)
        self.dtype = torch_dtype(case.dtype)
        self.new = [new for _, new in case.lengths]
        self.totals = [before + new for before, new in case.lengths]
        self.page_table, pages = self._page_table()
        kv_dtype = case.kv_dtype or case.dtype
        fp8 = kv_dtype is DType.FLOAT8_E4M3
        self.pool = MHAPool(
            case.layers,
            num_pages=pages,
            page_size=case.page_size,
            dtype=kv_dtype,
            device=self.device,
            layout=case.layout,
            scales={LAYER: case.kv_scales, FIRST_LAYER: (2.0, 3.0)} if fp8 else None,
        )
        for layer_id in self.pool.layer_ids:
            for memory in (self.pool.keys(layer_id), self.pool.values(layer_id)):
                memory.copy_(torch.tensor(NAN))
        self.context = BackendContext(
            name="under_test",
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model=ModelSpec("test", "test", case.layers, 1 << 20),
            device=self.device,
            dtype=self.dtype,
            kv_dtype=kv_dtype,
            page_size=case.page_size,
            limits=Limits(max(len(self.new), 1), max(sum(self.new), 1), max([4096, *self.totals]), case.lanes),
            pools=KVPools(mha=self.pool),
            workspace=WorkspaceOwner(),
            parallel=Parallel(RANKS - 1, RANKS),
            serving=case.serving,
            declared=capabilities("torch_native"),
            options=case.options,
        )
        self.backend = build(self.context)
        self.q = self.normal(sum(self.new), case.heads, case.head_dim)
        self.keys = [self.normal(total, case.kv_heads, case.head_dim) for total in self.totals]
        self.values = [self.normal(total, case.kv_heads, self.layer.v_head_dim) for total in self.totals]
        self.sinks = self.normal(case.heads).float() if case.sinks else None
        self.store([(0, before) for before, _ in case.lengths])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device).to(self.dtype)

    def _page_table(self) -> tuple[Tensor, int]:
        """``[requests, width]``, and how many pages there are; behind a request's last page it leads nowhere."""
        needed = [-(-total // self.case.page_size) for total in self.totals]
        requests, width = len(needed), max([*needed, 1]) + 1
        pages = requests * width + 3
        order = {
            "permuted": lambda: torch.randperm(pages, generator=self.random, device=self.device),
            "interleaved": lambda: torch.arange(requests * width).view(width, requests).T.flatten(),
            "descending": lambda: torch.arange(pages).flip(0),
        }[self.case.pages]()
        table = order[: requests * width].view(requests, width).int().cpu()
        for request, count in enumerate(needed):
            table[request, count:] = 1 << 30
        return table, pages

    def store(self, spans: list[tuple[int, int]]) -> None:
        """Write rows ``start … stop`` of every request straight into the memory, by the page table."""
        for memory, rows, scale in zip(
            (self.pool.keys(LAYER), self.pool.values(LAYER)), (self.keys, self.values), self.case.kv_scales, strict=True
        ):
            as_bytes = memory.dtype is torch.float8_e4m3fn  # torch has no index operations for it on the CPU
            for request, (start, stop) in enumerate(spans):
                position = torch.arange(start, stop)
                pages = self.page_table[request, position // self.case.page_size].long().to(self.device)
                cells = kept(rows[request][start:stop], scale, memory.dtype)
                target, cells = (each.view(torch.uint8) if as_bytes else each for each in (memory, cells))
                target[pages, (position % self.case.page_size).to(self.device)] = cells

    def stored(self, rows: Tensor, scale: float) -> Tensor:
        """Rows as a cache in its type holds them, in float64."""
        return kept(rows, scale, torch_dtype(self.case.kv_dtype or self.case.dtype)).double() * scale

    def written(self) -> int:
        """How many rows of the cache hold something, in keys and in values alike."""
        keys, values = (
            ~memory.float().isnan().flatten(2).all(-1) for memory in (self.pool.keys(LAYER), self.pool.values(LAYER))
        )
        assert torch.equal(keys, values)
        return int(keys.sum())

    def batch(self) -> ForwardBatch:
        case = self.case
        made = geometry(
            case.mode,
            self.page_table,
            self.new,
            self.totals,
            case.page_size,
            exact=case.exact_lengths,
            device=self.device,
        )
        if case.trees is not None:
            made = replace(made, tree=tree_bits(case.trees, self.device))
        return padded(ForwardBatch(made), case.padding)

    def padded(self, tensor: Tensor) -> Tensor:
        tail = torch.full((self.case.padding, *tensor.shape[1:]), NAN, dtype=tensor.dtype, device=self.device)
        return torch.cat([tensor, tail])

    def new_rows(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the batch brings."""
        spans = [slice(before, before + new) for before, new in self.case.lengths]
        keys, values = (
            torch.cat([rows[span] for rows, span in zip(every, spans, strict=True)])
            for every in (self.keys, self.values)
        )
        return keys, values

    def run(self, batch: ForwardBatch | None = None, **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """Plan (unless the batch is) and run; output and log-sum-exp, padding rows included."""
        batch = batch or self.batch()
        q, k, v = map(self.padded, (self.q, *self.new_rows()))
        lse = torch.full(q.shape[:2], NAN, device=self.device) if self.case.lse else None
        extras = ForwardExtras(lse, self.sinks) if self.case.lse or self.case.sinks else None
        forward = self.backend.forward_decode if self.case.mode.is_decode else self.backend.forward_extend
        with nothing_is_zero_by_chance(self.device):
            if batch.plan is None:
                plan_forward(self.backend, batch)
            return forward(q, k, v, self.layer, batch, extras=extras, **arguments), lse

    def check(self, most: float) -> None:
        """Output and log-sum-exp are float64's, padding gives zero and -inf, and nothing but new rows was written."""
        out, lse = self.run()
        wanted, wanted_lse = self.wanted()
        tokens = len(wanted)
        assert relative_error(out[:tokens], wanted) <= most
        assert (out[tokens:] == 0).all()
        if lse is not None:
            assert relative_error(lse[:tokens], wanted_lse) <= most
            assert (lse[tokens:] == float("-inf")).all()
        assert self.written() == sum(self.totals)

    def wanted(self) -> tuple[Tensor, Tensor]:
        """What ``run`` must give for the rows that are not padding."""
        case, shared = self.case, self.case.heads // self.case.kv_heads
        outs = []
        for request, q in enumerate(self.q.split(self.new)):
            stored = zip((self.keys, self.values), case.kv_scales, strict=True)
            keys, values = (self.stored(rows[request], scale).repeat_interleave(shared, 1) for rows, scale in stored)
            if case.trees is None:
                outs.append(attention(q, keys, values, self.layer.scale, case.window, case.cap))
            else:
                outs.append(tree_attention(q, keys, values, self.layer.scale, case.trees[request], case.cap))
        out, lse = torch.cat([out for out, _ in outs]), torch.cat([lse for _, lse in outs])
        if self.sinks is not None:
            weight, sink = lse.exp(), self.sinks.double().exp()
            out = out * (weight / (weight + sink)).unsqueeze(-1)
        return out, lse
