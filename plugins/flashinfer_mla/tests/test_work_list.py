"""The work list of a captured call: planning tests, in torch on a CPU, and by the kernel: interpreted, or on a GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_flashinfer_mla.device_planner import fill_work_list
from attnplug_flashinfer_mla.triton_kernels import launch_fill_work_list
from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS, MLAWorkList, UniformMLABatch, keys_seen, work_list_problem
from attnplug_testing.devices import DEVICES, INTERPRETED

lengths = st.lists(
    st.one_of(st.just(0), st.just(1), st.integers(0, 200), st.integers(0, 70000)), min_size=1, max_size=12
)


def empty(clusters: int, cluster_size: int, device: str = "cpu") -> MLAWorkList:
    """Arrays filled with values that must be overwritten."""
    counts = [MAX_WORK_ITEMS] * 3 + [clusters * cluster_size] * 5 + [MAX_WORK_ITEMS] * 5 + [clusters + 1]
    arrays = [torch.full((count,), -77, dtype=torch.int32, device=device) for count in counts]
    return MLAWorkList(cluster_size, clusters, *arrays)


def batch_of(kv: list[int], queries: int, heads: int, causal: bool) -> tuple[UniformMLABatch, int]:
    """A causal call has no request with fewer rows than queries, but padded ones, which have none at all."""
    return UniformMLABatch(len(kv), queries, heads, causal, pages=1100), 2 if queries * heads > 64 else 1


@settings(max_examples=16)
@given(lengths, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 8, 16, 64, 128]), st.sampled_from([1, 5, 66, 132]))
def test_planning_divides_all_work_once_and_evenly(kv, queries, heads, clusters):
    """Every key of every tile once; no cluster has more than its share; parts and merges within the library's room."""
    kv = [0 if rows == 0 else max(rows, queries) for rows in kv]
    batch, cluster_size = batch_of(kv, queries, heads, causal=queries > 1)
    work_list = empty(clusters, cluster_size)
    fill_work_list(work_list, batch, torch.tensor(kv, dtype=torch.int32))
    assert work_list_problem(work_list, batch, kv, [1100 * request for request in range(len(kv))]) == ""
    works = work_list.work_indptr.tolist()
    keys = (work_list.kv_end - work_list.kv_start)[: works[-1]]
    tiles = batch.tiles(work_list)
    tile = torch.arange(len(kv) * tiles)
    seen = keys_seen(batch, work_list, torch.tensor(kv)[tile // tiles], tile % tiles)
    steps = (seen + 63) // 64
    share = max(-(-int(steps.sum()) // clusters), math.ceil(math.sqrt(int(steps.max()) / 7)), 1)
    for first, last in pairwise(works):
        assert int(((keys[first:last] + 63) // 64).sum()) <= 1.1 * share
    check_merges(work_list, batch)


def check_merges(work_list: MLAWorkList, batch: UniformMLABatch) -> None:
    """Every row of a divided tile is merged once, from all of its parts, and no two parts share a place."""
    works = int(work_list.work_indptr[-1])
    rows_of: dict[int, list[int]] = {}
    places: list[int] = []
    for at in range(works):
        if (target := int(work_list.partial_indptr[at])) >= 0:
            start = int(work_list.q_start[at])
            size = min(work_list.tile_rows, batch.queries * batch.heads - start)
            places += range(target, target + size)
            for row in range(size):
                rows_of.setdefault(int(work_list.q_indptr[at]) * batch.heads + start + row, []).append(target + row)
    assert len(places) == len(set(places)) and max(places, default=0) < 2 * work_list.clusters * work_list.tile_rows
    merged: dict[int, list[int]] = {}
    for entry in range(work_list.clusters * work_list.cluster_size):
        start, end = int(work_list.merge_start[entry]), int(work_list.merge_end[entry])
        for number in range(end - start):
            assert start + number not in merged
            begin = int(work_list.merge_partial_start[entry]) + number
            merged[start + number] = list(
                range(begin, int(work_list.merge_partial_end[entry]), int(work_list.merge_stride[entry]))
            )
    assert merged == rows_of


@pytest.mark.parametrize("device", [DEVICES[1], pytest.param("cpu", id="interpreted", marks=INTERPRETED)])
@pytest.mark.parametrize(("queries", "heads"), [(1, 16), (1, 128), (4, 16), (4, 48), (4, 128)])
def test_the_kernel_makes_the_same_list(queries, heads, device):
    random = torch.Generator().manual_seed(heads + queries)
    processors, most = (132, 1000) if device == "cuda" else (10, 33)
    for requests in (each for each in (1, 2, 33, 256, 1000) if each <= most):
        kv = torch.randint(queries, 9000, (requests,), generator=random, dtype=torch.int32)
        kv[torch.rand(requests, generator=random) < 0.2] = 0
        batch, cluster_size = batch_of(kv.tolist(), queries, heads, causal=queries > 1)
        made, wanted = (empty(processors // cluster_size, cluster_size, where) for where in (device, "cpu"))
        launch_fill_work_list(made, batch, kv.to(device))
        fill_work_list(wanted, batch, kv)
        for one, other in zip(made.arrays(), wanted.arrays(), strict=True):
            assert torch.equal(one.cpu(), other)
