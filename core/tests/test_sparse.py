"""Sparse MLA in torch_native: what is chosen, what is read, and which rows move together (A10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import (
    DType,
    IndexInputs,
    IndexKeyPool,
    PoolError,
    SelectedPositions,
)
from attnplug.host import (
    MLADims,
    PageCopy,
)
from support.sparse_scene import CASES, LAYER, NAN, SHARED, SparseCase, SparseScene
from support.stage import error

TOLERANCE = 3e-6


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> SparseCase:
    return request.param


@pytest.fixture
def scene(case: SparseCase) -> SparseScene:
    return SparseScene(case)


def test_each_token_is_given_the_rows_with_the_largest_scores_that_it_sees(scene):
    """A10"""
    selected = scene.backend.select(scene.index(), scene.layer, scene.planned())
    assert scene.positions(selected) == scene.chosen()


def test_a_layer_attends_to_the_chosen_rows_as_float64_does(scene):
    """A10"""
    batch = scene.planned()
    out, lse = scene.attend(batch, scene.backend.select(scene.index(), scene.layer, batch))
    wanted, wanted_lse = scene.wanted()
    tokens = len(wanted)
    assert error(out[:tokens], wanted) < TOLERANCE
    assert error(lse[:tokens], wanted_lse) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_chooses_and_attends_as_float64_does(case):
    scene = SparseScene(case, "cuda")
    batch = scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    assert scene.positions(selected) == scene.chosen()
    wanted = scene.wanted()[0]
    assert error(scene.attend(batch, selected)[0][: len(wanted)], wanted) < TOLERANCE


def test_padding_selects_nothing_gives_zero_and_is_written_nowhere():
    """B5"""
    scene = SparseScene(CASES["padding"])
    batch, tokens = scene.planned(), len(scene.q)
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    assert selected.positions.shape == (tokens + 3, 8) and (selected.positions[tokens:] == -1).all()
    out, lse = scene.attend(batch, selected)
    assert not out[tokens:].any() and lse[tokens:].isneginf().all()
    assert sum(map(int, (~scene.keys.keys(LAYER).isnan().any(-1)).sum(1))) == sum(scene.totals)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=5), st.integers(1, 60))
@settings(max_examples=25)
def test_any_batch_is_served_as_float64_serves_it(lengths, topk):
    """A10"""
    scene = SparseScene(SparseCase(tuple(lengths), topk=topk, page_size=4, index_heads=12, seed=topk))
    batch = scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    found = scene.positions(selected)
    for token, ((request, seen), mine) in enumerate(zip(scene.visible(), found, strict=True)):
        # By their scores, not by their numbers: relu makes ties.
        assert len(mine) == min(topk, len(seen)) and set(mine) <= set(seen)
        best = scene.scores(token, request, seen).sort(descending=True).values[: len(mine)]
        assert torch.allclose(scene.scores(token, request, mine).sort(descending=True).values, best, atol=1e-5)
    assert error(scene.attend(batch, selected)[0], scene.wanted(found)[0]) < TOLERANCE


@pytest.mark.parametrize("name", ["decode", "extend after prefixes", "mixed", "verify"])
def test_where_all_visible_rows_are_chosen_the_result_is_that_of_a_dense_layer_bit_for_bit(name):
    """A10"""
    outs = []
    for sparse in (True, False):
        scene = SparseScene(replace(CASES[name], topk=128))
        batch, layer = scene.planned(), scene.layer if sparse else replace(scene.layer, indexer=None)
        selected = scene.backend.select(scene.index(), layer, batch) if sparse else None
        outs.append(scene.attend(batch, selected, layer))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


def test_a_choice_of_fewer_rows_than_are_visible_is_heeded_though_all_would_fit():
    scene = SparseScene(replace(CASES["decode"], topk=128))
    batch, choices = scene.planned(), [[2, 5], [0], [89, 3, 90], [8]]
    rows = torch.tensor([row + [-1] * (128 - len(row)) for row in choices], dtype=torch.int32)
    out, lse = scene.attend(batch, SelectedPositions(rows))
    wanted, wanted_lse = scene.wanted(choices)
    assert error(out, wanted) < TOLERANCE and error(lse, wanted_lse) < TOLERANCE


@pytest.mark.parametrize("name", ["decode", "verify", "extend after prefixes"])
def test_rows_that_were_not_chosen_are_never_read(name):
    """A10"""
    scene = SparseScene(CASES[name])
    wanted, batch = scene.wanted()[0], scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    used = {
        (request, position)
        for (request, _), mine in zip(scene.visible(), scene.positions(selected), strict=True)
        for position in mine
    }
    poisoned = 0
    for request, (before, _) in enumerate(scene.case.lengths):
        for position in {place for place in range(scene.totals[request]) if (request, place) not in used}:
            scene.rows[request][position] = NAN
            if position < before:
                scene.mla.rows(LAYER).squeeze(2)[scene.where(request, position)] = NAN
            poisoned += 1
    assert poisoned > 20
    assert error(scene.attend(batch, selected)[0], wanted) < TOLERANCE


def test_slots_and_positions_of_the_same_rows_give_the_same(scene):
    if scene.case.padding:
        return
    batch = scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    by_position, by_slot = (scene.attend(batch, each)[0] for each in (selected, scene.as_slots(selected)))
    assert torch.equal(by_position, by_slot)


def test_a_token_without_chosen_rows_gives_zero():
    scene = SparseScene(CASES["decode"])
    rows = torch.full((4, 8), -1, dtype=torch.int32)
    rows[1, 0] = 3
    out, lse = scene.attend(scene.planned(), SelectedPositions(rows))
    assert not out[[0, 2, 3]].any() and lse[[0, 2, 3]].isneginf().all()
    assert out[1].any() and lse[1].isfinite().all()


def test_equal_scores_give_as_many_rows_as_any():
    scene = SparseScene(CASES["extend after prefixes"])
    scene.index_q.zero_()
    found = scene.positions(scene.backend.select(scene.index(), scene.layer, scene.planned()))
    assert all(
        len(mine) == min(8, len(seen)) and set(mine) <= set(seen)
        for mine, (_, seen) in zip(found, scene.visible(), strict=True)
    )


def test_keys_that_are_in_the_cache_already_are_not_written_again():
    scene = SparseScene(CASES["decode"])
    batch = scene.planned()
    first = scene.backend.select(scene.index(), scene.layer, batch)
    index = scene.index()
    again = scene.backend.select(IndexInputs(index.q, None, index.weights), scene.layer, batch)
    assert torch.equal(first.positions, again.positions)


def test_a_batch_in_short_types_chooses_by_float32_scores():
    scene = SparseScene(replace(CASES["extend after prefixes"], dtype=DType.BFLOAT16, seed=4))
    batch = scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    assert scene.positions(selected) == scene.chosen()
    assert error(scene.attend(batch, selected)[0], scene.wanted()[0]) < 1e-2


@pytest.mark.parametrize("name", ["decode", "extend after prefixes", "verify"])
def test_keys_in_fp8_choose_rows_whose_scores_are_among_the_best(name):
    """Rounding may change places at the border, and no more: what is left out is hardly better than what is taken."""
    scene = SparseScene(replace(CASES[name], index_dtype=DType.FLOAT8_E4M3, seed=3))
    selected = scene.backend.select(scene.index(), scene.layer, scene.planned())
    for token, ((request, seen), chosen) in enumerate(zip(scene.visible(), scene.positions(selected), strict=True)):
        scores = scene.scores(token, request, seen)
        assert len(chosen) == min(len(seen), scene.case.topk)
        best = scores.sort(descending=True).values[: len(chosen)]
        mine = scores[[seen.index(position) for position in chosen]].sort(descending=True).values
        assert float((best - mine).max()) <= 0.05 * float(scores.abs().max())


@pytest.mark.parametrize("name", ["decode", "extend after prefixes"])
def test_latent_rows_with_scales_of_their_own_are_attended_to_as_float64_does(name):
    wide = MLADims(kv_lora_rank=128, qk_nope_head_dim=16, qk_rope_head_dim=8)
    scene = SparseScene(replace(CASES[name], dims=wide, dtype=DType.BFLOAT16, kv_dtype=DType.FP8_DS_MLA))
    batch = scene.planned()
    selected = scene.backend.select(scene.index(), scene.layer, batch)
    out, lse = scene.attend(batch, selected)
    wanted, wanted_lse = scene.wanted(scene.positions(selected))
    assert error(out, wanted) < 1e-2 and error(lse, wanted_lse) < 1e-2


# ---- pages and rows that move ----


def test_index_keys_are_copied_and_moved_with_the_pages_and_rows_of_the_cache():
    """A10"""
    scene = SparseScene(CASES["decode"])
    keys, rows = scene.keys.keys(LAYER), scene.mla.rows(LAYER).squeeze(2)
    source = int(scene.page_table[2, 0])
    target = next(page for page in range(len(keys)) if keys[page].isnan().all())
    scene.pools.copy_pages([PageCopy(source, target)])
    assert torch.equal(keys[target], keys[source]) and torch.equal(rows[target], rows[source])
    slots = torch.tensor([source * 16 + 3, source * 16 + 5])
    scene.pools.move_rows(slots, slots.flip(0))
    for memory in (keys, rows):
        assert torch.equal(memory[source, [3, 5]], memory[target, [5, 3]])
    assert scene.pools.nbytes == scene.mla.nbytes + scene.keys.nbytes


def test_only_layers_with_an_index_of_their_own_have_keys():
    scene = SparseScene(CASES["decode"])
    assert scene.keys.layer_ids == (1, LAYER)
    with pytest.raises(PoolError, match="the index key pool has no layer 5; it has 1, 3"):
        scene.keys.keys(SHARED)


def test_keys_over_a_hosts_tensors_are_the_same_memory():
    layers = CASES["decode"].layers
    tensors = {layer: torch.zeros(4 * 16, 16) for layer in (1, LAYER)}
    pool = IndexKeyPool.over(layers, tensors, "slots dim", page_size=16, dtype=DType.FLOAT32)
    pool.write(LAYER, torch.tensor([17, -1]), torch.ones(2, 16))
    assert tensors[LAYER][17].all() and tensors[LAYER].count_nonzero() == 16
    assert torch.equal(
        pool.read_keys(LAYER, torch.tensor([[17, 3]])), torch.stack([torch.ones(16), torch.zeros(16)])[None]
    )
