"""The work list of a captured call: planning tests, in torch on a CPU, and by the kernel: interpreted, or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_flashinfer.device_planner import fill_work_list
from attnplug_flashinfer.triton_kernels import launch_fill_work_list
from attnplug_flashinfer.work_list import PageCounts, PagedWorkList, UniformPagedBatch
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.triton_mode import compiled_by

lengths = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 200), st.integers(0, 70000)), min_size=1, max_size=12
)
WIDTH = 1200


def empty(batch: UniformPagedBatch, tile_rows: int, room: int, device: str = "cpu") -> tuple[PagedWorkList, PageCounts]:
    """Arrays filled with values that must be overwritten."""
    rows, requests = batch.requests * batch.queries, batch.requests

    def array(count: int) -> torch.Tensor:
        return torch.full((count,), -77, dtype=torch.int32, device=device)

    valid = torch.full((room,), 77, dtype=torch.uint8, device=device)
    items = [array(room) for _ in range(3)]
    work_list = PagedWorkList(tile_rows, *items, valid, array(requests + 1), array(rows + 1), array(1))
    return work_list, PageCounts(array(requests + 1), array(requests))


@settings(max_examples=16)
@given(lengths, st.sampled_from([1, 2, 5]), st.sampled_from([1, 4, 7]), st.sampled_from([16, 64]), st.integers(-1, 300))
def test_planning_divides_all_work_once_within_the_room(kv, queries, group, page_size, window_left):
    """Every key that a row may see is in one chunk; every row's parts are where its items write them."""
    kv = [0 if rows == 0 else max(rows, queries) for rows in kv]
    tile_rows = 64 if queries * group > 16 else 16
    batch = UniformPagedBatch(len(kv), queries, group, page_size, window_left)
    tiles = batch.tiles(tile_rows)
    room = max(33, len(kv) * tiles)
    work_list, counts = empty(batch, tile_rows, room)
    width = -(-70000 // page_size)
    fill_work_list(work_list, batch, torch.tensor(kv, dtype=torch.int32), width, counts)
    pages = [-(-rows // page_size) for rows in kv]
    assert counts.kv_indptr.diff().tolist() == pages
    assert counts.last_page_lens.tolist() == [(rows - 1) % page_size + 1 if rows else 0 for rows in kv]
    count, chunk = int(work_list.valid.sum()), int(work_list.chunk_rows)
    assert work_list.valid.tolist() == [1] * count + [0] * (room - count)
    found = list(
        zip(
            *(
                array[:count].tolist()
                for array in (work_list.request_indices, work_list.tile_indices, work_list.chunk_indices)
            ),
            strict=True,
        )
    )
    assert chunk % page_size == 0 and chunk >= min(128, max(kv))
    wanted = []
    for request, rows in enumerate(kv):
        seen = rows if window_left < 0 else min(rows, window_left + tile_rows)
        chunks = -(-seen // chunk)
        wanted += [(request, tile, part) for tile in range(tiles) for part in range(chunks)]
        begin = int(work_list.parts_indptr[request])
        mine = work_list.merge_indptr[request * queries : (request + 1) * queries + 1].tolist()
        assert mine == [begin + query * chunks for query in range(queries + 1)]
    assert found == wanted
    if chunk > max(128, page_size):
        smaller = chunk - page_size
        seen = [rows if window_left < 0 else min(rows, window_left + tile_rows) for rows in kv]
        assert sum(tiles * -(-rows // smaller) for rows in seen) > room, "chunks are the shortest that fit"


def test_planning_of_more_rows_than_the_table_has_pages_stays_inside():
    """The lengths of a captured batch are on the device, so the host cannot check them first."""
    batch = UniformPagedBatch(2, 1, 4, 8, -1)
    work_list, counts = empty(batch, 16, 33)
    fill_work_list(work_list, batch, torch.tensor([40, 9], dtype=torch.int32), 3, counts)
    assert (counts.kv_indptr.tolist(), counts.last_page_lens.tolist()) == ([0, 3, 5], [8, 1])


@pytest.mark.parametrize("device", [DEVICES[1], pytest.param("cpu", id="interpreted", marks=INTERPRETED)])
@pytest.mark.parametrize(
    ("queries", "group", "page_size", "window_left"), [(1, 4, 64, -1), (1, 1, 1, 500), (4, 8, 16, -1), (4, 4, 16, 127)]
)
def test_the_kernel_makes_the_same_list(queries, group, page_size, window_left, device):
    random = torch.Generator().manual_seed(group + queries)
    for requests in (1, 5, 256, 1000) if device == "cuda" else (1, 5):
        kv = torch.randint(queries, 9000 // (1 if page_size > 1 else 8), (requests,), generator=random).int()
        kv[torch.rand(requests, generator=random) < 0.2] = 0
        batch = UniformPagedBatch(requests, queries, group, page_size, window_left)
        tile_rows = 64 if queries * group > 16 else 16
        room = max(33, requests * batch.tiles(tile_rows))
        (made, counts), (wanted, wanted_counts) = (empty(batch, tile_rows, room, where) for where in (device, "cpu"))
        launch_fill_work_list(made, batch, kv.to(device), WIDTH, counts)
        fill_work_list(wanted, batch, kv, WIDTH, wanted_counts)
        for one, other in zip(made.arrays(), wanted.arrays(), strict=True):
            assert torch.equal(one.cpu(), other)
        assert torch.equal(counts.kv_indptr.cpu(), wanted_counts.kv_indptr)
        assert torch.equal(counts.last_page_lens.cpu(), wanted_counts.last_page_lens)


@pytest.mark.cross_compile
def test_the_kernel_compiles_for_sm_90():
    """Needs no such GPU: no register is spilled."""
    pytest.importorskip("triton")
    found = compiled_by(Path(__file__).with_name("cross_compile.py"))
    assert [(requests, spilled) for requests, _, spilled in found] == [(32, 0), (1024, 0)]
