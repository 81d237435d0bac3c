"""The work list is read as FlashInfer's planner for MLA writes it, in each version that the plugin claims."""

from __future__ import annotations

import importlib
import inspect
import re

import torch

from attnplug_flashinfer_mla.kernels import FlashInferMLALibrary
from attnplug_flashinfer_mla.work_list import MAX_WORK_ITEMS, TILE_ROWS
from mla_scheduler import CLUSTER, PROCESSORS, array_sizes, plan_info, scheduler
from recorded_library import make, paged_call

WORK_LIST = {
    "q_indptr_offset": "q_indptr",
    "kv_indptr_offset": "kv_indptr",
    "partial_indptr_offset": "partial_indptr",
    "merge_packed_offset_start_offset": "merge_start",
    "merge_packed_offset_end_offset": "merge_end",
    "merge_partial_packed_offset_start_offset": "merge_partial_start",
    "merge_partial_packed_offset_end_offset": "merge_partial_end",
    "merge_partial_stride_offset": "merge_stride",
    "q_len_offset": "q_len",
    "kv_len_offset": "kv_len",
    "q_start_offset": "q_start",
    "kv_start_offset": "kv_start",
    "kv_end_offset": "kv_end",
    "work_indptr_offset": "work_indptr",
}
"""Names of the work list's arrays in FlashInfer's scheduler, and our names for them."""


def test_the_work_list_is_read_where_the_scheduler_puts_it(library: FlashInferMLALibrary) -> None:
    """The numbers of a plan are distinguished only by their order; the C++ source in the wheel has names and sizes."""
    info = plan_info()
    assert list(info) == ["num_blks_x", "num_blks_y", *WORK_LIST, "partial_o_offset", "partial_lse_offset"]
    kernel = make().paged(decode=False)
    kernel.plan(paged_call(causal=True))
    work_list = kernel.work_list()
    assert (work_list.cluster_size, work_list.clusters) == (CLUSTER, PROCESSORS // CLUSTER)
    room = array_sizes()
    for name, ours in WORK_LIST.items():
        array = getattr(work_list, ours)
        assert array.dtype is torch.int32, ours
        assert array.storage_offset() * array.element_size() == info[name], ours
        wanted = work_list.clusters + 1 if ours == "work_indptr" else room[name]
        assert array.shape[0] == wanted <= room[name], ours


def test_the_scheduler_has_the_constants_that_we_fill_its_list_by(library: FlashInferMLALibrary) -> None:
    assert re.findall(r"max_total_num_works = (\d+);", scheduler()) == [str(MAX_WORK_ITEMS)]
    assert re.findall(r"cta_tile_q = (\d+);", scheduler()) == [str(TILE_ROWS)]


def test_the_private_members_that_are_read_are_there(library: FlashInferMLALibrary) -> None:
    """They are set by the class, or read from its backends by name."""
    source = inspect.getsource(importlib.import_module(library.paged.real.__module__))
    for name in ("_int_workspace_buffer", "_plan_info"):
        assert re.search(rf'self\.{name} = |"{name}"', source), name
