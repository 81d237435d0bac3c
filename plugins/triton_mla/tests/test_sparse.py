"""Sparse layers against float64, by the kernels themselves: interpreted on a CPU, compiled on a GPU (A10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import (
    INDEX_KEYS,
    BackendContext,
    BackendError,
    DType,
    ForwardMode,
    MLAPool,
    SelectedPositions,
    SelectedRows,
    SelectedSlots,
)
from attnplug.host import KVPools, MLADims, torch_dtype
from interpreted_mla import build
from support.devices import DEVICES
from support.sparse_capture import SparseCapture
from support.sparse_scene import LAYER, NAN, SHARED, SparseCase, SparseScene
from support.stage import error
from support.trees import random_trees

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
CASES = {
    "decode": SparseCase(((40, 1), (7, 1), (90, 1), (8, 1)), DECODE),
    "extend": SparseCase(((0, 12), (30, 3), (5, 4))),
    "mixed": SparseCase(((33, 1), (0, 11), (64, 1), (2, 1)), MIXED),
    "verify": SparseCase(((30, 4), (6, 4)), VERIFY),
    "verify of trees": SparseCase(((30, 6), (3, 6)), VERIFY, trees=random_trees(2, 6)),
    "pages of one token": SparseCase(((20, 2), (11, 3)), page_size=1),
    "one row of choice": SparseCase(((20, 2), (0, 3)), topk=1),
    "lengths on the device only": SparseCase(((40, 1), (7, 3)), padding=2, exact_lengths=False),
}


def on(case: SparseCase, device: str) -> SparseCase:
    """The case as it runs on a device: on a GPU in bfloat16, with the widths that kernels are made for."""
    if device == "cpu":
        return case
    return replace(
        case, dims=MLADims(512, 128, 64), heads=16, index_heads=64, index_dim=128, dtype=DType.BFLOAT16, seed=1
    )


def scene(case: SparseCase, device: str = "cpu", **changes: Any) -> SparseScene:
    return SparseScene(on(case, device), device, lambda context: build(replace(context, **changes)))


def judge(stage: SparseScene, selected: SelectedRows) -> list[list[int]]:
    return stage.judged(selected, 1e-5 if stage.dtype is torch.float32 else 2e-2)


def tolerance(stage: SparseScene) -> float:
    return {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[stage.dtype]


def check(stage: SparseScene) -> None:
    """Rows are chosen as well as float64 chooses them, and attended to as float64 does."""
    batch = stage.planned()
    selected = stage.backend.select(stage.index(), stage.layer, batch)
    found = judge(stage, selected)
    out, lse = stage.attend(batch, selected)
    wanted, wanted_lse = stage.wanted(found)
    tokens = len(wanted)
    assert error(out[:tokens], wanted) < tolerance(stage) and error(lse[:tokens], wanted_lse) < tolerance(stage)
    assert not out[tokens:].any() and lse[tokens:].isneginf().all()


@on_every_device
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_are_chosen_and_attended_to_as_float64_does(case, device):
    """A10; NaN in every page and row that must not be read."""
    check(scene(case, device))


@on_a_gpu
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 40)])
def test_contexts_far_longer_than_what_is_chosen(heads, mode, new, device):
    case = replace(on(CASES["decode"], device), mode=mode, topk=512, heads=heads, page_size=64)
    lengths = ((5000, new), (700, new), (511, new), (0, new), (20000, new))
    check(SparseScene(replace(case, lengths=lengths), device, build))


@on_every_device
def test_a_batch_that_is_chosen_for_in_blocks_is_attended_to_in_blocks(device):
    """Whole requests of a verify, any rows of an extend."""
    for name, least in (("extend", 3), ("verify", 2)):
        stage = scene(replace(CASES[name], page_size=4), device)
        stage.backend._sparse.index._nbytes = 4 * 8 * (64 + 64)  # for 4 rows of up to 64 cache rows
        assert len(stage.planned().plan.attention.metadata.sparse.blocks) >= least
        check(stage)


@on_every_device
def test_where_all_visible_rows_are_chosen_the_result_is_that_of_a_dense_layer(device):
    """A10"""
    outs = []
    for sparse in (True, False):
        stage = scene(replace(CASES["verify"], topk=128), device)
        batch, layer = stage.planned(), stage.layer if sparse else replace(stage.layer, indexer=None)
        selected = stage.backend.select(stage.index(), layer, batch) if sparse else None
        outs.append(stage.attend(batch, selected, layer))
    for sparse, dense in zip(*outs, strict=True):
        assert error(sparse, dense.double()) < tolerance(stage)


@on_every_device
def test_rows_that_were_not_chosen_are_never_read(device):
    """A10"""
    stage = scene(CASES["decode"], device)
    batch = stage.planned()
    selected = stage.backend.select(stage.index(), stage.layer, batch)
    found = stage.positions(selected)
    wanted = stage.wanted(found)[0]
    poisoned = 0
    for request, (before, _) in enumerate(stage.case.lengths):
        for position in set(range(before)) - set(found[request]):
            stage.mla.rows(LAYER).squeeze(2)[stage.where(request, position)] = NAN
            poisoned += 1
    assert poisoned > 100
    assert error(stage.attend(batch, selected)[0], wanted) < tolerance(stage)


@on_every_device
def test_positions_and_slots_are_both_taken_and_fewer_than_were_planned(device):
    stage = scene(replace(CASES["decode"], topk=16), device)
    batch, choices = stage.planned(), [[2, 5], [0, 1, 2, 3, 4, 5, 6, 7], [89, 3, 90], []]
    rows = torch.tensor([row + [-1] * (8 - len(row)) for row in choices], dtype=torch.int32, device=device)
    by_position = stage.attend(batch, SelectedPositions(rows))
    by_slot = stage.attend(batch, stage.as_slots(SelectedPositions(rows)))
    wanted, wanted_lse = stage.wanted([*choices[:3], [0]])
    for out, lse in (by_position, by_slot):
        assert error(out[:3], wanted[:3]) < tolerance(stage) and error(lse[:3], wanted_lse[:3]) < tolerance(stage)
        assert not out[3].any() and lse[3].isneginf().all()


def test_more_rows_than_a_layer_chooses_are_refused():
    stage = scene(CASES["decode"])
    rows = torch.zeros(4, 9, dtype=torch.int32)
    with pytest.raises(BackendError, match="has 9 rows for every token, and the model's layers choose 8"):
        stage.attend(stage.planned(), SelectedSlots(rows))


@on_every_device
def test_a_layer_that_shares_a_choice_attends_to_the_same_rows(device):
    stage = scene(CASES["verify"], device)
    batch = stage.planned()
    selected = stage.backend.select(stage.index(), stage.layer, batch)
    own, shared = (stage.attend(batch, selected, layer)[0] for layer in (stage.layer, stage.shared))
    assert stage.shared.layer_id == SHARED and torch.equal(own, shared)


@on_every_device
def test_an_fp8_cache(device):
    made: list[MLAPool] = []

    def over_fp8(context: BackendContext) -> Any:
        pool = MLAPool(context.model.layers, num_pages=context.pools.mla.num_pages, page_size=16, device=device,
                       dtype=DType.FLOAT8_E4M3)  # fmt: skip
        made.append(pool)
        pools = KVPools(mla=pool, caches={INDEX_KEYS: context.pools.cache(INDEX_KEYS)})
        return build(replace(context, kv_dtype=DType.FLOAT8_E4M3, pools=pools))

    stage = SparseScene(replace(on(CASES["verify"], device), dtype=DType.FLOAT16), device, over_fp8)
    fp8 = torch_dtype(DType.FLOAT8_E4M3)
    made[0].rows(LAYER).copy_(stage.mla.rows(LAYER).to(fp8))
    stage.rows = [rows.to(fp8).to(stage.dtype) for rows in stage.rows]
    check(stage)


# ---- graphs ----


@on_every_device
@pytest.mark.parametrize("name", ["decode", "verify", "verify of trees"])
def test_one_capture_serves_other_lengths_pages_and_fewer_requests_as_eager_does(name, device):
    """B2's ground; equal bits."""
    case = CASES[name]
    new = case.lengths[0][1]
    pool = scene(replace(case, lengths=((200, new), (100, new), (90, new), (60, new))[: len(case.lengths)]), device)
    graph = SparseCapture(pool, len(case.lengths), new)
    shorter = replace(case, lengths=((70, new),), trees=None if case.trees is None else case.trees[:1], seed=5)
    for other in (case, shorter):
        stage = scene(other, device)
        batch = stage.planned()
        found = graph.replay(stage)
        selected = stage.backend.select(stage.index(), stage.layer, batch)
        judge(stage, found[0])
        assert torch.equal(found[0].slots, selected.slots)
        out, lse = stage.attend(batch, selected)
        assert torch.equal(found[1][: len(out)], out) and torch.equal(found[2][: len(out)], lse)


# ---- invariance ----


@on_every_device
def test_invariant_to_the_batch(device):
    """With the option, a request's bits are the same alone and among others."""
    from attnplug_triton_mla.options import TritonMLAOptions

    options, outs = TritonMLAOptions(batch_invariant=True), []
    whole = scene(CASES["decode"], device, options=options)
    for lengths in (CASES["decode"].lengths, CASES["decode"].lengths[2:3]):
        stage = scene(replace(CASES["decode"], lengths=lengths), device, options=options)
        if lengths is not CASES["decode"].lengths:
            stage = _only(whole, stage, 2)
        batch = stage.planned()
        outs.append(stage.attend(batch, stage.backend.select(stage.index(), stage.layer, batch))[0])
    assert torch.equal(outs[0][2:3], outs[1])


def _only(whole: SparseScene, stage: SparseScene, request: int) -> SparseScene:
    """A scene of one request, which is that of another."""
    part = slice(request, request + 1)
    stage.rows, stage.index_rows = whole.rows[part], whole.index_rows[part]
    stage.q, stage.index_q, stage.weights = whole.q[part], whole.index_q[part], whole.weights[part]
    stage.store(LAYER, stage.mla.write, stage.rows)
    stage.store(LAYER, stage.keys.write, stage.index_rows)
    return stage
