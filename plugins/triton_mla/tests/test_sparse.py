"""Sparse layers against float64, by the kernels themselves: interpreted on a CPU, compiled on a GPU (A10).

The conformance kit proves the usual batches on a CPU: here are others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, DType, ForwardMode
from attnplug.host import MLADims
from attnplug.sparse import SelectedSlots
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import LAST, LAYER
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase
from attnplug_testing.references.triton_mla import build
from attnplug_testing.sparse_scene import HotStage, SparseStage, check_replays, sparse
from attnplug_testing.trees import random_trees

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
CASES = {
    "decode": sparse(((40, 1), (7, 1), (90, 1), (8, 1)), DECODE),
    "extend": sparse(((0, 12), (30, 3), (5, 4))),
    "mixed": sparse(((33, 1), (0, 11), (64, 1), (2, 1)), MIXED),
    "verify": sparse(((30, 4), (6, 4)), VERIFY),
    "verify of trees": sparse(((30, 6), (3, 6)), VERIFY, trees=random_trees(2, 6)),
    "pages of one token": sparse(((20, 2), (11, 3)), page_size=1),
    "one row of choice": sparse(((20, 2), (0, 3)), topk=1),
    "lengths on the device only": sparse(((40, 1), (7, 3)), padding=2, exact=False),
}
OTHERS = ["mixed", "verify of trees", "pages of one token", "one row of choice", "lengths on the device only"]


def on(case: KernelCase, device: str) -> KernelCase:
    """The case as it runs on a device: on a GPU in bfloat16, with the widths that kernels are made for."""
    if device == "cpu":
        return case
    index = replace(case.index, heads=64, head_dim=128)
    return replace(case, mla=MLADims(512, 128, 64), mla_heads=16, index=index, dtype=DType.BFLOAT16, seed=1)


def scene(case: KernelCase, device: str = "cpu") -> SparseStage:
    return SparseStage(on(case, device), device, build)


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in OTHERS), *(pytest.param(name, "cuda", marks=DEVICES[1].marks) for name in CASES)],
)
@pytest.mark.sample(4)
def test_rows_are_chosen_and_attended_to_as_float64_does(name, device):
    """A10; NaN in every page and row that must not be read."""
    scene(CASES[name], device).check()


@on_every_device
def test_packed_rows_are_attended_to_as_float64_does(device):
    """A10, E2: the rows of 656 bytes that vLLM and SGLang keep for FlashMLA."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 caches are read on SM 89 or newer")
    narrow = replace(CASES["extend"], mla=MLADims(256, 128, 16), kv_dtype="fp8_ds_mla")
    scene(narrow, device).check()


def test_rows_from_the_host_are_attended_to_as_float64_does():
    """A10: the coordinator comes from the context. For a layer that shares a selection, it loads that layer's rows."""
    stage = HotStage(CASES["verify of trees"], "cpu", build)
    stage.store_shared()
    batch = stage.planned()
    selected = stage.select(batch)
    for layer in (stage.layer, stage.shared):
        stage.check_attends(batch, selected, layer)


@on_a_gpu
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 40)])
def test_contexts_far_longer_than_what_is_chosen(heads, mode, new, device):
    lengths = ((5000, new), (700, new), (511, new), (0, new), (20000, new))
    case = on(sparse(lengths, mode, 64, topk=512), device)
    SparseStage(replace(case, mla_heads=heads), device, build).check()


@on_every_device
def test_a_batch_that_is_chosen_for_in_blocks_is_attended_to_in_blocks(device):
    """Blocks have whole requests in a verify, and any rows in an extend."""
    for name, least in (("extend", 3), ("verify", 2)):
        stage = scene(replace(CASES[name], page_size=4), device)
        stage.backend._sparse.index._nbytes = 4 * 8 * (64 + 64)  # for 4 rows of up to 64 cache rows
        assert len(stage.planned().plan.attention.metadata.sparse.blocks) >= least
        stage.check()


@on_every_device
def test_where_all_visible_rows_are_chosen_the_result_is_that_of_a_dense_layer(device):
    """A10"""
    stage = scene(sparse(CASES["verify"].lengths, VERIFY, topk=128), device)
    dense, batch = replace(stage.layer, indexer=None), stage.planned()
    outs = stage.attend(batch, stage.select(batch)), stage.attend(batch, None, dense)
    for chosen, every in zip(*outs, strict=True):
        assert relative_error(chosen, every.double()) <= stage.tolerance


@on_every_device
def test_rows_that_were_not_chosen_are_never_read(device):
    """A10"""
    stage = scene(CASES["decode"], device)
    batch = stage.planned()
    selected = stage.select(batch)
    poisoned = 0
    for request, (before, _) in enumerate(stage.case.lengths):
        for position in set(range(before)) - set(stage.chosen[request]):
            stage.pool.rows(LAYER)[stage.slot(request, position)] = NAN
            poisoned += 1
    assert poisoned > 100
    stage.check_attends(batch, selected)


@on_every_device
def test_positions_and_slots_are_both_taken_and_fewer_than_were_planned(device):
    """C4: a token without rows gives zero and -inf."""
    stage = scene(sparse(CASES["decode"].lengths, DECODE, topk=16), device)
    batch = stage.planned()
    rows = stage.by_position([[2, 5], [0, 1, 2, 3, 4, 5, 6, 7], [89, 3, 90], []], columns=8)
    for selected in (rows, stage.as_slots(rows)):
        stage.check_attends(batch, selected)


def test_more_rows_than_a_layer_chooses_are_refused():
    stage = scene(CASES["decode"])
    rows = torch.zeros(4, 9, dtype=torch.int32)
    with raises_naming(BackendError, 9):
        stage.attend(stage.planned(), SelectedSlots(rows))


@on_every_device
def test_a_layer_that_shares_a_choice_attends_to_the_same_rows(device):
    stage = scene(CASES["verify"], device)
    stage.store_shared()
    batch = stage.planned()
    selected = stage.select(batch)
    own, shared = (stage.attend(batch, selected, layer)[0] for layer in (stage.layer, stage.shared))
    assert stage.shared.layer_id == LAST and torch.equal(own, shared)


@on_every_device
def test_an_fp8_cache(device):
    case = replace(on(CASES["verify"], device), dtype=DType.FLOAT16, kv_dtype=DType.FLOAT8_E4M3)
    stage = SparseStage(case, device, build)
    batch = stage.planned()
    out = stage.attend(batch, stage.select(batch))[0]
    assert relative_error(out, stage.wanted_sparse()[0]) <= 5e-3


# ---- graphs ----


@on_every_device
@pytest.mark.parametrize("name", ["decode", "verify", "verify of trees"])
@pytest.mark.sample(2)
@pytest.mark.sample(1)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests_as_eager_does(name, device):
    """B2's ground; equal bits."""
    case = CASES[name]
    new = case.lengths[0][1]
    longer = ((200, new), (100, new), (90, new), (60, new))[: len(case.lengths)]
    shorter = replace(case, lengths=((70, new),), trees=None if case.trees is None else case.trees[:1], seed=5)
    check_replays(scene(replace(case, lengths=longer), device), [scene(other, device) for other in (case, shorter)])


# ---- invariance ----


@on_every_device
def test_invariant_to_the_batch(device):
    """E3: a request's bits are the same alone and among others if the level is requested."""
    case = replace(CASES["decode"], levels=frozenset({"run", "batch"}))
    whole, alone = (scene(each, device) for each in (case, replace(case, lengths=case.lengths[2:3])))
    outs = []
    for stage in (whole, _only(whole, alone, 2)):
        batch = stage.planned()
        outs.append(stage.attend(batch, stage.select(batch))[0])
    assert torch.equal(outs[0][2:3], outs[1])


def _only(whole: SparseStage, stage: SparseStage, request: int) -> SparseStage:
    """A scene of one request, which is that of another; of one new row each."""
    part, (before, _) = slice(request, request + 1), stage.case.lengths[0]
    whole.given()
    stage.keys, stage.values, stage.index_rows = whole.keys[part], whole.values[part], whole.index_rows[part]
    stage.q, stage.queries = whole.q[part], (whole.queries[0][part], whole.queries[1][part])
    stage.store(LAYER, [(0, before)])
    stage.index_keys.keys(LAYER)[stage.places(0, 0, before)] = stage.index_rows[0][:before]
    return stage
