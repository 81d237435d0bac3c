"""Random steps of requests through HiSparse, each chosen row compared with a pool that holds all rows.

Rows that must not be read are NaN: those of unallocated pages, those outside of hot buffers, and all rows on the device
when a layer ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardMode, Geometry, LayerSpec
from attnplug.host import MLADims
from attnplug.sparse import IndexerDims, SelectedPositions
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_sparse.hisparse import HiSparse, HostRows, HotPool, HotSizes

DIM, PAGE, CONTEXT, REQUESTS, LAYERS = 10, 4, 64, 3, 2


def layers(topk: int, count: int = LAYERS) -> list[LayerSpec]:
    mla = MLADims(kv_lora_rank=8, qk_rope_head_dim=2, qk_nope_head_dim=4)
    index = IndexerDims(heads=2, head_dim=4, topk=topk)
    return [LayerSpec(number, AttentionKind.MLA, 2, 1, 6, 4, 1.0, mla=mla, indexer=index) for number in range(count)]


@dataclass
class Trace:
    """Random steps of requests. ``rows[row][layer]`` are the latent rows of a request, as they were written.

    With a ``ratio`` they are entries, each written with the last of so many tokens. With ``window`` the newest ``topk``
    rows are chosen.
    """

    topk: int
    buffer_size: int
    nodes: int = 1
    device: str = "cpu"
    kernels: bool = False
    seed: int = 0
    pages: int = 40
    ratio: int = 1
    window: bool = False
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        specs = layers(self.topk)
        window = self.topk if self.window else None
        sizes = HotSizes(REQUESTS, 64, CONTEXT, self.buffer_size, self.nodes, self.ratio, window)
        self.pool = HotPool(specs, sizes, num_pages=self.pages, page_size=PAGE, dtype=DType.FLOAT32, device=self.device)
        host = HostRows(
            LAYERS, num_pages=self.pages, page_size=PAGE, row_nbytes=DIM * 4, device=self.device, ratio=self.ratio
        )
        self.hisparse = HiSparse(self.pool, host)
        if self.kernels and self.device == "cpu":
            from attnplug_sparse.hisparse.triton_swap import TritonSwap

            self.hisparse._swap = TritonSwap(self.pool, host, self.hisparse.tables)
        for layer in range(LAYERS):
            self.hisparse.host_pages(layer).fill_(float("nan"))
        self.poison()
        self.allocator = PageAllocator(self.pages)
        self.table = SlotTable(self.allocator, page_size=PAGE, max_requests=REQUESTS, max_pages=CONTEXT // PAGE)
        self.written = torch.Generator().manual_seed(self.seed)

    def poison(self) -> None:
        """NaN in new and staged rows, and in rows of no hot buffer."""
        self.pool.rows(0).view(-1, DIM)[: self.pool.hot] = float("nan")
        hot = self.pool.rows(0).view(-1, DIM)[self.pool.hot :]
        held = self.hisparse.tables.held.flatten()
        hot[: len(held)][held < 0] = float("nan")

    def admit(self, shared: int | None = None) -> int:
        """A new request; ``shared`` lends it its whole pages."""
        if shared is None:
            row = self.table.admit()
            self.rows[row] = [torch.zeros(0, DIM)] * LAYERS
            return row
        pages = self.table.pages(shared)[: self.table.length(shared) // PAGE]
        row = self.table.admit(pages, len(pages) * PAGE)
        self.rows[row] = [rows[: len(pages) * PAGE] for rows in self.rows[shared]]
        return row

    def release(self, row: int) -> None:
        """End a request; its pages are NaN from here on, unless others have them."""
        kept = {page for other in self.rows if other != row for page in self.table.pages(other)}
        mine = [page for page in self.table.pages(row) if page not in kept]
        for layer in range(LAYERS):
            self.hisparse.host_pages(layer)[mine] = float("nan")
        self.table.release(row)
        self.hisparse.release(row)
        del self.rows[row]

    def truncate(self, row: int, length: int) -> None:
        """Rows past the accepted ones are rejected, and written again."""
        self.table.truncate(row, length)
        self.rows[row] = [rows[:length] for rows in self.rows[row]]

    def choose(self, length: int, near: list[int]) -> list[int]:
        """Positions of a row with ``length`` visible ones; most of those in ``near`` again."""
        count = min(self.topk, length)
        if self.window:
            return [*range(length - count, length)] + [-1] * (self.topk - count)
        again = [position for position in near if position < length and self.random.random() < 0.7]
        rest = [position for position in range(length) if position not in again]
        self.random.shuffle(rest)
        chosen = ([length - 1] if self.random.random() < 0.8 else []) + again + rest
        chosen = list(dict.fromkeys(chosen))[:count]
        self.random.shuffle(chosen)
        return chosen + [-1] * (self.topk - count)

    def step(self, new: dict[int, int], padded: int = 0, *, uniform: bool | None = None) -> None:
        """New rows of some requests, and as many padded requests; checks each chosen row in each layer."""
        order = list(new)
        for row in order:
            for copy in self.table.extend(row, new[row]):
                self.hisparse.host.copy_pages([copy])
        counts, lens = [new[row] for row in order], [self.table.length(row) for row in order]
        same = len(set(counts)) == 1 if uniform is None else uniform
        page_table, seq_lens = self.table.batch(order)
        extra, rows = padded * counts[0] if same else 0, sum(counts)
        geometry = Geometry(
            ForwardMode.EXTEND,
            torch.cat((page_table, page_table.new_full((padded, page_table.shape[1]), -1))).to(self.device),
            torch.cat((seq_lens, seq_lens.new_zeros(padded))).to(self.device),
            PAGE,
            rows=rows + extra,
            max_seq_len=max(lens),
            max_new=max(counts),
            new_lens=None if same else torch.tensor(counts + [0] * padded, dtype=torch.int32, device=self.device),
            table_rows=torch.tensor(order + [REQUESTS, -1][:padded], device=self.device),
        )
        slots = geometry.new_slots()
        slots = torch.where(slots % self.ratio == self.ratio - 1, slots // self.ratio, -1)
        slots = torch.stack((slots, torch.zeros_like(slots)), 1)[:, 0]  # a column of a table, as plans have it
        for layer in range(LAYERS):
            self._layer(layer, order, counts, lens, slots, geometry, extra)

    def _layer(
        self,
        layer: int,
        order: list[int],
        counts: list[int],
        lens: list[int],
        slots: Tensor,
        geometry: Geometry,
        extra: int,
    ) -> None:
        wanted, chosen, near = [], [], [3, 5, 7, 11, 13]
        for row, new, length in zip(order, counts, lens, strict=True):
            fresh = torch.randn(new, DIM, generator=self.written)
            self.rows[row][layer] = torch.cat((self.rows[row][layer], fresh))
            mine = [self.choose((length - new + 1 + place) // self.ratio, near) for place in range(new)]
            chosen += mine
            entries = self.rows[row][layer][self.ratio - 1 :: self.ratio]
            wanted += [entries[[position for position in each if position >= 0]] for each in mine]
        fresh = torch.cat([self.rows[row][layer][-new:] for row, new in zip(order, counts, strict=True)])
        fresh = torch.cat((fresh, torch.full((extra, DIM), float("nan"))))
        positions = torch.tensor(chosen + [[-1] * self.topk] * extra, dtype=torch.int32)
        found = self.hisparse.load_selected(
            layer,
            fresh.to(self.device),
            slots,
            SelectedPositions(positions.to(self.device)),
            geometry,
        ).slots.cpu()
        assert found.dtype is torch.int32 and torch.equal(found >= 0, positions >= 0)
        held = self.pool.rows(layer).view(-1, DIM).cpu()
        for rows, mine in zip(wanted, found[: len(wanted)], strict=True):
            assert torch.equal(held[mine[mine >= 0].long()], rows)
        self._check_tables(layer)
        self.poison()

    def _check_tables(self, layer: int) -> None:
        """Each buffer has distinct positions, hints lead to them, and the order has every column once."""
        tables = self.hisparse.tables
        for row in range(REQUESTS):
            held, order = tables.held[layer, row].tolist(), tables.order[layer, row].tolist()
            there = [position for position in held if position >= 0]
            assert len(there) == len(set(there)) and sorted(order) == list(range(self.buffer_size))
            assert all(held[tables.hints[layer, row, position]] == position for position in there)

    def random_step(self, most: int) -> None:
        """Something that a scheduler does."""
        act = self.random.random()
        free = len(self.rows) < REQUESTS
        if free and (act < 0.2 or not self.rows):
            donor = self.random.choice([None, *self.rows]) if self.rows else None
            others = [row for row in self.rows if self.table.length(row) < CONTEXT]
            row = self.admit(donor)
            for _ in range(2):  # in chunks, beside requests that decode
                if self.allocator.free_pages >= 8 and self.table.length(row) < CONTEXT - 12:
                    self.step({row: self.random.randint(1, 12), **dict.fromkeys(others, 1)}, uniform=False)
                others = []
        elif act < 0.3:
            self.release(self.random.choice([*self.rows]))
        live = [row for row in self.rows if self.table.length(row) + most <= CONTEXT]
        if live and self.allocator.free_pages >= 2 * len(live):
            new = self.random.randint(1, most)
            self.step(dict.fromkeys(live, new), padded=self.random.randint(0, 2))
            if new > 1:
                for row in live:
                    self.truncate(row, self.table.length(row) - self.random.randint(0, new - 1))
        for row in [row for row in self.rows if self.table.length(row) + most > CONTEXT]:
            self.release(row)

    def end(self) -> None:
        """Nothing is left of any request."""
        for row in [*self.rows]:
            self.release(row)
        assert self.allocator.free_pages == self.pages
        assert [self.hisparse.hot_rows(row) for row in range(REQUESTS)] == [0] * REQUESTS
