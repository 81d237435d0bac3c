"""A compressed layer on a scene: requests that grow step by step, in scattered pages of poisoned pools, and the float64
result of every step.

The oracle takes no part of the code under test. It makes every entry from the tokens themselves, a window at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Role,
)
from attnplug.host import KVPools, Limits, MLADims, WorkspaceOwner, plan_forward
from attnplug.sparse import (
    CompressedDims,
    CompressorInputs,
    CompressorWeights,
    IndexerDims,
    IndexInputs,
    SelectedPositions,
    SelectedRows,
)
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_sparse.pools import COMPRESSED, CompressedPool
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.batches import capabilities

FIRST, LAYER = 0, 2
HEADS, DIM, ROPE, EPS = 2, 16, 6, 1e-6
PAGES = 64
NAN = float("nan")


def compressed_layer(ratio: int, *, overlap: bool = False, topk: int | None = None, window: int = 6) -> LayerSpec:
    return LayerSpec(
        LAYER,
        AttentionKind.MLA,
        HEADS,
        HEADS,
        DIM,
        DIM,
        DIM**-0.5,
        sliding_window=window,
        sinks=True,
        mla=MLADims(DIM, DIM, 0),
        indexer=None if topk is None else IndexerDims(12, 8, topk),
        compressed=CompressedDims(ratio, overlap),
    )


@dataclass
class Tokens:
    """Inputs of a request's tokens so far, in float64."""

    rows: Tensor
    entries: tuple[Tensor, Tensor]
    index: tuple[Tensor, Tensor]

    def extended(self, other: Tokens) -> Tokens:
        return Tokens(
            torch.cat((self.rows, other.rows)),
            (torch.cat((self.entries[0], other.entries[0])), torch.cat((self.entries[1], other.entries[1]))),
            (torch.cat((self.index[0], other.index[0])), torch.cat((self.index[1], other.index[1]))),
        )

    def first(self, count: int) -> Tokens:
        (a, b), (c, d) = self.entries, self.index
        return Tokens(self.rows[:count], (a[:count], b[:count]), (c[:count], d[:count]))


class CompressedScene:
    """Requests on one layer. The model also has an equal layer before it that never runs, so its caches stay NaN."""

    def __init__(
        self,
        layer: LayerSpec,
        requests: int = 1,
        *,
        page_size: int = 16,
        drafts: int = 0,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.layer, self.device, self.page_size = layer, torch.device(device), page_size
        self.random = torch.Generator().manual_seed(seed)
        layers = (replace(layer, layer_id=FIRST), layer)
        mla = MLAPool(layers, num_pages=PAGES, page_size=page_size, dtype=DType.FLOAT32, device=device)
        self.pool = CompressedPool(
            layers, num_pages=PAGES, page_size=page_size, dtype=DType.FLOAT32, device=device, drafts=drafts
        )
        for each in (FIRST, LAYER):
            index = self.pool.index(each)
            for cache in (self.pool.entries(each), *([] if index is None else [index])):
                cache.entries.fill_(NAN)
                cache.tokens.fill_(NAN)
            mla.rows(each).fill_(NAN)
        self.pools = KVPools(mla=mla, caches={COMPRESSED: self.pool})
        self.backend = TorchSparseBackend(
            BackendContext(
                name="torch_sparse",
                declared=capabilities("torch_sparse"),
                roles=frozenset({Role.PREFILL, Role.DECODE}),
                options=None,
                model=ModelSpec("test", "test", layers, 1 << 20),
                device=self.device,
                dtype=torch.float32,
                kv_dtype=DType.FLOAT32,
                page_size=page_size,
                limits=Limits(requests, 4096, PAGES * page_size),
                pools=self.pools,
                workspace=WorkspaceOwner(),
            )
        )
        allocator = PageAllocator(PAGES)
        self.table = SlotTable(
            allocator, page_size=page_size, max_requests=requests + 1, max_pages=PAGES, device=self.device
        )
        taken = allocator.allocate(PAGES)
        allocator.release(taken[1::2] + taken[0::2])  # so that neighbours in a request are none in the pool
        self.rows = [self.table.admit() for _ in range(requests)]
        assert layer.compressed is not None
        self._series, self._ratio = layer.compressed.series, layer.compressed.ratio
        self.index_dim = 0 if layer.indexer is None else layer.indexer.head_dim
        self.weights, self.index_weights = self._weights(DIM), self._weights(self.index_dim or DIM)
        self.sinks = self.normal(HEADS)
        self.seen = [self._tokens(0) for _ in range(requests)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random).to(self.device)

    def _weights(self, dim: int) -> CompressorWeights:
        bias, norm = self.normal(self._ratio, self._series * dim), 1 + 0.2 * self.normal(dim)
        frequencies = 100.0 ** -(torch.arange(0, ROPE, 2) / ROPE).to(self.device)
        return CompressorWeights(bias, norm, EPS, frequencies)

    def _tokens(self, count: int) -> Tokens:
        wide, narrow = self._series * DIM, self._series * self.index_dim
        return Tokens(
            self.normal(count, DIM).double(),
            (self.normal(count, wide).double(), self.normal(count, wide).double()),
            (self.normal(count, narrow).double(), self.normal(count, narrow).double()),
        )

    def step(
        self, counts: Sequence[int], mode: ForwardMode = ForwardMode.EXTEND, *, padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Give each request ``new`` tokens; output and log-sum-exp, compared with float64 before they return."""
        counts = list(counts)
        for row, count in zip(self.rows, counts, strict=True):
            self.pools.copy_pages(self.table.extend(row, count))
        brought = [self._tokens(count) for count in counts]
        self.seen = [old.extended(new) for old, new in zip(self.seen, brought, strict=True)]
        batch, total = self.batch(counts, mode, padding), sum(counts)
        new = brought[0]
        for other in brought[1:]:
            new = new.extended(other)
        pad = self._tokens(padding)
        new = new.extended(pad)
        q = self.normal(total + padding, HEADS, DIM)
        entries = self._inputs(new.entries, self.weights)
        chosen: list[list[int] | None] = [None] * total
        selected = None
        if self.layer.indexer is not None:
            dims = self.layer.indexer
            index = IndexInputs(
                self.normal(total + padding, dims.heads, dims.head_dim),
                None,
                self.normal(total + padding, dims.heads),
                self._inputs(new.index, self.index_weights),
            )
            selected = self.backend.select(index, self.layer, batch)
            chosen = list(self.chosen(index, selected, counts))
        lse = torch.full((total + padding, HEADS), NAN, device=self.device)
        extras = ForwardExtras(lse=lse, sinks=self.sinks, selected=selected, entries=entries)
        out = self.forward(batch, q, new.rows.float().unsqueeze(1), extras)
        self.compare(out, lse, q, counts, chosen)
        assert not out[total:].any() and lse[total:].isneginf().all()
        return out, lse

    def forward(self, batch: ForwardBatch, q: Tensor, rows: Tensor, extras: ForwardExtras) -> Tensor:
        run = self.backend.forward_decode if batch.forward_mode.is_decode else self.backend.forward_extend
        return run(q, rows, None, self.layer, batch, extras=extras)

    def batch(self, counts: Sequence[int], mode: ForwardMode = ForwardMode.EXTEND, padding: int = 0) -> ForwardBatch:
        page_table, seq_lens = self.table.batch(self.rows)
        lens = self.table.lengths_cpu(self.rows).tolist()
        geometry = Geometry.of_lengths(mode, page_table, list(counts), lens, self.page_size, seq_lens=seq_lens)
        batch = ForwardBatch(geometry, torch.zeros(sum(counts) + padding, dtype=torch.int64, device=self.device))
        plan_forward(self.backend, batch)
        return batch

    def _inputs(self, brought: tuple[Tensor, Tensor], weights: CompressorWeights) -> CompressorInputs:
        values, gates = (part.float() for part in brought)
        return CompressorInputs(values, gates, weights)

    def take_back(self, request: int, tokens: int) -> None:
        """Forget a request's newest tokens."""
        left = self.table.length(self.rows[request]) - tokens
        self.table.truncate(self.rows[request], left)
        self.seen[request] = self.seen[request].first(left)

    # The oracle

    def entry(self, number: int, brought: tuple[Tensor, Tensor], weights: CompressorWeights) -> Tensor:
        """An entry by its definition."""
        values, gates = brought
        ratio, dim = self._ratio, weights.norm.shape[0]
        own = range(number * ratio, (number + 1) * ratio)
        terms = [(values[t, -dim:], gates[t, -dim:] + weights.bias[t % ratio, -dim:].double()) for t in own]
        if self._series == 2 and number:
            before = range((number - 1) * ratio, number * ratio)
            terms += [(values[t, :dim], gates[t, :dim] + weights.bias[t % ratio, :dim].double()) for t in before]
        shares = torch.stack([gate for _, gate in terms]).softmax(0)
        pooled = (shares * torch.stack([value for value, _ in terms])).sum(0)
        entry = pooled / (pooled.square().mean() + EPS).sqrt() * weights.norm.double()
        angles = number * ratio * weights.frequencies.double()
        even, odd = entry[-ROPE::2].clone(), entry[-ROPE + 1 :: 2].clone()
        entry[-ROPE::2] = even * angles.cos() - odd * angles.sin()
        entry[-ROPE + 1 :: 2] = even * angles.sin() + odd * angles.cos()
        return entry

    def chosen(self, index: IndexInputs, selected: SelectedRows, counts: Sequence[int]) -> list[list[int]]:
        """Entries of each token, after a check that no omitted entry scores higher than a selected one."""
        assert isinstance(selected, SelectedPositions) and self.layer.indexer is not None
        dims, found, token = self.layer.indexer, [], 0
        for request, count in enumerate(counts):
            tokens = self.seen[request]
            total = len(tokens.rows)
            keys = [self.entry(i, tokens.index, self.index_weights) for i in range(total // self._ratio)]
            for position in range(total - count, total):
                visible = (position + 1) // self._ratio
                mine = [int(number) for number in selected.positions[token] if number >= 0]
                assert len(set(mine)) == len(mine) == min(dims.topk, visible) and all(i < visible for i in mine)
                if visible:
                    products = index.q[token].double() @ torch.stack(keys[:visible]).T * dims.scale
                    scores = index.weights[token].double() @ products.relu()
                    best = scores.sort(descending=True).values[: len(mine)]
                    assert torch.allclose(scores[mine].sort(descending=True).values, best, atol=1e-5)
                found.append(mine)
                token += 1
        assert (selected.positions[token:] == -1).all()
        return found

    def compare(
        self, out: Tensor, lse: Tensor, q: Tensor, counts: Sequence[int], chosen: Sequence[list[int] | None]
    ) -> None:
        token = 0
        for request, count in enumerate(counts):
            tokens = self.seen[request]
            total = len(tokens.rows)
            entries = [self.entry(i, tokens.entries, self.weights) for i in range(total // self._ratio)]
            for position in range(total - count, total):
                visible = range((position + 1) // self._ratio)
                mine = chosen[token]
                assert self.layer.sliding_window is not None
                oldest = max(0, position - self.layer.sliding_window + 1)
                keys = [*tokens.rows[oldest : position + 1], *(entries[i] for i in (visible if mine is None else mine))]
                logits = q[token].double() @ torch.stack(keys).T * self.layer.scale
                with_sink = torch.cat((logits, self.sinks.double().unsqueeze(1)), 1).softmax(1)[:, :-1]
                wanted = with_sink @ torch.stack(keys)
                assert (out[token] - wanted).abs().max() < 2e-6 * max(1.0, float(wanted.abs().max()) * 4), position
                assert (lse[token] - logits.logsumexp(1)).abs().max() < 1e-5
                token += 1
