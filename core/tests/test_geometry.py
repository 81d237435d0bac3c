"""Geometry: positions of a batch's cache rows, against their definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import ForwardMode, Geometry, PlanError
from attnplug.contract.geometry import _device_slots, _host_slots
from attnplug.host import HostLengths
from attnplug.kernels import to_device
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming


def expected(table: torch.Tensor, lens: Sequence[int], page_size: int) -> list[list[int]]:
    """Slots by their definition: one division for each row."""
    return [
        [
            int(pages[position // page_size]) * page_size + position % page_size
            for position in (min(place, length - 1) for place in range(max(lens)))
        ]
        for pages, length in zip(table, lens, strict=True)
    ]


@pytest.mark.parametrize("slots", [_host_slots, _device_slots])
@settings(max_examples=16, deadline=None)
@given(page_size=st.integers(1, 9), lens=st.lists(st.integers(1, 30), min_size=1, max_size=6), spare=st.integers(0, 2))
def test_slots_of_whole_requests(
    slots: Callable[..., torch.Tensor], page_size: int, lens: list[int], spare: int
) -> None:
    """A shorter request repeats its last slot. Table entries behind its last page are not used."""
    width = -(-max(lens) // page_size) + spare
    table = torch.randperm(len(lens) * width, dtype=torch.int32).view(len(lens), width)
    for row, length in zip(table, lens, strict=True):
        row[-(-length // page_size) :] = -1
    found = slots(table, lens, page_size)
    assert found.dtype == torch.int64 and found.is_contiguous()
    assert found.tolist() == expected(table, lens, page_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("requests", [[0, 1, 2], range(3), [2, 0, 1], [2, 0], [1]])
def test_slots_of_some_requests(device: str, requests: Sequence[int]) -> None:
    table = torch.tensor([[4, 1, -1], [0, -1, -1], [5, 2, 3]], dtype=torch.int32)
    geometry = Geometry.of_lengths(ForwardMode.DECODE, table.to(device), [1, 1, 1], [6, 2, 9], 4)
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


class TestNewSlots:
    """Slot mapping of new rows: given by the host, or from the page table, with or without lengths on the host."""

    @pytest.mark.parametrize("device", DEVICES)
    @settings(max_examples=16, deadline=None)
    @given(
        lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=6),
        page_size=st.sampled_from([1, 3, 8]),
        padding=st.integers(0, 3),
    )
    def test_the_device_finds_what_the_host_does(self, device, lengths, page_size, padding):
        """Rows that only the host's upper bound includes get -1."""
        new, totals = [n for _, n in lengths], [before + n for before, n in lengths]
        width = -(-max(totals) // page_size) + 1
        table = torch.randperm(len(lengths) * width, dtype=torch.int32).view(len(lengths), width).to(device)
        known = Geometry.of_lengths(ForwardMode.EXTEND, table, new, totals, page_size)
        unknown = replace(
            known,
            host=None,
            rows=sum(new) + padding,
            new_lens=torch.tensor(new, dtype=torch.int32, device=device),
            max_seq_len=width * page_size,
        )
        assert unknown.new_slots().tolist() == known.new_slots().tolist() + [-1] * padding

    def test_a_padded_request_has_no_slots(self):
        """A request of length 0 gets slots of -1, although it has rows in a uniform batch."""
        table = torch.tensor([[7, 5], [9, 9]], dtype=torch.int32)
        lens = torch.tensor([5, 0], dtype=torch.int32)
        made = Geometry(ForwardMode.TARGET_VERIFY, table, lens, 4, rows=4, max_seq_len=8, max_new=2)
        assert made.new_slots().tolist() == [7 * 4 + 3, 5 * 4, -1, -1]

    def test_a_length_past_the_page_table_has_no_slots(self):
        """The device alone knows it; a table is never read past its end."""
        table, lens = torch.tensor([[7, 5]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
        made = Geometry(ForwardMode.TARGET_VERIFY, table, lens, 4, rows=2, max_seq_len=8, max_new=2)
        assert made.new_slots().tolist() == [5 * 4 + 3, -1]

    def test_rows_of_no_request_have_no_slots(self):
        """An idle rank that is padded to the others' rows."""
        table, none = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        made = Geometry(ForwardMode.IDLE, table, none, 4, rows=2, max_seq_len=0, max_new=1, new_lens=none)
        assert made.new_slots().tolist() == [-1, -1]

    def test_slots_of_spans_are_those_of_their_requests(self):
        table = torch.tensor([[4, 1], [0, 3], [5, 2]], dtype=torch.int32)
        made = Geometry.of_lengths(ForwardMode.DECODE, table, [1, 1, 1], [6, 2, 8], 4)
        assert made.span_slots([2, 0], [3, 1], [2, 1]).tolist() == [5 * 4 + 3, 2 * 4, 4 * 4 + 1]

    def test_a_host_that_owns_the_slots_says_them(self):
        table, slots = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([5, -1])
        made = Geometry.of_lengths(ForwardMode.DECODE, table, [1, 1], [6, 2], 4, slots=slots)
        assert made.new_slots() is slots


class TestLengths:
    def test_exact_lengths_can_be_fetched_from_the_device(self):
        table = torch.zeros(2, 3, dtype=torch.int32)
        known = Geometry.of_lengths(ForwardMode.EXTEND, table, [2, 1], [6, 2], 4)
        unknown = replace(known, host=None, rows=7, max_seq_len=12)
        assert unknown.kv_rows is None and unknown.with_host_lengths().kv_rows == 8
        assert (unknown.with_host_lengths().rows, unknown.with_host_lengths().query_lens) == (3, [2, 1])
        assert known.with_host_lengths() is known

    @pytest.mark.parametrize("name", ["query_lens", "kv_lens"])
    def test_exact_lengths_that_the_host_does_not_have_are_refused_with_the_remedy(self, name):
        table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([6, 2], dtype=torch.int32)
        bounds = Geometry(ForwardMode.DECODE, table, lens, 4, rows=2, max_seq_len=12, max_new=1)
        with raises_naming(PlanError, "exact", "needs_cpu_seq_lens"):
            getattr(bounds, name)

    def test_exact_lengths_leave_the_hosts_slots_of_exact_rows(self):
        table, slots = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([8, 9, 5, -1])
        known = Geometry.of_lengths(ForwardMode.EXTEND, table, [2, 1], [6, 2], 4)
        unknown = replace(known, host=None, rows=4, slots=slots)
        assert unknown.with_host_lengths().new_slots().tolist() == [8, 9, 5]

    def test_what_a_host_gives_beside_its_lengths_is_kept(self):
        """This includes memory that a graph reads: a copy of the lengths would not follow later changes."""
        lens = torch.tensor([6, 2], dtype=torch.int32)
        given = {"seq_lens": lens, "state_slots": torch.tensor([3, 4]), "lane": 1, "captured": True}
        table = torch.zeros(2, 3, dtype=torch.int32)
        made = Geometry.of_lengths(ForwardMode.DECODE, table, [1, 1], [6, 2], 4, **given)
        assert all(getattr(made, name) is value for name, value in given.items())

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"host": HostLengths([3, 1], [2, 2])}, ["request 0", 3, 2]),
            ({"host": HostLengths([2, -1], [6, 2])}, ["request 1", -1]),
            ({"host": HostLengths([2], [6])}, ["2 requests", 1]),
            ({"host": HostLengths([2, 2], [6, 2])}, ["3 rows", 4]),
            ({"max_seq_len": 5}, [6, 2, "5 and 2"]),
            ({"max_new": 1}, [6, 2, "6 and 1"]),
            ({"max_seq_len": 13}, [13, "3 pages of 4", 12]),
            ({"new_lens": None, "max_new": 2}, [2, "2 requests", "3 rows"]),
            ({"slots": torch.zeros(2)}, ["slots", "3 rows"]),
            ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, [3, 2, "page table"]),
            ({"seq_lens": torch.zeros(2, 1, dtype=torch.int32)}, ["seq_lens", (2, 1), "[requests, pages]"]),
            ({"page_table": torch.zeros(2, dtype=torch.int32)}, ["page_table", (2,)]),
            ({"seq_lens": torch.tensor([6, 2])}, ["seq_lens", "torch.int64", "torch.int32"]),
            ({"new_lens": torch.zeros(3, dtype=torch.int32)}, ["new_lens", "2 requests"]),
            ({"lane": -1}, ["lane=-1"]),
            ({"step": -1}, ["step=-1"]),
            ({"slots": torch.zeros(4)}, ["slots", "3 rows"]),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, wrong, named):
        table = torch.zeros(2, 3, dtype=torch.int32)
        known = Geometry.of_lengths(ForwardMode.EXTEND, table, [2, 1], [6, 2], 4)
        with raises_naming(PlanError, *named):
            replace(known, **wrong)

    @pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 1), (ForwardMode.TARGET_VERIFY, 3)])
    def test_padded_requests_at_the_end_have_no_exact_lengths(self, mode, new):
        """A host that pads its decode batches makes such requests: the others are as uniform as before."""
        table, slots = torch.zeros(4, 3, dtype=torch.int32), torch.arange(4 * new)
        lens = torch.tensor([6, 4, 0, 0], dtype=torch.int32)
        made = Geometry(mode, table, lens, 4, rows=4 * new, max_seq_len=12, max_new=new, slots=slots, state_slots=lens)
        found = made.with_host_lengths()
        assert (found.requests, found.rows, found.new_lens) == (2, 2 * new, None)
        assert (found.query_lens, found.kv_lens) == ([new, new], [6, 4])
        assert found.slots.tolist() == list(range(2 * new)) and found.state_slots.tolist() == [6, 4]
        assert replace(made, seq_lens=torch.zeros_like(lens)).with_host_lengths().requests == 0
        with raises_naming(PlanError, "request 1"):
            replace(made, seq_lens=lens.flip(0).roll(1)).with_host_lengths()

    def test_some_requests_of_a_batch(self):
        table = torch.arange(9, dtype=torch.int32).view(3, 3)
        given = {"slots": torch.arange(10, 15), "state_slots": torch.tensor([7, 8, 9]), "lane": 1, "captured": True}
        given["table_rows"] = torch.tensor([4, 5, 6])
        whole = Geometry.of_lengths(ForwardMode.EXTEND, table, [1, 1, 3], [6, 2, 9], 4, **given)
        some = whole.only([0, 2])
        assert (some.rows, some.query_lens, some.kv_lens) == (4, [1, 3], [6, 9])
        assert some.slots.tolist() == [10, 12, 13, 14] and some.state_slots.tolist() == [7, 9]
        assert some.table_rows.tolist() == [4, 6]
        assert some.page_table.tolist() == [[0, 1, 2], [6, 7, 8]] and some.seq_lens.tolist() == [6, 9]
        assert (some.lane, some.captured) == (1, True)
