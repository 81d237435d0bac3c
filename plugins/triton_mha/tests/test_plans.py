"""The schedule: every cache row of every tile is in one part, for all lengths and within the reserved memory."""

from __future__ import annotations

import random

import pytest
import torch

from attnplug import ForwardMode, Geometry
from attnplug_testing.batches import geometry
from attnplug_testing.devices import INTERPRETED
from attnplug_triton_mha.configurations import MHAKernelConfig
from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape

pytestmark = INTERPRETED
PAGE = 16


def schedule(
    batch: Geometry, window: int = 0, group: int = 3, programs: int = 2
) -> tuple[SplitKVSchedule, torch.Tensor]:
    cut = MHAKernelConfig(16, 16, 4, 2, programs=programs, separate_merge=True, overlap=False)
    made = SplitKVSchedule.reserve(TritonLayerShape(2, group, 32, 32, window), cut, batch, multiprocessors=3)
    slots = torch.full((batch.rows,), -7)
    made.fill(batch, slots)
    return made, slots


def a_batch(mode: ForwardMode, new: list[int], totals: list[int], exact: bool = True) -> Geometry:
    width = max(-(-total // PAGE) for total in totals) + 1
    table = torch.randperm(len(new) * width).view(len(new), width).int()
    return geometry(mode, table, new, totals, PAGE, exact=exact)


def check(made: SplitKVSchedule, batch: Geometry, new: list[int], totals: list[int]) -> None:
    """Each tile of each request is divided into parts that follow each other, from what its first query sees to what
    its last one does; and parts that are merged have places of their own, which the merging kernel finds."""
    tile, step, group, window = 16, 16, made.layers.group, made.layers.window
    found: dict[tuple[int, int], list[list[int]]] = {}
    for record in made.records.tolist():
        if record[1]:
            found.setdefault((record[0], record[5]), []).append(record)
    wanted = {(request, t) for request, n in enumerate(new) for t in range(-(-n * group // tile))}
    assert set(found) == wanted
    places: list[int] = []
    for (request, number), parts in found.items():
        parts.sort(key=lambda record: record[8])
        assert [record[8] for record in parts] == list(range(len(parts)))
        prefix, total = totals[request] - new[request], totals[request]
        for record in parts:
            assert record[1:5] == [new[request], sum(new[:request]), prefix, total]
            assert record[9] == len(parts) and record[6] % step == 0
        last = min((number * tile + tile - 1) // group, new[request] - 1)
        end = min(prefix + last + 1, total)
        first = max(prefix + number * tile // group - window + 1, 0) // step * step if window else 0
        rows = [row for record in parts for row in range(record[6], record[7])]
        assert rows == list(range(first, end))
        for record in parts:
            if record[6] < record[7]:
                assert record[11] == batch.page_table[request, record[6] // PAGE]
        if len(parts) > 1:
            places += [parts[0][10] + part for part in range(len(parts))]
        if made.separate_merge is not None:
            tiles_of_each = -(-made.queries * group // tile)
            assert made.separate_merge.tiles[request * tiles_of_each + number].tolist() == parts[0][9:11]
    assert len(set(places)) == len(places)
    assert max(places, default=0) < made.partial_rows // tile


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("programs", [1, 7])
@pytest.mark.sample(1)
def test_batches_of_equal_rows(window, programs):
    for seed, queries in ((0, 1), (1, 4), (2, 11)):
        chance = random.Random(seed)
        totals = [queries + chance.choice([0, 1, 16, chance.randint(0, 300)]) for _ in range(4)]
        new = [queries] * 4
        batch = a_batch(ForwardMode.TARGET_VERIFY, new, totals)
        made, slots = schedule(batch, window, programs=programs)
        assert made.separate_merge is not None and len(made.separate_merge.tiles) == 4 * -(-3 * queries // 16)
        check(made, batch, new, totals)
        assert torch.equal(slots, batch.new_slots())


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.sample(1)
def test_batches_of_different_rows(window, exact):
    new, totals = [1, 37, 0, 20, 5], [150, 37, 9, 60, 5]
    batch = a_batch(ForwardMode.EXTEND, new, totals, exact)
    made, slots = schedule(batch, window)
    check(made, batch, new, totals)
    assert torch.equal(slots, batch.new_slots())


def test_rows_that_are_padding_have_no_slot():
    """Without host lengths the rows are an upper bound."""
    table, lens = torch.arange(8).view(2, 4).int(), torch.tensor([20, 0], dtype=torch.int32)
    new = torch.tensor([3, 0], dtype=torch.int32)
    batch = Geometry(ForwardMode.EXTEND, table, lens, PAGE, rows=9, max_seq_len=64, max_new=9, new_lens=new)
    _, slots = schedule(batch)
    assert slots.tolist() == [17, 18, 19, *[-1] * 6]


def test_padded_requests_of_a_captured_batch_write_zeros_and_no_row():
    """Length 0: a program for the output, no cache row, no slot."""
    table, lens = torch.full((2, 4), 1 << 30, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    batch = Geometry(ForwardMode.DECODE, table, lens, PAGE, rows=2, max_seq_len=64, max_new=1, captured=True)
    made, slots = schedule(batch)
    assert slots.tolist() == [-1, -1]
    live = [record for record in made.records.tolist() if record[1]]
    assert [(record[0], record[9]) for record in live] == [(0, 1), (1, 1)]
    assert all(record[7] <= record[6] for record in live)


def test_a_length_beyond_the_page_table_touches_nothing_outside():
    """Lengths on the device are not checked, so planning clamps them to the page table."""
    table, lens = torch.arange(4).view(1, 4).int(), torch.tensor([1000], dtype=torch.int32)
    batch = Geometry(ForwardMode.DECODE, table, lens, PAGE, rows=1, max_seq_len=64, max_new=1)
    made, slots = schedule(batch)
    assert slots.tolist() == [-1]
    assert max(record[7] for record in made.records.tolist() if record[1]) == 64


def test_work_decides_the_number_of_parts_and_not_the_width_of_the_table():
    """A captured table has room for the longest request; short ones are still divided among all programs."""
    parts = []
    for width in (8, 4096):
        table, lens = torch.zeros(1, width, dtype=torch.int32), torch.tensor([96], dtype=torch.int32)
        batch = Geometry(ForwardMode.DECODE, table, lens, PAGE, rows=1, max_seq_len=width * PAGE, max_new=1)
        parts.append(int(schedule(batch)[0].records[0, 9]))
    assert parts == [3, 3], "as many as there are programs for a KV head"
