"""Sparse MLA in torch_native: which rows are selected, read and moved together (A10).

The conformance kit covers the usual batches, these tests the others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import DType, ForwardMode, PoolError
from attnplug.kernels import PageCopy
from attnplug_conformance.arithmetic import NAN
from attnplug_conformance.case import LAST, LAYER
from attnplug_sparse.pools import IndexKeyPool
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import SparseStage, sparse
from attnplug_testing.trees import random_trees

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
CASES = {
    "decode": sparse(((40, 1), (7, 1), (90, 1), (8, 1)), DECODE),
    "extend": sparse(((50, 20), (3, 4), (16, 33), (5, 4))),
    "mixed": sparse(((33, 1), (0, 25), (64, 1), (2, 1)), ForwardMode.MIXED),
    "verify": sparse(((30, 4), (6, 4), (47, 4)), VERIFY),
    "verify of trees": sparse(((30, 6), (3, 6)), VERIFY, trees=random_trees(2, 6)),
    "pages of one token": sparse(((20, 3), (11, 8)), page_size=1),
    "one row of choice": sparse(((20, 3), (0, 8)), topk=1),
    "padding": sparse(((40, 1), (7, 1)), DECODE, padding=3),
}
OTHERS = ["mixed", "verify of trees", "pages of one token", "one row of choice"]


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in OTHERS), *(pytest.param(name, "cuda", marks=DEVICES[1].marks) for name in CASES)],
)
def test_rows_are_chosen_and_attended_to_as_float64_does(name, device):
    """A10; NaN in every page and row that must not be read."""
    SparseStage(CASES[name], device).check()


def test_keys_of_padding_are_written_nowhere():
    """B5"""
    stage = SparseStage(CASES["padding"])
    stage.check()
    assert int((~stage.index_keys.keys(LAYER).isnan().any(-1)).sum()) == sum(stage.totals)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5), st.integers(1, 60))
@settings(max_examples=12)
def test_any_batch_is_served_as_float64_serves_it(lengths, topk):
    """A10"""
    SparseStage(sparse(tuple(lengths), topk=topk, page_size=4, index=(12, 16), seed=topk)).check()


@pytest.mark.parametrize("name", ["decode", "extend", "mixed", "verify"])
def test_where_all_visible_rows_are_chosen_the_result_is_that_of_a_dense_layer_bit_for_bit(name):
    """A10"""
    case = CASES[name]
    stage = SparseStage(replace(case, index=replace(case.index, topk=128)))
    dense, batch = replace(stage.layer, indexer=None), stage.planned()
    outs = stage.attend(batch, stage.select(batch)), stage.attend(batch, None, dense)
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_a_choice_of_fewer_rows_than_are_visible_is_heeded_though_all_would_fit():
    stage = SparseStage(sparse(CASES["decode"].lengths, DECODE, topk=128))
    stage.check_attends(stage.planned(), stage.by_position([[2, 5], [0], [89, 3, 90], [8]]))


@pytest.mark.parametrize("name", ["decode", "verify", "extend"])
def test_rows_that_were_not_chosen_are_never_read(name):
    """A10"""
    stage = SparseStage(CASES[name])
    batch = stage.planned()
    selected = stage.select(batch)
    used = {
        (request, position)
        for (request, _), mine in zip(stage.visible(), stage.chosen, strict=True)
        for position in mine
    }
    poisoned = 0
    for request, (before, _) in enumerate(stage.case.lengths):
        for position in {place for place in range(stage.totals[request]) if (request, place) not in used}:
            stage.keys[request][position] = NAN
            if position < before:
                stage.pool.rows(LAYER)[stage.slot(request, position)] = NAN
            poisoned += 1
    assert poisoned > 15
    stage.check_attends(batch, selected)


@pytest.mark.parametrize("name", ["decode", "extend", "verify of trees", "pages of one token"])
def test_slots_and_positions_of_the_same_rows_give_the_same(name):
    stage = SparseStage(CASES[name])
    batch = stage.planned()
    selected = stage.select(batch)
    by_position, by_slot = (stage.attend(batch, each)[0] for each in (selected, stage.as_slots(selected)))
    assert torch.equal(by_position, by_slot)


def test_a_token_without_chosen_rows_gives_zero():
    stage = SparseStage(CASES["decode"])
    out, lse = stage.attend(stage.planned(), stage.by_position([[], [3], [], []]))
    assert not out[[0, 2, 3]].any() and lse[[0, 2, 3]].isneginf().all()
    assert out[1].any() and lse[1].isfinite().all()


def test_equal_scores_give_as_many_rows_as_any():
    stage = SparseStage(CASES["extend"])
    stage.given()  # makes its queries
    q, weights = stage.queries
    stage.queries = torch.zeros_like(q), weights
    tensor = stage.backend.select(stage.given(), stage.layer, stage.planned()).positions
    for row, (_, seen) in zip(tensor.tolist(), stage.visible(), strict=True):
        mine = [position for position in row if position >= 0]
        assert len(set(mine)) == min(8, len(seen)) == len(mine) and set(mine) <= set(seen)


def test_keys_that_are_in_the_cache_already_are_not_written_again():
    stage = SparseStage(CASES["decode"])
    batch = stage.planned()
    first = stage.select(batch)
    again = stage.backend.select(replace(stage.given(), k=None), stage.layer, batch)
    assert torch.equal(first.positions, again.positions)


def test_a_batch_in_short_types_chooses_by_float32_scores(monkeypatch):
    monkeypatch.setattr(SparseStage, "score_tolerance", 1e-6)
    SparseStage(replace(CASES["extend"], dtype=DType.BFLOAT16)).check()


# ---- pages and rows that move ----


def test_index_keys_are_copied_and_moved_with_the_pages_and_rows_of_the_cache():
    """A10"""
    stage = SparseStage(CASES["decode"])
    keys, rows = stage.index_keys.keys(LAYER), stage.pool.rows(LAYER).squeeze(2)
    source = int(stage.page_table[2, 0])
    target = next(page for page in range(len(keys)) if keys[page].isnan().all())
    stage.pools.copy_pages([PageCopy(source, target)])
    assert torch.equal(keys[target], keys[source]) and torch.equal(rows[target], rows[source])
    slots = torch.tensor([source * 16 + 3, source * 16 + 5])
    stage.pools.move_rows(slots, slots.flip(0))
    for memory in (keys, rows):
        assert torch.equal(memory[source, [3, 5]], memory[target, [5, 3]])
    assert stage.pools.nbytes == stage.pool.nbytes + stage.index_keys.nbytes


def test_only_layers_with_an_index_of_their_own_have_keys():
    stage = SparseStage(CASES["decode"])
    assert stage.index_keys.layer_ids == (1, LAYER)
    with raises_naming(PoolError, "layer 5", "1, 3"):
        stage.index_keys.keys(LAST)


def test_keys_over_a_hosts_tensors_are_the_same_memory():
    layers = CASES["decode"].layers
    tensors = {layer: torch.zeros(4 * 16, 16) for layer in (1, LAYER)}
    pool = IndexKeyPool.over(layers, tensors, "slots dim", page_size=16, dtype=DType.FLOAT32)
    pool.write(LAYER, torch.tensor([17, -1]), torch.ones(2, 16))
    assert tensors[LAYER][17].all() and tensors[LAYER].count_nonzero() == 16
    assert torch.equal(
        pool.read_keys(LAYER, torch.tensor([[17, 3]])), torch.stack([torch.ones(16), torch.zeros(16)])[None]
    )
