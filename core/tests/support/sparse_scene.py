"""A sparse MLA layer on a scene: scattered pages, NaN in all that must not be read, and the float64 result.

The oracle takes no part of the code under test: it scores, chooses and attends by itself, a row at a time. The model
has a layer before the one under test, whose caches are all NaN, and one after it that shares its choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnplug import (
    INDEX_KEYS,
    AttentionBackend,
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    IndexerDims,
    IndexInputs,
    IndexKeyPool,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Role,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
)
from attnplug.host import KVPools, Limits, MLADims, TorchNativeBackend, WorkspaceOwner, plan_forward, torch_dtype
from support.batches import capabilities, geometry, padded
from support.trees import Parents, ancestors, random_trees, tree_bits

FIRST, LAYER, SHARED = 1, 3, 5
"""The layer that nobody runs, the one under test, and the one that shares its choice."""
NAN = float("nan")


@dataclass(frozen=True)
class SparseCase:
    """One batch. Lengths are (rows in the cache before, new tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    mode: ForwardMode = ForwardMode.EXTEND
    topk: int = 8
    page_size: int = 16
    heads: int = 4
    dims: MLADims = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
    v_head_dim: int = 16
    index_heads: int = 8
    index_dim: int = 16
    dtype: DType = DType.FLOAT32
    kv_dtype: DType | None = None
    index_dtype: DType | None = None
    padding: int = 0
    trees: tuple[Parents, ...] | None = None
    exact_lengths: bool = True
    seed: int = 0

    @property
    def layer(self) -> LayerSpec:
        width, heads = self.dims.qk_nope_head_dim + self.dims.qk_rope_head_dim, self.heads
        return LayerSpec(
            LAYER,
            AttentionKind.MLA,
            heads,
            heads,
            width,
            self.v_head_dim,
            width**-0.5,
            mla=self.dims,
            indexer=IndexerDims(self.index_heads, self.index_dim, self.topk),
        )

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec, LayerSpec]:
        layer = self.layer
        assert layer.indexer is not None
        shared = replace(layer, layer_id=SHARED, indexer=replace(layer.indexer, shares=LAYER))
        return replace(layer, layer_id=FIRST), layer, shared


CASES = {
    "decode": SparseCase(((40, 1), (7, 1), (90, 1), (8, 1)), ForwardMode.DECODE),
    "extend": SparseCase(((0, 37), (0, 5), (0, 9))),
    "extend after prefixes": SparseCase(((50, 20), (3, 4), (16, 33), (5, 4))),
    "mixed": SparseCase(((33, 1), (0, 25), (64, 1), (2, 1)), ForwardMode.MIXED),
    "verify": SparseCase(((30, 4), (6, 4), (47, 4)), ForwardMode.TARGET_VERIFY),
    "verify of trees": SparseCase(((30, 6), (3, 6)), ForwardMode.TARGET_VERIFY, trees=random_trees(2, 6)),
    "pages of one token": SparseCase(((20, 3), (11, 8)), page_size=1),
    "one row of choice": SparseCase(((20, 3), (0, 8)), topk=1),
    "padding": SparseCase(((40, 1), (7, 1)), ForwardMode.DECODE, padding=3),
}


class SparseScene:
    """A backend with poisoned pools that hold the prefixes of the case's requests, and the rows they bring."""

    def __init__(
        self,
        case: SparseCase,
        device: str = "cpu",
        build: Callable[[BackendContext], AttentionBackend] = TorchNativeBackend,
    ) -> None:
        self.case, self.device = case, torch.device(device)
        self.layer, self.shared = case.layers[1:]
        self.random = torch.Generator(self.device).manual_seed(case.seed)
        self.dtype = torch_dtype(case.dtype)
        self.new = [new for _, new in case.lengths]
        self.totals = [before + new for before, new in case.lengths]
        self.page_table, pages = self._page_table()
        size: dict[str, Any] = {"num_pages": pages, "page_size": case.page_size, "device": self.device}
        self.mla = MLAPool(case.layers, dtype=case.kv_dtype or case.dtype, **size)
        self.keys = IndexKeyPool(case.layers, dtype=case.index_dtype or case.dtype, **size)
        self.pools = KVPools(mla=self.mla, caches={INDEX_KEYS: self.keys})
        for memory in (*map(self.mla.rows, self.mla.layer_ids), *map(self.keys.keys, self.keys.layer_ids)):
            memory.fill_(0xFF if memory.dtype is torch.uint8 else NAN)  # which is NaN too, in every type
        self.context = BackendContext(
            name="under_test",
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model=ModelSpec("test", "test", case.layers, 1 << 20),
            device=self.device,
            dtype=self.dtype,
            kv_dtype=case.kv_dtype or case.dtype,
            page_size=case.page_size,
            limits=Limits(
                max(len(self.new), 1), max(sum(self.new), 1), max(4096, self.page_table.shape[1] * case.page_size)
            ),
            pools=self.pools,
            workspace=WorkspaceOwner(),
            declared=capabilities("torch_native"),
            options=None,
        )
        self.backend = build(self.context)
        tokens, dims = sum(self.new), case.dims
        self.rows = [self.normal(total, dims.row_dim) for total in self.totals]
        self.q = self.normal(tokens, case.heads, dims.row_dim) * (self.layer.head_dim / dims.row_dim) ** 0.5
        self.index_rows = [self.normal(total, case.index_dim) for total in self.totals]
        self.index_q = self.normal(tokens, case.index_heads, case.index_dim)
        self.weights = self.normal(tokens, case.index_heads).float()
        for layer in (LAYER, SHARED):
            self.store(layer, self.mla.write, self.rows)
        self.store(LAYER, self.keys.write, self.index_rows)
        if case.kv_dtype is not None:  # what attention should find is what a cache keeps of the rows
            self.rows = [self._kept(rows) for rows in self.rows]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device).to(self.dtype)

    def _page_table(self) -> tuple[Tensor, int]:
        """``[requests, width]``, permuted, and how many pages there are; past a request's last it leads nowhere."""
        needed = [-(-total // self.case.page_size) for total in self.totals]
        requests, width = len(needed), max([*needed, 1]) + 1
        pages = requests * width + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(self.case.seed))
        table = order[: requests * width].view(requests, width).int()
        for request, count in enumerate(needed):
            table[request, count:] = 1 << 30
        return table, pages

    def store(self, layer: int, write: Callable[[int, Tensor, Tensor], None], rows: list[Tensor]) -> None:
        """Write the prefix of every request, by the page table."""
        for request, (before, _) in enumerate(self.case.lengths):
            slots = [self._slot(request, position) for position in range(before)]
            write(layer, torch.tensor(slots, dtype=torch.int64, device=self.device), rows[request][:before])

    def _kept(self, rows: Tensor) -> Tensor:
        kv_dtype, every = self.case.kv_dtype or self.case.dtype, torch.arange(len(rows), device=self.device)
        pool = MLAPool([self.layer], num_pages=len(rows), page_size=1, dtype=kv_dtype, device=self.device)
        pool.write(LAYER, every, rows)
        return pool.read_rows(LAYER, every).to(self.dtype)

    def where(self, request: int, position: int) -> tuple[int, int]:
        size = self.case.page_size
        return int(self.page_table[request, position // size]), position % size

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

    def planned(self) -> ForwardBatch:
        batch = self.batch()
        plan_forward(self.backend, batch)
        return batch

    def padded(self, tensor: Tensor) -> Tensor:
        tail = torch.full((self.case.padding, *tensor.shape[1:]), NAN, dtype=tensor.dtype, device=self.device)
        return torch.cat([tensor, tail])

    def new_rows(self, of: list[Tensor]) -> Tensor:
        return torch.cat([rows[before:] for rows, (before, _) in zip(of, self.case.lengths, strict=True)])

    def index(self) -> IndexInputs:
        keys = self.padded(self.new_rows(self.index_rows))
        return IndexInputs(self.padded(self.index_q), keys, self.padded(self.weights))

    def attend(
        self, batch: ForwardBatch, selected: SelectedRows | None, layer: LayerSpec | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, padding rows included."""
        q, k = self.padded(self.q), self.padded(self.new_rows(self.rows)).unsqueeze(1)
        lse = torch.full(q.shape[:2], NAN, device=self.device)
        forward = self.backend.forward_decode if self.case.mode.is_decode else self.backend.forward_extend
        extras = ForwardExtras(lse=lse, selected=selected)
        return forward(q, k, None, layer or self.layer, batch, extras=extras), lse

    # The oracle

    def visible(self) -> list[tuple[int, list[int]]]:
        """The request of each token, and the positions that it sees, in ascending order."""
        found = []
        for request, (before, new) in enumerate(self.case.lengths):
            for row in range(new):
                seen = range(row + 1) if self.case.trees is None else ancestors(self.case.trees[request], row)
                found.append((request, [*range(before), *(before + other for other in seen)]))
        return found

    def scores(self, token: int, request: int, seen: list[int]) -> Tensor:
        """``[seen]`` float64."""
        keys, q = self.index_rows[request][seen].double(), self.index_q[token].double()
        products = torch.relu(q @ keys.T * self.case.index_dim**-0.5)
        return self.weights[token].double() @ products

    def chosen(self) -> list[list[int]]:
        """The positions that each token attends to, in ascending order. The scores at the border are far apart."""
        choices = []
        for token, (request, seen) in enumerate(self.visible()):
            if len(seen) > self.case.topk:
                scores = self.scores(token, request, seen)
                ordered = scores.sort(descending=True)
                gap = ordered.values[self.case.topk - 1] - ordered.values[self.case.topk]
                assert gap > 1e-5, f"token {token} has a tie at the border; take another seed"
                seen = sorted(seen[place] for place in ordered.indices[: self.case.topk].tolist())
            choices.append(seen)
        return choices

    def wanted(self, choices: list[list[int]] | None = None) -> tuple[Tensor, Tensor]:
        """Attention to the chosen rows alone, and its log-sum-exp."""
        outs, sums, rank = [], [], self.case.dims.kv_lora_rank
        for token, ((request, _), chosen) in enumerate(zip(self.visible(), choices or self.chosen(), strict=True)):
            rows = self.rows[request][chosen].double()
            logits = self.q[token].double() @ rows.T * self.layer.scale
            outs.append(logits.softmax(-1) @ rows[:, :rank])
            sums.append(logits.logsumexp(-1))
        return torch.stack(outs), torch.stack(sums)

    def positions(self, selected: SelectedRows) -> list[list[int]]:
        """What was selected, in ascending order; each row is checked to be distinct, with -1 after its last only."""
        found, slots = [], isinstance(selected, SelectedSlots)
        tensor = selected.slots if isinstance(selected, SelectedSlots) else selected.positions
        assert tensor.dtype is torch.int32
        for (request, _), row in zip(self.visible(), tensor.tolist(), strict=False):
            live = [value for value in row if value >= 0]
            assert row == live + [-1] * (len(row) - len(live)) and len(set(live)) == len(live)
            if slots:
                places = {self._slot(request, position): position for position in range(self.totals[request])}
                live = [places[slot] for slot in live]
            found.append(sorted(live))
        return found

    def judged(self, selected: SelectedRows, tolerance: float) -> list[list[int]]:
        """Positions, if they are as good as any by their scores in float64: relu makes ties, and short types round."""
        found = self.positions(selected)
        for token, ((request, seen), mine) in enumerate(zip(self.visible(), found, strict=True)):
            assert len(mine) == min(self.case.topk, len(seen)) and set(mine) <= set(seen)
            best = self.scores(token, request, seen).sort(descending=True).values[: len(mine)]
            scores = self.scores(token, request, mine).sort(descending=True).values
            assert torch.allclose(scores, best, rtol=0, atol=tolerance * float(best.abs().max().clamp(min=1)))
        return found

    def _slot(self, request: int, position: int) -> int:
        page, offset = self.where(request, position)
        return page * self.case.page_size + offset

    def as_slots(self, selected: SelectedPositions) -> SelectedSlots:
        """The same rows by their slots, with a row for each token that is not padding."""
        slots = [
            [-1 if position < 0 else self._slot(request, position) for position in row]
            for (request, _), row in zip(self.visible(), selected.positions.tolist(), strict=True)
        ]
        return SelectedSlots(torch.tensor(slots, dtype=torch.int32, device=self.device))
