"""HiSparse: random traces compared with a pool that holds all rows, on a CPU and by kernels (A10).

Rows that must not be read are NaN: those of unallocated pages, those outside of hot buffers, and all rows on the device
when a layer ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendError,
    DType,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    ModelSpec,
    PlanError,
    PoolError,
    Problem,
    Role,
    UsageError,
)
from attnplug.host import MLADims
from attnplug.kernels import PageCopy
from attnplug.sparse import CompressedDims, IndexerDims, SelectedPositions, SelectedSlots
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_sparse.hisparse import HiSparse, HostRows, HostSlots, HotLayers, HotPool, HotSizes, rows_and_entries
from attnplug_sparse.hisparse.tables import HotTables
from attnplug_sparse.plugin import attnplug_backends
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import HotStage, SparseStage, sparse

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]
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


@settings(max_examples=8, deadline=None)
@given(
    topk=st.integers(1, 9),
    more=st.sampled_from(["k", "k+1", "2k"]),
    nodes=st.integers(1, 3),
    ratio=st.sampled_from([1, 1, 2, 4]),
    seed=st.integers(0, 999),
)
def test_random_traces_read_the_rows_that_were_written(topk, more, nodes, ratio, seed):
    """A10: prefix hits, chunks, verify rows that are rejected, padding, aborts, pages and rows that are used again."""
    chosen = topk * nodes
    trace = Trace(topk, {"k": chosen, "k+1": chosen + 1, "2k": 2 * chosen}[more], nodes, seed=seed, ratio=ratio)
    for _ in range(12):
        trace.random_step(nodes)
    trace.end()


@settings(max_examples=6, deadline=None)
@given(window=st.integers(1, 12), nodes=st.integers(1, 3), seed=st.integers(0, 999))
def test_random_traces_read_the_rows_of_a_window(window, nodes, seed):
    """A10: a buffer of one window holds the rows of all that are verified. A prefill copies no other rows."""
    trace = Trace(window, window, nodes, seed=seed, window=True)
    for _ in range(12):
        trace.random_step(nodes)
    trace.end()
    long = trace.admit()
    trace.step({long: 40})
    before = trace.hisparse.statistics().staged
    trace.step({long: 4})
    assert trace.hisparse.statistics().staged - before == (window - 1) * LAYERS


KERNEL_CASES = [(5, 5, 1, {}), (4, 5, 1, {}), (3, 9, 3, {}), (3, 4, 1, {"ratio": 2}), (2, 6, 3, {"ratio": 4}),
                (5, 5, 2, {"window": True})]  # fmt: skip


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(("topk", "buffer_size", "nodes", "more"), KERNEL_CASES)
@pytest.mark.sample(4)
@pytest.mark.sample(2)
def test_kernels_do_what_torch_does(topk, buffer_size, nodes, more, device, monkeypatch):
    from attnplug_sparse.hisparse import triton_swap

    if device == "cpu":  # where programs run one after the other
        monkeypatch.setattr(triton_swap, "_MAX_COPIERS", 2)
    trace, plain = (
        Trace(topk, buffer_size, nodes, where, kernels=by, seed=topk, **more)
        for where, by in ((device, True), ("cpu", False))
    )
    while not trace.hisparse.statistics().staged or len(trace.rows) < 2 or not trace.hisparse.statistics().loaded:
        trace.random_step(nodes)
        plain.random_step(nodes)
    assert trace.hisparse.statistics() == plain.hisparse.statistics()
    if nodes == 1:  # of several rows that miss the same position, any may bring it in
        tables, others = trace.hisparse.tables, plain.hisparse.tables
        assert torch.equal(tables.held.cpu(), others.held) and torch.equal(tables.order.cpu(), others.order)
    trace.end()


@pytest.mark.parametrize("device", BY_KERNEL)
def test_few_programs_stage_a_prefix_of_many_tiles(device, monkeypatch):
    """A captured prefill launches as many for every request."""
    from attnplug_sparse.hisparse import triton_swap

    monkeypatch.setattr(triton_swap, "_STAGING_PROGRAMS", 1)
    monkeypatch.setattr(triton_swap, "_MAX_COPIERS", 2)
    trace = Trace(50, 50, 1, device, kernels=True)
    row = trace.admit()
    for new in (50, 5):  # the second one's choice is all 50 rows before it, in two tiles
        trace.step({row: new})
    assert trace.hisparse.statistics().staged == 50 * LAYERS


# ---- a backend over it ----


CASES = {
    "decode": sparse(((30, 1), (5, 1), (90, 1)), ForwardMode.DECODE),
    "extend": sparse(((0, 20), (17, 9), (40, 9)), page_size=4),
    "mixed": sparse(((30, 1), (17, 9), (21, 1)), ForwardMode.MIXED, padding=2),
    "verify of trees": sparse(
        ((30, 4), (16, 4)), ForwardMode.TARGET_VERIFY, trees=((-1, 0, 0, 1), (-1, 0, 1, 2)), seed=1
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(2)
def test_layers_attend_to_rows_from_the_host_as_float64_does(name, device):
    """A10: also a layer that shares another one's choice. It has hot buffers of its own."""
    stage = HotStage(CASES[name], device)
    stage.store_shared()
    batch = stage.planned()
    selected = stage.select(batch)
    for layer in (stage.layer, stage.shared, stage.layer):  # the second time rows are there
        stage.check_attends(batch, selected, layer)


def test_a_buffer_is_refilled_with_what_was_not_used_for_longest():
    trace = Trace(topk=2, buffer_size=4)
    row = trace.admit()
    trace.step({row: 9})
    trace.hisparse.reset_statistics()

    def loaded(*positions: int) -> int:
        trace.choose = lambda length, near: [*positions]
        before = trace.hisparse.statistics().loaded
        trace.step({row: 1})
        return (trace.hisparse.statistics().loaded - before) // LAYERS

    assert [loaded(0, 1), loaded(2, 3), loaded(0, 1)] == [2, 2, 0]
    assert [loaded(4, 5), loaded(0, 1), loaded(2, 3), loaded(0, 1), loaded(4, 5)] == [2, 0, 2, 0, 2]
    counted = trace.hisparse.statistics()
    assert counted.read == 8 * 2 * LAYERS and counted.hit_rate == 1 - counted.loaded / counted.read
    assert counted.written == 8 * LAYERS and counted.staged == 0
    moved = counted.to_device_nbytes, counted.to_host_nbytes
    assert moved == (counted.loaded * DIM * 4, counted.written * DIM * 4)


def test_pages_and_rows_are_copied_on_the_host_in_every_layer():
    host = HostRows(2, num_pages=6, page_size=2, row_nbytes=3, device="cpu")
    host.cells.copy_(torch.arange(host.cells.numel(), dtype=torch.uint8).view_as(host.cells))
    before = host.cells.clone()
    host.copy_pages([PageCopy(1, 4), PageCopy(4, 5)])
    assert torch.equal(host.cells[:, 8:10], before[:, 2:4]) and torch.equal(host.cells[:, 10:], before[:, 2:4])
    host.move_rows(torch.tensor([0, 1, 7]), torch.tensor([1, 0, -1]))
    assert torch.equal(host.cells[:, :2], before[:, [1, 0]]) and torch.equal(host.cells[:, 2:8], before[:, 2:8])
    with raises_naming(PoolError, [6], "0 to 5"):
        host.copy_pages([PageCopy(0, 6)])


@pytest.mark.parametrize("device", BY_KERNEL)
def test_a_kernel_moves_rows_all_of_which_are_read_before_any_is_written(device):
    from attnplug_sparse.hisparse.triton_rows import move

    host = HostRows(2, num_pages=20, page_size=4, row_nbytes=20, device=device)
    host.cells.copy_(torch.randint(0, 255, host.cells.shape, dtype=torch.uint8))
    before = host.cells.clone()
    order = torch.randperm(80)
    move(host.cells, HostSlots(order.to(device)), HostSlots(order.roll(1).where(order > 9, -1).to(device)))
    if device == "cuda":
        torch.cuda.synchronize()
    for source, target in zip(order.tolist(), order.roll(1).tolist(), strict=True):
        assert torch.equal(host.cells[:, target], before[:, source if source > 9 else target])


def test_rows_are_kept_by_layer_in_one_block_of_memory():
    """Staged and new rows take the memory of one layer; hot buffers, that of all."""
    sizes = HotSizes(max_requests=3, max_tokens=8, max_context=64, buffer_size=5)
    pool = HotPool(layers(5), sizes, num_pages=10, page_size=4, dtype=DType.FLOAT32, device="cpu")
    assert pool.rows(0).data_ptr() == pool.rows(1).data_ptr()
    assert (pool.staging, pool.hot, pool.first_of(1)) == (8, 48, 48 + 15)
    assert pool.nbytes == -(-(48 + 2 * 15) // 4) * 4 * DIM * 4
    tables = HotTables(2, sizes, "cpu").nbytes
    assert sizes.device_nbytes(2, DIM * 4) == (8 + 30) * DIM * 4 + tables - 4 * 8 + 3 * (5 * 9 + 8)


# ---- what is refused ----


def refuse(case: str = "decode", **changes: Any) -> None:
    """Attend by a batch or a choice that is not as HiSparse needs it."""
    stage = HotStage(CASES[case])
    batch = stage.planned()
    selected = stage.select(batch)
    extras = ForwardExtras(selected=changes.get("selected", selected))
    if "geometry" in changes:
        batch.geometry = replace(batch.geometry, **changes["geometry"])
        stage.plan(batch)
    stage.forward(batch, save=changes.get("save_kv_cache", True), extras=extras)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (
            {"selected": SelectedSlots(torch.zeros(3, 8, dtype=torch.int32))},
            BackendError,
            ["layer 3", "slots", "page table"],
        ),
        ({"save_kv_cache": False}, PlanError, ["save_kv_cache=True"]),
        ({"geometry": {"table_rows": None}}, BackendError, ["table_rows"]),
        (
            {"selected": SelectedPositions(torch.zeros(3, 9, dtype=torch.int32))},
            BackendError,
            [9, 8],
        ),
    ],
)
def test_a_call_that_would_read_other_rows_is_refused(changes, error, named):
    with raises_naming(error, *named):
        refuse(**changes)


def test_a_backend_that_writes_by_the_page_table_is_refused():
    stage = HotStage(CASES["decode"])
    pool = stage.context.pools.mla
    with raises_naming(PoolError, "slots", "page table"):
        pool.write(3, torch.tensor([0]), torch.zeros(1, pool.rows(3).shape[3]))
    before = pool.rows(3).clone()
    stage.context.pools.copy_pages([PageCopy(0, 1)])
    stage.context.pools.move_rows(torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(pool.rows(3).view(torch.uint8), before.view(torch.uint8))


def test_a_coordinator_that_the_spec_does_not_name_is_refused():
    stage = SparseStage(CASES["decode"])
    with raises_naming(BackendError, "others"):
        TorchSparseBackend(replace(stage.context, coordinator=SimpleNamespace(name="others")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"buffer_size": 4}, ["device_buffer_size", 4, 5]),
        ({"buffer_size": 14, "nodes": 3}, ["device_buffer_size", 14, 5, 3, 15]),
        ({"buffer_size": 1 << 15}, ["device_buffer_size", 32768, "5 to 32767"]),
    ],
)
def test_buffers_that_do_not_hold_a_choice_are_refused(changes, named):
    sizes = HotSizes(**{"max_requests": 1, "max_tokens": 4, "max_context": 8, **changes})
    with raises_naming(UsageError, *named):
        sizes.check(layers(5))
    with raises_naming(UsageError, "layer 1"):
        replace(sizes, buffer_size=20).check([layers(5)[0], replace(layers(5)[1], indexer=None)])


def test_compressed_layers_read_rows_of_a_window_and_entries_that_an_index_selects():
    """Entries of layers that read all of them stay on the device. The window sets the size of its buffer; the
    configured size does not apply."""
    window, ratio, sizes = 6, 4, HotSizes(1, 4, 8, 5)
    sliding = replace(layers(5)[0], indexer=None, sliding_window=window)
    heavy = replace(sliding, layer_id=1, compressed=CompressedDims(8))
    chosen = replace(layers(5)[1], layer_id=2, sliding_window=window, compressed=CompressedDims(ratio, overlap=True))
    rows, entries = rows_and_entries([sliding, heavy, chosen], sizes)
    assert (len(rows.layers), rows.sizes.buffer_size, rows.sizes.window, rows.sizes.ratio) == (3, window, window, 1)
    assert (entries.layers, entries.sizes, entries.rows_per_page(16)) == ((chosen,), replace(sizes, ratio=ratio), 4)
    for group in (rows, entries):
        group.sizes.check(group.layers)
    with raises_naming(UsageError, "device_buffer_size", 4, 5):
        replace(entries.sizes, buffer_size=4).check(entries.layers)
    assert rows_and_entries([sliding, heavy], sizes)[1] is None
    assert rows_and_entries(layers(5), sizes) == (HotLayers(tuple(layers(5)), sizes), None)
    with raises_naming(UsageError, 4, 8):
        rows_and_entries([chosen, replace(chosen, layer_id=3, compressed=CompressedDims(8))], sizes)


def test_entries_are_loaded_by_a_coordinator_that_has_them():
    trace = Trace(topk=2, buffer_size=2)
    with raises_naming(BackendError, "layer 0", "entries"):
        none = torch.zeros(0, dtype=torch.int32)
        trace.hisparse.load_entries(0, torch.zeros(0, DIM), none, SelectedPositions(none), SimpleNamespace())
    host = HostRows(2, num_pages=6, page_size=4, row_nbytes=3, device="cpu", ratio=2)
    assert host.cells.shape == (2, 12, 3)
    host.cells.copy_(torch.arange(host.cells.numel(), dtype=torch.uint8).view_as(host.cells))
    before = host.cells.clone()
    host.copy_pages([PageCopy(1, 4)])
    assert torch.equal(host.cells[:, 8:10], before[:, 2:4]) and torch.equal(host.cells[:, :8], before[:, :8])
    with raises_naming(PoolError, "entries"):
        host.move_rows(torch.tensor([0]), torch.tensor([1]))


def test_a_backend_has_to_claim_it():
    """D3: one that serves sparse layers, and reads rows on the device by the page table."""
    problem = Problem(ModelSpec("m", "test", tuple(layers(5)), 64), "cpu", coordinator="hisparse")
    spec = next(each for each in attnplug_backends() if each.name == "torch_sparse")
    assert list(spec.refusals(problem, Role.DECODE)) == []
    without = replace(spec, capabilities=replace(spec.capabilities, coordinators=frozenset()))
    (reason,) = without.refusals(problem, Role.DECODE)
    assert (reason.code, reason.value, reason.setting) == ("feature", "hisparse", "enable_hisparse")
    assert list(without.refusals(replace(problem, coordinator=None), Role.DECODE)) == []
    dense = replace(spec.capabilities, features=frozenset())
    assert any("coordinators hisparse" in problem for problem in dense.contradictions())
    with raises_naming(UsageError, "layer 1", "m", "mla"):
        Problem(ModelSpec("m", "test", (layers(5)[0], replace(layers(5)[1], indexer=None)), 64), coordinator="hisparse")


def test_rows_of_hot_buffers_are_found_by_no_slot_of_the_page_table():
    """So a model's kernels store no rows there by themselves."""
    sizes = HotSizes(max_requests=3, max_tokens=8, max_context=64, buffer_size=5)
    pool = HotPool(layers(5), sizes, num_pages=10, page_size=PAGE, dtype=DType.FLOAT32, device="cpu")
    assert pool.by_slot(0) is None
    assert pool.nbytes == pool.cells.numel()
