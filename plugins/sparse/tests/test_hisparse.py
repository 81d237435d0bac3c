"""HiSparse: random traces compared with a pool that holds all rows, on a CPU and by kernels (A10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import DType, ForwardMode, PoolError, UsageError
from attnplug.kernels import PageCopy
from attnplug.sparse import CompressedDims
from attnplug_sparse.hisparse import HostRows, HostSlots, HotLayers, HotPool, HotSizes, rows_and_entries
from attnplug_sparse.hisparse.tables import HotTables
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import HotStage, sparse
from hisparse_trace import DIM, LAYERS, PAGE, Trace, layers

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]


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
    """A10: also a layer that shares another one's selection. It has separate hot buffers."""
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


def test_rows_of_hot_buffers_are_found_by_no_slot_of_the_page_table():
    """Therefore a model's kernels cannot store rows there themselves."""
    sizes = HotSizes(max_requests=3, max_tokens=8, max_context=64, buffer_size=5)
    pool = HotPool(layers(5), sizes, num_pages=10, page_size=PAGE, dtype=DType.FLOAT32, device="cpu")
    assert pool.by_slot(0) is None
    assert pool.nbytes == pool.cells.numel()


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
