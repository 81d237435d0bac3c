"""The schedule: every step of every tile is run exactly once, and new rows go to their slots."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from attnplug_sparse.index.triton_schedule import begin_stretch, next_tile, rows_of_part
from attnplug_sparse.index.triton_splits import splits_before
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_triton_mla.configurations import MLAKernelConfig
from attnplug_triton_mla.planner import BatchShape, MLASchedule
from attnplug_triton_mla.triton_merge import parts_of_tile, slot_of_part, slot_of_split

NOWHERE = 1 << 30
HEADER, RECORD, PROGRAM = 8, 8, 16
HEADS = 11


def made(lens, new, *, queries=0, heads=4, page_size=16, cut, sms=6, device="cpu", padding=0):
    """A schedule, the page table it was made from, and the batch's rows without padding."""
    requests, width = len(lens), -(-max([*lens, 1]) // page_size) + 2
    table = torch.randperm(requests * width).view(requests, width).int()
    for request, length in enumerate(lens):
        table[request, -(-length // page_size) :] = NOWHERE
    shape = BatchShape(requests, sum(new) + padding, queries, heads, page_size, width)
    schedule = MLASchedule.reserve(shape, cut, sms, torch.device(device), 1 << 20)
    seq_lens, new_lens = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (lens, new))
    on_device = table.to(device)
    schedule.fill(on_device, seq_lens, None if queries else new_lens)
    with nothing_waits(device):
        schedule.fill(on_device, seq_lens, None if queries else new_lens)
    return schedule, table


def batch_of(seed: int) -> tuple[list[int], list[int]]:
    chance = random.Random(seed)
    lens = [chance.choice([0, 1, 16, 17, chance.randint(1, 700)]) for _ in range(chance.randint(1, 9))]
    return lens, [min(length, chance.choice([0, 1, 1, 5, 30])) for length in lens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.sample(4)
def test_new_rows_are_the_last_of_their_request(page_size, uniform, device):
    """Reference by a loop; -1 for rows in front of the first, and for rows of no request."""
    lens = [0, 1, 3, 16, 47, 48, 300]
    new = [3] * 7 if uniform else [0, 1, 3, 2, 40, 0, 150]
    padding = 0 if uniform else 140
    given = {"queries": 3 if uniform else 0, "page_size": page_size, "padding": padding, "device": device}
    schedule, table = made(lens, new, cut=MLAKernelConfig(16, 16, 4, 2), **given)
    wanted = []
    for request, (length, count) in enumerate(zip(lens, new, strict=True)):
        for position in range(length - count, length):
            page = int(table[request, position // page_size]) if position >= 0 else 0
            wanted.append(page * page_size + position % page_size if position >= 0 else -1)
    assert schedule.slots.tolist() == wanted + [-1] * padding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("seed", "cut"),
    [
        (0, MLAKernelConfig(16, 16, 4, 2)),
        (1, MLAKernelConfig(16, 16, 4, 2)),
        (0, MLAKernelConfig(32, 32, 4, 2, programs=2)),
        (1, MLAKernelConfig(16, 16, 4, 2, start_steps=0)),
        (0, MLAKernelConfig(16, 16, 4, 2, start_steps=5, least_steps=7)),
        (1, MLAKernelConfig(16, 16, 4, 2, part_cost=3.0)),
    ],
    ids=["plain", "plain too", "two programs", "no start", "least steps", "part cost"],
)
@pytest.mark.sample(4)
def test_the_line_of_work_is_divided_evenly(seed, cut, device):
    """Stretches have one length, at least the requested minimum, in the order of requests. Each request's record holds
    its position."""
    lens, new = batch_of(seed)
    schedule, _ = made(lens, new, cut=cut, device=device)
    stretch, total, lead, *_ = numbers = schedule.numbers.tolist()
    tiles = [-(-count * 4 // cut.tile) for count in new]
    steps = [max(-(-length // cut.step), 1) for length in lens]
    of_work = [each for each, count in zip(steps, tiles, strict=True) if count]
    longest, shortest = max(of_work, default=0), min(of_work, default=0)
    assert lead == (cut.start_steps if longest > 4 * shortest else 0)
    work = [count * (lead + each) for count, each in zip(tiles, steps, strict=True)]
    ends = [sum(work[: request + 1]) for request in range(len(lens))]
    assert total == sum(work)
    worth = math.ceil(math.sqrt(longest * cut.part_cost))
    assert stretch == max(-(-total // schedule.programs), cut.least_steps, worth, 1)
    for request, (length, count) in enumerate(zip(lens, new, strict=True)):
        record = numbers[HEADER + RECORD * request :][:7]
        assert record == [ends[request], length, length - count, sum(new[:request]), count, -1, steps[request]]
    begins = numbers[HEADER + RECORD * len(lens) + 7 :: PROGRAM]
    for program, request in enumerate(begins):
        if program * stretch < total:
            assert ends[request] > program * stretch >= ends[request] - work[request]


@triton.jit
def _walk(
    visits, numbers, requests, programs, partial_slots, page_table, table_row, HEADS: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr, GROWS: tl.constexpr,
):  # fmt: skip
    """Loop of an attention kernel's program that records the values at every place where it begins."""
    (
        at, stop, stretch, lead, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile,
        first_page,
    ) = begin_stretch(numbers, requests)  # fmt: skip
    start = at
    while at < stop:
        taken, first_token, end_token = rows_of_part(
            at, stop, kv_len, prefix, new, units, tile_start, tile, HEADS, TILE, STEP, SPLIT, GROWS
        )
        if SPLIT > 0:
            first = stored_at + tile * splits_before(units * STEP, SPLIT, GROWS)
            place = splits_before(first_token, SPLIT, GROWS)
            slot = slot_of_split(at, taken, stop, start, tile_start, place, first, partial_slots, programs)
            parts, others = place, start
        else:
            parts, first, others = parts_of_tile(tile_start, units, stretch, programs)
            slot = slot_of_part(at, tile_start, programs)
        visit = visits + at * 11
        tl.store(visit + 1, request)
        tl.store(visit + 2, tile)
        tl.store(visit + 3, first_token)
        tl.store(visit + 4, end_token)
        tl.store(visit + 5, taken)
        tl.store(visit + 6, parts)
        tl.store(visit + 7, slot)
        tl.store(visit + 8, first)
        tl.store(visit + 9, others)
        tl.store(visit + 10, first_page)
        tl.atomic_add(visit, 1)
        at += taken
        if at < stop:
            at, end, kv_len, prefix, begin, new, stored_at, units, request, tile_start, tile, first_page = next_tile(
                at, end, kv_len, prefix, begin, new, stored_at, units, request, numbers, lead,
                page_table, table_row, 1, HEADS, TILE, STEP, PAGE_SIZE,
            )  # fmt: skip


def walked(seed: int, queries: int, device: str, **changes):
    """The places where programs begin, by (request, tile); with the schedule, its page table, lengths and new rows."""
    chance = random.Random(seed)
    lens, new = batch_of(seed)
    if queries:
        new = [queries] * len(lens)
    cut = MLAKernelConfig(
        chance.choice([16, 32, 64]), 16, 4, 2, programs=chance.choice([1, 2, 4]), start_steps=chance.choice([0, 2, 9]),
        least_steps=chance.choice([1, 3]), part_cost=chance.choice([0.0, 0.5]), **changes,
    )  # fmt: skip
    schedule, table = made(lens, new, queries=queries, heads=HEADS, page_size=16, cut=cut, sms=3, device=device)
    visits = torch.zeros(int(schedule.numbers[1]) + 1, 11, dtype=torch.int32, device=device)
    on_device = table.to(device)
    _walk[(schedule.programs,)](
        visits, schedule.numbers, len(lens), schedule.programs, schedule.partial_slots, on_device, table.shape[1],
        HEADS=HEADS, TILE=cut.tile, STEP=cut.step, PAGE_SIZE=16, SPLIT=cut.split, GROWS=cut.grows,
    )  # fmt: skip
    taken_by: dict[tuple[int, int], list[list[int]]] = {}
    for times, request, tile, *visit in visits.tolist():
        assert times in (0, 1)
        if times:
            taken_by.setdefault((request, tile), []).append(visit)
    tiles = [(request, tile) for request, count in enumerate(new) for tile in range(-(-count * HEADS // cut.tile))]
    assert sorted(taken_by) == tiles
    return taken_by, schedule, table, lens, new


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("seed", "queries"), [(0, 0), (0, 3), (1, 3), (1, 0), (2, 0), (2, 3), (3, 3)])
@pytest.mark.sample(4)
def test_every_step_of_every_tile_is_taken_once(seed, queries, device):
    """Its rows end with those that the tile sees; the merge finds as many parts as it looks for."""
    taken_by, schedule, table, lens, new = walked(seed, queries, device)
    numbers, cut, places = schedule.numbers.tolist(), schedule.configuration, []
    for (request, tile), parts in taken_by.items():
        units = numbers[HEADER + RECORD * request + 6]
        last_query = min((tile * cut.tile + cut.tile - 1) // HEADS, new[request] - 1)
        seen = min(lens[request] - new[request] + last_query + 1, lens[request])
        at = 0
        for number, (token, end_token, taken, count, slot, first, others, page) in enumerate(parts):
            assert (token, count) == (at * cut.step, len(parts))
            assert end_token == min((at + taken) * cut.step, seen)
            assert (taken == units) == (count == 1)  # by this an attention kernel knows that no merge follows
            assert slot == (first if number == 0 else others + number)
            assert page == (int(table[request, token // 16]) if token < lens[request] else 0)
            places += [slot] if count > 1 else []
            at += taken
        assert at == units
    assert len(set(places)) == len(places)
    assert max(places, default=0) < schedule.partial_slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("seed", "queries", "grows"), [(0, 3, True), (1, 0, True), (2, 3, False), (3, 1, True)])
@pytest.mark.sample(2)
def test_every_split_is_computed_once_at_its_position(seed, queries, grows, device):
    """In every batch, splits begin at the same rows, and no two partial results share memory."""
    taken_by, schedule, _, _, _ = walked(seed, queries, device, split=16, grows=grows)
    numbers, cut, slots = schedule.numbers.tolist(), schedule.configuration, set()
    lengths = [1] * 16 + [2] * 16 + [4] * 9 if grows else [1] * 99
    for (request, _), splits in taken_by.items():
        stored_at, units = numbers[HEADER + RECORD * request :][5:7]
        at = 0
        for number, (token, _, taken, place, slot, first, start, _) in enumerate(splits):
            assert (token, place) == (at * cut.step, number)
            assert taken == min(lengths[number], units - at)
            at += taken
            if slot < schedule.partial_slots - schedule.programs and not (start == splits[0][6] and at == units):
                assert stored_at >= 0 and slot not in slots and slot in (first, first + number)
                slots.add(slot)
        assert at == units
        if stored_at < 0:
            assert len({start for *_, start, _ in splits}) == 1, "a tile without memory is one program's"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_launched_early_does_not_follow_the_plan_at_once(overlap, device):
    """It reads the schedule before it waits, so another kernel, which sets the last number, separates them."""
    shape = BatchShape(1, 1, 1, 4, 16, 3)
    schedule = MLASchedule.reserve(shape, MLAKernelConfig(16, 16, 4, 2, overlap=overlap), 6, torch.device(device))
    schedule.numbers.fill_(-7)
    schedule.fill(torch.zeros(1, 3, dtype=torch.int32, device=device), torch.ones(1, device=device).int(), None)
    assert schedule.numbers[-1] == (0 if overlap else -7)


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_of_64_bits(device):
    """Some engines keep such lengths."""
    shape = BatchShape(2, 2, 1, 4, 16, 3)
    schedule = MLASchedule.reserve(shape, MLAKernelConfig(16, 16, 4, 2), 6, torch.device(device))
    table = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    schedule.fill(table, torch.tensor([17, 40], dtype=torch.int64, device=device), None)
    assert schedule.slots.tolist() == [16, 5 * 16 + 7]
