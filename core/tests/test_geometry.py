"""Geometry: where the cache rows of a batch lie, against the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import ForwardMode, Geometry, to_device
from attnplug.contract.geometry import _device_slots, _host_slots
from support.devices import DEVICES


def expected(table: torch.Tensor, lens: Sequence[int], page_size: int) -> list[list[int]]:
    """One division for every row, as the definition has it."""
    return [
        [
            int(pages[position // page_size]) * page_size + position % page_size
            for position in (min(place, length - 1) for place in range(max(lens)))
        ]
        for pages, length in zip(table, lens, strict=True)
    ]


@pytest.mark.parametrize("slots", [_host_slots, _device_slots])
@settings(max_examples=60, deadline=None)
@given(page_size=st.integers(1, 9), lens=st.lists(st.integers(1, 30), min_size=1, max_size=6), spare=st.integers(0, 2))
def test_slots_of_whole_requests(
    slots: Callable[..., torch.Tensor], page_size: int, lens: list[int], spare: int
) -> None:
    """A shorter request repeats its own last slot, whatever its table holds behind its last page."""
    width = -(-max(lens) // page_size) + spare
    table = torch.randperm(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    for row, length in zip(table, lens, strict=True):
        row[-(-length // page_size) :] = -1
    found = slots(table, lens, page_size)
    assert found.dtype == torch.int64 and found.is_contiguous()
    assert found.tolist() == expected(table, lens, page_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", [[0, 1, 2], range(3), [2, 0], [1]])
def test_slots_of_some_requests(device: str, requests: Sequence[int]) -> None:
    table = torch.tensor([[4, 1, -1], [0, -1, -1], [5, 2, 3]], dtype=torch.int32)
    geometry = Geometry(ForwardMode.DECODE, [1, 1, 1], [6, 2, 9], table.to(device), 4)
    lens = [geometry.kv_lens[request] for request in requests]
    found = geometry.cache_slots(requests)
    assert found.device == geometry.page_table.device
    assert found.tolist() == expected(table[list(requests)], lens, 4)


@pytest.mark.parametrize("slots", [_host_slots, _device_slots])
def test_a_request_without_rows_has_no_slots(slots: Callable[..., torch.Tensor]) -> None:
    assert slots(torch.tensor([[-1, -1]], dtype=torch.int32), [0], 4).shape == (1, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_on_a_device_are_a_copy(device: str) -> None:
    numbers = to_device([3, 1], torch.device(device)).cpu().numpy()
    copied = to_device(numbers, torch.device(device))
    numbers[0] = 7
    assert (copied.tolist(), copied.dtype, copied.device.type) == ([3, 1], torch.int64, device)
