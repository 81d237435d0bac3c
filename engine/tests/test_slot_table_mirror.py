"""The slot table on the device: a mirror of the host's, updated entry by entry."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
import torch

from attnplug_engine.scheduling.page_allocator import OutOfPages, PageAllocator
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_testing.devices import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_the_mirror_has_what_the_host_has_and_stays_where_it_is(device: str) -> None:
    """Rows are admitted and released, pages are reused between two updates, and the last row stays padding."""
    random = Random(7)
    table = SlotTable(PageAllocator(12), page_size=2, max_requests=4, max_pages=5, device=device)
    address, rows = table.mirror().data_ptr(), list[int]()
    for step in range(200):
        if len(rows) < 4 and random.random() < 0.4:
            rows.append(table.admit())
        elif rows and random.random() < 0.3:
            table.release(rows.pop(random.randrange(len(rows))))
        elif rows and table.length(row := random.choice(rows)) < 8:
            with suppress(OutOfPages):
                table.extend(row, random.randint(1, 2))
        if step % 3 == 0:
            mirror = table.mirror()
            assert mirror.data_ptr() == address and mirror.shape == (5, 5) and mirror.dtype == torch.int32
            assert mirror.device.type == device
            for row in rows:
                pages = table.pages(row)
                assert mirror[row, : len(pages)].tolist() == [*pages]
    assert mirror[4].tolist() == [-1] * 5
