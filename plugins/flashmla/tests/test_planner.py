"""Pages, lengths and slots: planning tests, in torch on a CPU, and by the kernel: interpreted, or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from attnplug_flashmla.planner import DecodePages
from attnplug_flashmla.triton_kernels import launch_fill_pages
from attnplug_testing.devices import DEVICES, INTERPRETED, nothing_waits

NOWHERE = 1 << 30
UNTOUCHED = -7


def interpreted(pages: DecodePages, page_table: Tensor, seq_lens: Tensor, page_size: int) -> None:
    """Fill as ``DecodePages.fill`` does on a GPU."""
    launch_fill_pages(page_table, seq_lens, page_size, pages.queries, pages.kv_lens, pages.table, pages.slots)


in_every_way = pytest.mark.parametrize(
    ("fill", "device"),
    [
        pytest.param(DecodePages.fill, "cpu", id="cpu"),
        pytest.param(DecodePages.fill, "cuda", id="cuda", marks=DEVICES[1].marks),
        pytest.param(interpreted, "cpu", id="interpreted", marks=INTERPRETED),
    ],
)


@in_every_way
@pytest.mark.parametrize(
    ("page_size", "queries", "index"), [(64, 1, torch.int32), (128, 2, torch.int64), (320, 7, torch.int32)]
)
def test_planning_of_pages_and_slots_row_by_row(page_size, queries, index, fill, device):
    """Pages and slots equal those of a plain loop. Table entries behind a request's last page are out of range and not
    read. Spare memory of the plan is left alone."""
    chance = random.Random(page_size + queries)
    lens = [0, 1, queries, 63, 64, 65, page_size, 20000, *(chance.randint(1, 9000) for _ in range(9))]
    ratio, requests = page_size // 64, len(lens)
    width = -(-20000 // page_size) + 3
    table = torch.randperm(requests * width).view(requests, width).int()
    wanted = torch.full((requests + 2, width * ratio + 5), UNTOUCHED, dtype=torch.int32)
    wanted_slots = []
    for request, length in enumerate(lens):
        used = -(-length // page_size)
        for page in range(max(-(-length // 64), 1)):
            wanted[request, page] = int(table[request, page // ratio]) * ratio + page % ratio if length else 0
        for position in range(length - queries, length):
            page = int(table[request, max(position, 0) // page_size])
            wanted_slots.append(page * page_size + position % page_size if position >= 0 else -1)
        table[request, used:] = NOWHERE
    memory = DecodePages.reserve(requests + 2, (requests + 2) * queries, width * ratio + 5, torch.device(device))
    for part in (memory.kv_lens, memory.table, memory.slots):
        part.fill_(UNTOUCHED)
    pages = memory.part(requests, queries)
    on_device, seq_lens = table.to(device), torch.tensor(lens, dtype=index, device=device)
    fill(pages, on_device, seq_lens, page_size)
    with nothing_waits(device):
        fill(pages, on_device, seq_lens, page_size)
    assert pages.kv_lens.tolist() == lens
    assert pages.slots.tolist() == wanted_slots
    found = memory.table.cpu()
    for request, length in enumerate(lens):
        used = max(-(-length // 64), 1)
        assert torch.equal(found[request, :used], wanted[request, :used])
        assert found[request, width * ratio :].eq(UNTOUCHED).all()
    assert found[requests:].eq(UNTOUCHED).all()
    assert memory.slots[requests * queries :].eq(UNTOUCHED).all() and memory.kv_lens[requests:].eq(UNTOUCHED).all()


@in_every_way
def test_planning_of_more_rows_than_the_table_has_pages_stays_inside(fill, device):
    """The lengths of a captured batch are on the device, so the host cannot check them first."""
    table = torch.arange(6, dtype=torch.int32, device=device).view(3, 2)
    pages = DecodePages.reserve(3, 3, 2, torch.device(device)).part(3, 1)
    fill(pages, table, torch.tensor([4000, 129, 128], dtype=torch.int32, device=device), 64)
    assert pages.kv_lens.tolist() == [128, 128, 128]
    assert pages.table.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert pages.slots.tolist() == [-1, -1, 5 * 64 + 63]


@pytest.mark.parametrize("device", DEVICES)
def test_planning_takes_a_page_table_that_is_not_contiguous(device):
    table = torch.tensor([[5, 9], [1, 0], [7, 0]], dtype=torch.int32, device=device).T.contiguous().T
    pages = DecodePages.reserve(3, 3, 2, torch.device(device)).part(3, 1)
    pages.fill(table, torch.tensor([70, 64, 1], dtype=torch.int32, device=device), 64)
    assert pages.table[0].tolist() == [5, 9] and pages.table[1:, 0].tolist() == [1, 7]
    assert pages.slots.tolist() == [9 * 64 + 5, 64 + 63, 7 * 64]
