"""A backend on a stage: scattered pages, NaN in everything that must not be read, and the float64 result.

The model has a layer in front of the one under test, whose cache is all NaN: a test finds whoever reads that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

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
    MLAPool,
    ModelSpec,
    Role,
)
from attnplug.host import KVPools, Limits, MLADims, TorchNativeBackend, WorkspaceOwner, plan_forward, torch_dtype
from attnplug_conformance.reference import Rules, attention
from support.batches import capabilities, geometry
from support.devices import nothing_is_zero_by_chance

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """One batch on one layer. Lengths are (rows in the cache before, new tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    page_size: int = 16
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 16
    v_head_dim: int = 16
    mla: MLADims | None = None
    window: int | None = None
    cap: float | None = None
    dtype: DType = DType.FLOAT32
    kv_dtype: DType | None = None
    layout: str = "token_major"
    pages: str = "permuted"
    padding: int = 0
    lse: bool = True
    seed: int = 0
    scale: float | None = None
    """Of MHA; by default that of its head."""

    @property
    def layer(self) -> LayerSpec:
        if self.mla is not None:
            head_dim = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
            return LayerSpec(3, AttentionKind.MLA, self.heads, self.heads, head_dim, self.v_head_dim, head_dim**-0.5,
                             self.window, self.cap, mla=self.mla)  # fmt: skip
        return LayerSpec(3, AttentionKind.MHA, self.heads, self.kv_heads, self.head_dim, self.v_head_dim,
                         self.scale or self.head_dim**-0.5, self.window, self.cap)  # fmt: skip

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        return replace(self.layer, layer_id=1), self.layer


class Stage:
    """A backend with a poisoned pool, the rows of its requests written where a page table of the case's kind says."""

    def __init__(
        self, case: Case, device: str, build: Callable[[BackendContext], AttentionBackend] = TorchNativeBackend
    ) -> None:
        self.case, self.device, self.layer = case, torch.device(device), case.layer
        self.dtype = torch_dtype(case.dtype)
        kv_dtype = case.kv_dtype or case.dtype
        self.random = torch.Generator().manual_seed(case.seed)
        self.totals = [before + new for before, new in case.lengths]
        self.width = max(1, *(-(-total // case.page_size) for total in self.totals)) + 1
        pages = len(case.lengths) * self.width + 3
        self.page_table = self._page_table(pages)
        self.pools = self._pools(pages, kv_dtype)
        self.backend = build(
            BackendContext(
                name="under_test",
                roles=frozenset({Role.PREFILL, Role.DECODE}),
                model=ModelSpec("test", "test", case.layers, 4096),
                device=self.device,
                dtype=self.dtype,
                kv_dtype=kv_dtype,
                page_size=case.page_size,
                limits=Limits(16, 4096, 4096),
                pools=self.pools,
                workspace=WorkspaceOwner(),
                declared=capabilities("torch_native"),
                options=None,
            )
        )
        key_dim = self.layer.head_dim if case.mla is None else case.mla.row_dim
        value_dim = case.v_head_dim if case.mla is None else case.mla.kv_lora_rank
        kv_heads = case.kv_heads if case.mla is None else 1
        shrink = 1.0 if case.mla is None else (self.layer.head_dim / key_dim) ** 0.5
        tokens = sum(new for _, new in case.lengths)
        self.q = (self._normal(tokens, case.heads, key_dim) * shrink).to(self.dtype)
        self.keys = [self._normal(total, kv_heads, key_dim) for total in self.totals]
        self.values = (
            [keys[..., :value_dim] for keys in self.keys]
            if case.mla is not None
            else [self._normal(total, kv_heads, value_dim) for total in self.totals]
        )
        self._write_prefixes()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def _page_table(self, pages: int) -> torch.Tensor:
        """``[requests, width]``; what lies behind a request's last page leads outside the pool."""
        requests, width = len(self.totals), self.width
        order = {
            "permuted": torch.randperm(pages, generator=self.random)[: requests * width].view(requests, width),
            "interleaved": torch.arange(requests * width).view(width, requests).T.contiguous(),
            "descending": torch.arange(requests * width).flip(0).view(requests, width),
        }[self.case.pages]
        table = order.int()
        for request, total in enumerate(self.totals):
            table[request, -(-total // self.case.page_size) :] = 1 << 30
        return table

    def _pools(self, pages: int, kv_dtype: DType) -> KVPools:
        shape = {"num_pages": pages, "page_size": self.case.page_size, "dtype": kv_dtype, "device": self.device}
        if self.case.mla is not None:
            pool = MLAPool(self.case.layers, **shape)
            memories = [pool.rows(layer_id) for layer_id in pool.layer_ids]
            pools = KVPools(mla=pool)
        else:
            mha = MHAPool(self.case.layers, layout=self.case.layout, **shape)
            memories = [read(layer_id) for layer_id in mha.layer_ids for read in (mha.keys, mha.values)]
            pools = KVPools(mha=mha)
        for memory in memories:
            memory.copy_(torch.tensor(NAN))
        return pools

    def _write_prefixes(self) -> None:
        """By hand, row by row, straight into the memory: nothing of the code under test decides where."""
        stores = (
            [(self.pools.mla.rows(3), self.keys)]
            if self.pools.mla is not None
            else [(self.pools.mha.keys(3), self.keys), (self.pools.mha.values(3), self.values)]
        )
        for memory, rows in stores:
            for request, (before, _) in enumerate(self.case.lengths):
                for position in range(before):
                    page = self.page_table[request, position // self.case.page_size]
                    memory[page, position % self.case.page_size] = rows[request][position].to(
                        memory.device, memory.dtype
                    )

    def batch(self) -> ForwardBatch:
        case, new = self.case, [new for _, new in self.case.lengths]
        made = geometry(case.mode, self.page_table, new, self.totals, case.page_size, device=self.device)
        return ForwardBatch(made)

    def new_rows(self, of: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([rows[before:] for rows, (before, _) in zip(of, self.case.lengths, strict=True)])

    def run(self, batch: ForwardBatch | None = None, **arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Plan and run; returns the output and, if the case asks, its log-sum-exp, padding rows included."""
        batch = batch or self.batch()
        q, k = self.q, self.new_rows(self.keys)
        v = None if self.case.mla is not None else self.new_rows(self.values)
        if self.case.padding:
            q, k, v = (None if t is None else _padded(t, self.case.padding) for t in (q, k, v))
        lse = torch.full(q.shape[:2], NAN, device=self.device) if self.case.lse else None
        forward = self.backend.forward_decode if self.case.mode.is_decode else self.backend.forward_extend
        q, k, v = (None if t is None else t.to(self.device) for t in (q, k, v))
        with nothing_is_zero_by_chance(self.device):
            if batch.plan is None:
                plan_forward(self.backend, batch)
            out = forward(q, k, v, self.layer, batch, extras=ForwardExtras(lse=lse), **arguments)
        return out.cpu(), None if lse is None else lse.cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        stored = torch_dtype(self.case.kv_dtype or self.case.dtype)
        rules = Rules(self.layer.scale, self.case.window, self.case.cap)
        results = [
            attention(queries, keys.to(stored), values.to(stored), rules)
            for queries, keys, values, (before, _) in zip(
                self.q.split([new for _, new in self.case.lengths]),
                self.keys,
                self.values,
                self.case.lengths,
                strict=True,
            )
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([tensor, torch.full((rows, *tensor.shape[1:]), NAN, dtype=tensor.dtype)])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """NaN if anything found is NaN, so that it fails every comparison."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))
