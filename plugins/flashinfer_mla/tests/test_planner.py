"""Dividing batches, and indices: planning tests, in torch on a CPU, and by the kernel: interpreted, or on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_flashinfer_mla.device_planner import fill_indices
from attnplug_flashinfer_mla.lengths import CallLengths
from attnplug_flashinfer_mla.planner import padded_heads, split_segments
from attnplug_flashinfer_mla.triton_kernels import launch_fill_indices
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.kernel_variants import recorded_variants

in_every_way = pytest.mark.parametrize(
    ("fill", "device"),
    [
        pytest.param(fill_indices, "cpu", id="cpu"),
        pytest.param(fill_indices, "cuda", id="cuda", marks=DEVICES[1].marks),
        pytest.param(launch_fill_indices, "cpu", id="interpreted", marks=INTERPRETED),
    ],
)
requests = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40000)), min_size=1, max_size=8)


@settings(max_examples=16)
@given(requests, st.sampled_from([1, 16, 64, 128]))
def test_planning_divides_a_batch_into_what_the_scheduler_holds(lengths, heads):
    """Every query in one segment, in order, seeing the keys it saw; every segment within 16384 work items."""
    new, total = [n for _, n in lengths], [p + n for p, n in lengths]
    segments = split_segments(new, total, heads)
    seen = []
    row = 0
    for segment in segments:
        assert segment.rows == slice(row, row + sum(segment.query_lens))
        row = segment.rows.stop
        assert sum(-(-n * heads // 64) for n in segment.query_lens) + 264 <= 16384
        for request, (queries, rows) in enumerate(zip(segment.query_lens, segment.kv_lens, strict=True)):
            seen += [(segment.first_request + request, rows - queries + query) for query in range(queries)]
    assert seen == [(r, p + n) for r, (p, new_) in enumerate(lengths) for n in range(new_)]


@in_every_way
def test_planning_of_more_rows_than_the_table_has_pages_stays_inside(fill, device):
    """The lengths of a captured batch are on the device, so the host cannot check them first."""
    table = torch.arange(9, dtype=torch.int32, device=device).view(3, 3)
    lengths = CallLengths.of(torch.tensor([0, 1, 2, 3, 0, 3, 6, 9, 40, 25, 24], dtype=torch.int32, device=device))
    indices, slots = torch.full((9,), -7, dtype=torch.int32, device=device), torch.full((3,), -9, device=device)
    fill(table, lengths, 8, indices, slots)
    assert indices.tolist() == list(range(9))
    assert slots.tolist() == [-1, -1, 8 * 8 + 7]


def test_planning_keeps_what_fits_in_one_call():
    assert len(split_segments([1] * 256, [2048] * 256, 128)) == 1
    assert len(split_segments([7000], [7000], 128)) == 1
    assert len(split_segments([8192], [8192], 128)) == 2


@pytest.mark.parametrize(("heads", "padded"), [(1, 1), (5, 8), (16, 16), (24, 32), (96, 128), (128, 128)])
def test_planning_pads_heads_to_divide_a_tile(heads, padded):
    assert padded_heads(heads) == padded


@in_every_way
@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("gaps", [False, True])
def test_planning_of_indices_row_by_row(gaps, page_size, fill, device):
    """Pages and slots equal those of a plain loop. Table entries behind a request's last page are out of range and not
    read."""
    chance = random.Random(page_size)
    kv = [0, 1, 64, 65, *(chance.randint(1, 5000) for _ in range(5))]
    new = [1, 1, 7, 65, *(chance.randint(0, min(rows, 900)) for rows in kv[4:])]
    pages = [-(-rows // page_size) for rows in kv]
    width = max(pages) + 2
    table = torch.randperm(len(kv) * width)[: len(kv) * width].view(len(kv), width).int()
    for request, count in enumerate(pages):
        table[request, count:] = 1 << 30
    starts = (
        [width * request for request in range(len(kv) + 1)] if gaps else [sum(pages[:r]) for r in range(len(kv) + 1)]
    )
    rows = [sum(new[:r]) for r in range(len(kv) + 1)]
    lengths = CallLengths.of(torch.tensor([*rows, *starts, *kv], dtype=torch.int32, device=device))
    indices = torch.full((starts[-1],), -7, dtype=torch.int32, device=device)
    slots = torch.full((rows[-1],), -9, dtype=torch.int64, device=device)
    fill(table.to(device), lengths, page_size, indices, slots)
    wanted = torch.full_like(indices, -7).cpu()
    for request, count in enumerate(pages):
        wanted[starts[request] : starts[request] + count] = table[request, :count]
    assert torch.equal(indices.cpu(), wanted)
    positions = [(r, kv[r] - new[r] + n) for r in range(len(kv)) for n in range(new[r])]
    found = [-1 if p < 0 else int(table[r, p // page_size]) * page_size + p % page_size for r, p in positions]
    assert slots.tolist() == found


@INTERPRETED
def test_the_width_of_a_page_table_compiles_no_other_kernel() -> None:
    """E1"""
    with recorded_variants() as variants:
        for width in (1, 2, 16, 17):
            ends = torch.tensor([0, 1], dtype=torch.int32)
            lengths = CallLengths(ends, width * ends, torch.tensor([64 * width], dtype=torch.int32))
            table = torch.arange(width, dtype=torch.int32)[None]
            indices, slots = torch.zeros(width, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
            launch_fill_indices(table, lengths, 64, indices, slots)
            assert indices.tolist() == list(range(width))
    assert len(variants["_fill_indices"]) == 1
