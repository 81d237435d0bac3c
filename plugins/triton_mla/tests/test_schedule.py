"""The schedule: every step of every tile is somebody's, once, and new rows go where they belong."""

from __future__ import annotations

import math
import random

import pytest
import torch

from attnplug_triton_mla.configurations import INVARIANT_PARTS, Configuration
from attnplug_triton_mla.planner import Schedule, Shape
from support.devices import DEVICES, nothing_waits

NOWHERE = 1 << 30
HEADER, RECORD, PROGRAM = 8, 8, 16


def made(lens, new, *, queries=0, heads=4, page_size=16, cut, sms=6, invariant=False, device="cpu", padding=0):
    """A schedule, the page table it was made from, and the batch's rows without padding."""
    requests, width = len(lens), -(-max([*lens, 1]) // page_size) + 2
    table = torch.randperm(requests * width).view(requests, width).int()
    for request, length in enumerate(lens):
        table[request, -(-length // page_size) :] = NOWHERE
    shape = Shape(requests, sum(new) + padding, queries, heads, page_size, width, invariant)
    schedule = Schedule.reserve(shape, cut, sms, torch.device(device))
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
def test_new_rows_are_the_last_of_their_request(page_size, uniform, device):
    """As a loop finds them; -1 for a row before the first, and for rows that no request has."""
    lens = [0, 1, 3, 16, 47, 48, 300]
    new = [3] * 7 if uniform else [0, 1, 3, 2, 40, 0, 150]
    padding = 0 if uniform else 140
    given = {"queries": 3 if uniform else 0, "page_size": page_size, "padding": padding, "device": device}
    schedule, table = made(lens, new, cut=Configuration(16, 16, 4, 2), **given)
    wanted = []
    for request, (length, count) in enumerate(zip(lens, new, strict=True)):
        for position in range(length - count, length):
            page = int(table[request, position // page_size]) if position >= 0 else 0
            wanted.append(page * page_size + position % page_size if position >= 0 else -1)
    assert schedule.slots.tolist() == wanted + [-1] * padding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cut",
    [
        Configuration(16, 16, 4, 2),
        Configuration(32, 32, 4, 2, programs=2),
        Configuration(16, 16, 4, 2, start_steps=0),
        Configuration(16, 16, 4, 2, start_steps=5, least_steps=7),
        Configuration(16, 16, 4, 2, part_cost=3.0),
    ],
    ids=["plain", "two programs", "no start", "least steps", "part cost"],
)
@pytest.mark.parametrize("seed", range(2))
def test_the_line_of_work_is_divided_evenly(seed, cut, device):
    """Stretches of one length, no shorter than asked, in the order of requests; a request's record says where it is."""
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
        assert record == [ends[request], length, length - count, sum(new[:request]), count, 1, steps[request]]
    begins = numbers[HEADER + RECORD * len(lens) + 7 :: PROGRAM]
    for program, request in enumerate(begins):
        if program * stretch < total:
            assert ends[request] > program * stretch >= ends[request] - work[request]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("others", [[], [3, 900, 64]])
def test_an_invariant_cut_depends_on_the_length_alone(others, device):
    """Parts of as many steps, at most so many, whatever else is there."""
    cut = Configuration(16, 16, 4, 2, least_steps=2)
    for length in (0, 33, 5000):
        lens = [*others, length]
        schedule, _ = made(lens, [1] * len(lens), queries=1, cut=cut, invariant=True, device=device)
        unit, units = schedule.numbers.tolist()[HEADER + RECORD * len(others) :][5:7]
        steps = max(-(-length // 16), 1)
        assert unit == max(-(-steps // INVARIANT_PARTS), 2)
        assert units == -(-steps // unit) <= INVARIANT_PARTS


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_of_64_bits(device):
    """As some engines keep them."""
    shape = Shape(2, 2, 1, 4, 16, 3, False)
    schedule = Schedule.reserve(shape, Configuration(16, 16, 4, 2), 6, torch.device(device))
    table = torch.arange(6, dtype=torch.int64, device=device).view(2, 3)
    schedule.fill(table, torch.tensor([17, 40], dtype=torch.int64, device=device), None)
    assert schedule.slots.tolist() == [16, 5 * 16 + 7]
