"""SlotTable: rows of pages that grow, fork, shrink and end, and never write to what another row reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnplug import PoolError
from attnplug.kernels import PageCopy
from attnplug_engine.scheduling.page_allocator import OutOfPages, PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import having, naming


def make_table(num_pages: int = 8, *, max_requests: int = 4, max_pages: int = 4) -> tuple[PageAllocator, SlotTable]:
    allocator = PageAllocator(num_pages)
    return allocator, SlotTable(allocator, page_size=4, max_requests=max_requests, max_pages=max_pages)


def snapshot(allocator: PageAllocator, table: SlotTable, *rows: int) -> object:
    counts = [allocator.references(page) for page in range(allocator.num_pages)]
    page_table, lengths = table.batch(rows, width=table.max_pages)
    return counts, page_table.tolist(), lengths.tolist(), [table.pages(row) for row in rows]


def test_a_new_row_is_empty() -> None:
    allocator, table = make_table()
    row = table.admit()
    assert (table.length(row), table.pages(row)) == (0, ())
    assert allocator.free_pages == 8


def test_a_row_takes_a_page_only_when_the_last_one_is_full() -> None:
    _, table = make_table()
    row = table.admit()
    held = []
    for _ in range(9):
        assert table.extend(row, 1) == ()
        held.append(len(table.pages(row)))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert table.length(row) == 9


def test_a_row_extended_by_nothing_stays_as_it_is() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 3)
    fork = table.admit(table.pages(row), 3)
    before = snapshot(allocator, table, row, fork)
    assert table.extend(fork, 0) == ()
    assert snapshot(allocator, table, row, fork) == before


def test_an_admitted_prefix_is_shared() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 8)
    other = table.admit(table.pages(row), 8)
    assert table.pages(other) == table.pages(row)
    assert [allocator.references(page) for page in table.pages(row)] == [2, 2]
    assert allocator.free_pages == 6


@pytest.mark.parametrize(("pages", "length"), [(0, 1), (1, 0), (1, 5), (2, 4), (2, 9), (0, -1)])
def test_a_prefix_must_have_exactly_the_pages_of_its_tokens(pages: int, length: int) -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 8)
    before = snapshot(allocator, table, row)
    with pytest.raises(PoolError, check=naming(pages, length)):
        table.admit(table.pages(row)[:pages], length)
    assert snapshot(allocator, table, row) == before


def test_a_prefix_of_free_pages_is_refused_and_takes_no_row() -> None:
    _, table = make_table(max_requests=1)
    with pytest.raises(PoolError, check=having(pages=(3,))):
        table.admit([3], 4)
    table.admit()


def test_a_prefix_longer_than_a_row_is_refused() -> None:
    allocator, table = make_table()
    pages = allocator.allocate(5)
    with pytest.raises(PoolError, check=naming(20, 5, 4)):
        table.admit(pages, 20)
    assert [allocator.references(page) for page in pages] == [1] * 5


def test_one_request_too_many_names_the_limit_and_the_option() -> None:
    _, table = make_table(max_requests=2)
    table.admit()
    table.admit()
    with pytest.raises(PoolError, check=having("request 3", 2, settings=("max_batch",))):
        table.admit()


def test_a_released_row_can_be_used_again() -> None:
    allocator, table = make_table(max_requests=1)
    row = table.admit()
    table.extend(row, 9)
    table.release(row)
    assert allocator.free_pages == 8
    again = table.admit()
    assert (table.length(again), table.pages(again)) == (0, ())
    assert table.batch([again], width=4)[0].tolist() == [[-1, -1, -1, -1]]


@pytest.mark.parametrize("lengths", [(1, 3), (4, 4, 4), (0, 5, 7), (3, 8, 11), ()])
def test_rows_extended_together_are_as_if_one_after_the_other(lengths: tuple[int, ...]) -> None:
    together, apart = make_table(16), make_table(16)
    for _, table in (together, apart):
        for length in lengths:
            table.extend(table.admit(), length)
    rows = list(range(len(lengths)))
    for _ in range(4):
        assert together[1].extend_each(rows) == ()
        for row in rows:
            apart[1].extend(row, 1)
        assert snapshot(*together, *rows) == snapshot(*apart, *rows)


def test_rows_extended_together_copy_the_pages_they_share() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 6)
    fork, other = table.admit(table.pages(row), 6), table.admit()
    shared = table.pages(row)[1]
    (copy,) = table.extend_each([other, fork, row])
    assert copy == PageCopy(shared, table.pages(fork)[1])
    assert table.pages(row)[1] == shared
    assert [table.length(each) for each in (row, fork, other)] == [7, 7, 1]
    assert [allocator.references(page) for page in (shared, copy.target)] == [1, 1]


def test_rows_that_cannot_all_be_extended_stay_as_they_are() -> None:
    allocator, table = make_table(num_pages=5, max_pages=2)
    rows = [table.admit() for _ in range(3)]
    for row, length in zip(rows, (4, 3, 4), strict=True):
        table.extend(row, length)
    taken = allocator.allocate(1)
    before = snapshot(allocator, table, *rows)
    with pytest.raises(OutOfPages) as caught:
        table.extend_each(rows)
    assert (caught.value.asked, caught.value.free) == (2, 1)
    assert snapshot(allocator, table, *rows) == before
    allocator.release(taken)
    table.extend(rows[2], 4)
    before = snapshot(allocator, table, *rows)
    with pytest.raises(PoolError, check=naming(9, 3, 2)):
        table.extend_each(rows)
    with pytest.raises(PoolError, check=naming("[0, 1, 0]")):
        table.extend_each([rows[0], rows[1], rows[0]])
    with pytest.raises(PoolError, check=naming("row 3")):
        table.extend_each([rows[0], 3])
    with pytest.raises(PoolError, check=naming("row -1")):
        table.extend_each([rows[0], -1])
    assert snapshot(allocator, table, *rows) == before


def test_a_partly_filled_shared_page_is_copied_before_it_grows() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 6)
    fork = table.admit(table.pages(row), 6)
    copies = table.extend(fork, 1)
    assert copies == (PageCopy(table.pages(row)[1], table.pages(fork)[1]),)
    assert table.pages(fork)[0] == table.pages(row)[0]
    assert table.pages(fork)[1] != table.pages(row)[1]
    assert allocator.references(table.pages(row)[1]) == 1


def test_the_row_that_shared_its_page_copies_it_too() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 6)
    fork = table.admit(table.pages(row), 6)
    (copy,) = table.extend(row, 1)
    assert copy.source == table.pages(fork)[1]
    assert table.extend(fork, 1) == ()


def test_a_full_shared_page_is_not_copied() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 4)
    fork = table.admit(table.pages(row), 4)
    assert table.extend(fork, 1) == ()
    assert table.pages(fork)[0] == table.pages(row)[0]


def test_a_truncated_row_copies_the_shared_page_it_ends_in() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 8)
    fork = table.admit(table.pages(row), 8)
    table.truncate(fork, 6)
    (copy,) = table.extend(fork, 1)
    assert copy == PageCopy(table.pages(row)[1], table.pages(fork)[1])


def test_truncation_gives_back_the_pages_beyond() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 13)
    kept = table.pages(row)[:2]
    table.truncate(row, 5)
    assert (table.length(row), table.pages(row)) == (5, kept)
    assert allocator.free_pages == 6
    assert table.batch([row], width=4)[0].tolist() == [[*kept, -1, -1]]


@pytest.mark.parametrize("length", [-1, 6])
def test_truncation_beyond_the_row_is_refused(length: int) -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 5)
    before = snapshot(allocator, table, row)
    with pytest.raises(PoolError, check=naming("row 0", 5, length)):
        table.truncate(row, length)
    assert snapshot(allocator, table, row) == before


def test_an_extension_the_allocator_cannot_serve_changes_nothing() -> None:
    allocator, table = make_table(num_pages=3)
    row = table.admit()
    table.extend(row, 6)
    fork = table.admit(table.pages(row), 6)
    before = snapshot(allocator, table, row, fork)
    with pytest.raises(OutOfPages) as caught:
        table.extend(fork, 3)  # one page to copy to and one more, of which one is free
    assert (caught.value.asked, caught.value.free) == (2, 1)
    assert snapshot(allocator, table, row, fork) == before


def test_an_extension_past_the_row_changes_nothing() -> None:
    allocator, table = make_table()
    row = table.admit()
    table.extend(row, 15)
    before = snapshot(allocator, table, row)
    with pytest.raises(PoolError, check=naming(17, 5, 4)):
        table.extend(row, 2)
    assert snapshot(allocator, table, row) == before


def test_a_negative_extension_is_refused() -> None:
    _, table = make_table()
    row = table.admit()
    with pytest.raises(PoolError, check=naming("row 0", -1, "truncate")):
        table.extend(row, -1)


USES: dict[str, Callable[[SlotTable, int], object]] = {
    "extend": lambda table, row: table.extend(row, 1),
    "truncate": lambda table, row: table.truncate(row, 0),
    "release": lambda table, row: table.release(row),
    "length": lambda table, row: table.length(row),
    "pages": lambda table, row: table.pages(row),
    "batch": lambda table, row: table.batch([row]),
    "lengths_cpu": lambda table, row: table.lengths_cpu([row]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("row", [0, 1, -1, 99], ids=["released", "never admitted", "negative", "too big"])
def test_a_row_that_is_not_in_use_is_refused(use: Callable[[SlotTable, int], object], row: int) -> None:
    _, table = make_table()
    table.release(table.admit())
    with pytest.raises(PoolError, check=naming(f"row {row}")):
        use(table, row)


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_is_padded_with_minus_one(device: str) -> None:
    allocator = PageAllocator(8)
    table = SlotTable(allocator, page_size=4, max_requests=4, max_pages=4, device=device)
    short, long = table.admit(), table.admit()
    table.extend(short, 2)
    table.extend(long, 9)
    page_table, lengths = table.batch([long, short])
    assert page_table.tolist() == [[*table.pages(long)], [*table.pages(short), -1, -1]]
    assert lengths.tolist() == [9, 2]
    assert page_table.dtype == lengths.dtype == torch.int32
    assert page_table.device.type == lengths.device.type == device


@pytest.mark.parametrize("width", [3, 4, 7])
def test_a_batch_can_be_made_wider(width: int) -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 9)
    page_table, _ = table.batch([row], width=width)
    assert page_table.tolist() == [[*table.pages(row), *[-1] * (width - 3)]]


def test_a_batch_narrower_than_its_rows_is_refused() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 9)
    with pytest.raises(PoolError, check=naming(2, 3)):
        table.batch([row], width=2)


def test_batches_of_nothing_have_a_place() -> None:
    _, table = make_table()
    assert table.batch([])[0].shape == (0, 1)
    assert table.batch([table.admit()])[0].tolist() == [[-1]]


def test_a_batch_does_not_change_with_the_table() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 3)
    page_table, lengths = table.batch([row])
    table.release(row)
    assert (page_table.tolist(), lengths.tolist()) == ([[0]], [3])


def test_changes_of_a_rows_pages_are_counted() -> None:
    """Changes of its length within a page do not count, since a plan over its pages still holds."""
    _, table = make_table()
    row, other = table.admit(), table.admit()
    seen = [table.changes([row, other])]
    for change in (
        lambda: table.extend(row, 1),
        lambda: table.extend_each([other]),
        lambda: table.extend(row, 4),
        lambda: table.truncate(row, 4),
        lambda: table.admit(table.pages(row), 4),
        lambda: table.release(row),
    ):
        change()
        seen.append(table.changes([row, other]))
    assert seen == [[0, 0], [1, 0], [1, 1], [2, 1], [3, 1], [3, 1], [4, 1]]
    table.extend_each([other])
    table.extend(other, 2)
    assert table.changes([other]) == [1], "there was room"


def test_a_copied_page_is_a_change() -> None:
    _, table = make_table()
    row = table.admit()
    table.extend(row, 3)
    fork = table.admit(table.pages(row), 3)
    before = table.changes([row])
    assert table.extend_each([row]) and table.changes([row]) != before and table.length(fork) == 3


def test_lengths_are_on_the_cpu_whatever_the_device() -> None:
    table = SlotTable(PageAllocator(8), page_size=4, max_requests=4, max_pages=4, device="meta")
    rows = [table.admit(), table.admit()]
    table.extend(rows[1], 6)
    lengths = table.lengths_cpu(rows)
    assert (lengths.device.type, lengths.dtype, lengths.tolist()) == ("cpu", torch.int32, [0, 6])


SIZES = ["page_size", "max_requests", "max_pages"]


@pytest.mark.parametrize("name", SIZES)
def test_a_table_that_holds_nothing_is_refused(name: str) -> None:
    page_size, max_requests, max_pages = (0 if name == size else 4 for size in SIZES)
    with pytest.raises(PoolError, check=naming(f"{name}=0")):
        SlotTable(PageAllocator(8), page_size=page_size, max_requests=max_requests, max_pages=max_pages)
