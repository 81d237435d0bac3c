"""Sparse MLA in torch_native, and the contract around it: what is chosen, what is read, and what is refused (A10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import (
    INDEX_KEYS,
    BackendError,
    DType,
    ExtendPath,
    ForwardExtras,
    ForwardMode,
    IndexInputs,
    IndexKeyPool,
    MLAPool,
    PlanError,
    PoolError,
    Problem,
    Role,
    SelectedPositions,
    SelectedSlots,
)
from attnplug.choose.building import claim_problems, unmet
from attnplug.host import (
    ExtendPolicy,
    HybridLinearBackend,
    KVPools,
    MLADims,
    MLAWeights,
    ModelAttention,
    PageCopy,
    SplitBackend,
    TorchNativeBackend,
    plan_forward,
)
from support.recorder import Hookless, Recorder
from support.sparse_scene import LAYER, NAN, SHARED, SparseCase, SparseScene
from support.stage import error
from support.trees import random_trees

TOLERANCE = 3e-6
CASES = {
    "decode": SparseCase(((40, 1), (7, 1), (90, 1), (8, 1)), ForwardMode.DECODE),
    "extend": SparseCase(((0, 37), (0, 5), (0, 9))),
    "extend after prefixes": SparseCase(((50, 20), (3, 4), (16, 33), (5, 4))),
    "mixed": SparseCase(((33, 1), (0, 25), (64, 1), (2, 1)), ForwardMode.MIXED),
    "verify": SparseCase(((30, 4), (6, 4), (47, 4)), ForwardMode.TARGET_VERIFY),
    "verify of trees": SparseCase(((30, 6), (3, 6)), ForwardMode.TARGET_VERIFY, trees=random_trees(2, 6)),
    "pages of one token": SparseCase(((20, 3), (11, 8)), page_size=1),
    "one row of choice": SparseCase(((20, 3), (0, 8)), topk=1),
    "padding": SparseCase(((40, 1), (7, 1)), ForwardMode.DECODE, padding=3),
}


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


# ---- all attention of a model ----


def weights(scene: SparseScene) -> MLAWeights:
    heads, dims = scene.case.heads, scene.case.dims
    return MLAWeights(
        scene.normal(heads, dims.qk_nope_head_dim, dims.kv_lora_rank),
        scene.normal(heads, dims.kv_lora_rank, scene.case.v_head_dim),
    )


def run(scene: SparseScene, backend=None, policy: ExtendPolicy | None = None) -> list[torch.Tensor]:
    """The layer under test and the one that shares its choice, by the facade."""
    attention, up = ModelAttention(backend or scene.backend, scene.pools, policy), weights(scene)
    batch = scene.batch()
    attention.plan(batch)
    q = scene.padded(scene.normal(len(scene.q), scene.case.heads, scene.layer.head_dim))
    rows, outs = scene.padded(scene.new_rows(scene.rows)), []
    for layer, index in ((scene.layer, scene.index()), (scene.shared, None)):
        selected = attention.select(index, layer, batch)
        outs.append(attention.attend_mla(q, rows, layer, up, batch, selected=selected))
    return outs


def test_a_layer_that_shares_a_choice_attends_as_if_it_had_chosen_the_same(scene):
    """A10"""
    own, shared = run(scene)
    assert torch.equal(own, shared) and own.isfinite().all()


@pytest.mark.parametrize("name", ["decode", "extend after prefixes", "verify", "padding"])
def test_wrappers_forward_the_selection_and_what_was_selected(name):
    """A9"""
    wanted = run(SparseScene(CASES[name]))
    scene = SparseScene(CASES[name])
    split = SplitBackend(scene.backend, TorchNativeBackend(scene.context))
    hybrid = HybridLinearBackend(split, Recorder("linear"), scene.context.model)
    assert "selected" in hybrid.claims.extras
    assert all(map(torch.equal, run(scene, hybrid), wanted))


def test_a_split_is_as_sparse_as_the_weaker_of_both():
    """A9"""
    scene = SparseScene(CASES["decode"])
    split = SplitBackend(scene.backend, Hookless())
    assert "selected" not in split.claims.extras and split.who_forced("extras") == ("hookless",)
    batch = scene.batch()
    plan_forward(split, batch)
    with pytest.raises(BackendError, match="needs select of its decode backend hookless, which has none"):
        split.select(scene.index(), scene.layer, batch)


def test_a_backend_without_selection_is_found_when_a_sparse_model_is_put_on_it():
    scene = SparseScene(CASES["decode"])
    with pytest.raises(BackendError, match="has sparse layers, but backend hookless has no select; choose one that"):
        ModelAttention(Hookless(), scene.pools)


def test_halves_of_a_batch_keep_their_own_choices():
    """B4"""
    scene = SparseScene(SparseCase(((20, 6), (0, 9), (40, 3))))
    whole = run(scene)
    scene = SparseScene(scene.case)
    attention, up = ModelAttention(scene.backend, scene.pools), weights(scene)
    batch = scene.batch()
    halves = batch.split(1, lanes=(0, 0), cut=4)
    attention.plan_halves(batch, halves)
    q, rows = scene.normal(18, scene.case.heads, scene.layer.head_dim), scene.new_rows(scene.rows)
    index, outs = scene.index(), []
    for layer in (scene.layer, scene.shared):
        parts = []
        for half, part in zip(halves, (slice(0, 10), slice(10, 18)), strict=True):
            given = IndexInputs(index.q[part], index.k[part], index.weights[part]) if layer is scene.layer else None
            selected = attention.select(given, layer, half)
            parts.append(attention.attend_mla(q[part], rows[part], layer, up, half, selected=selected))
        outs.append(torch.cat(parts))
    for found, wanted in zip(outs, whole, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


def test_a_sparse_prefill_runs_absorbed_and_no_other_path_can_be_asked_for():
    """C1"""
    scene = SparseScene(CASES["extend"])
    assert ExtendPath.ONE_SHOT in scene.backend.claims.mla_extend
    attention, batch = ModelAttention(scene.backend, scene.pools), scene.batch()
    attention.plan(batch)
    assert batch.plan.extend is None and not batch.geometry.calls
    with pytest.raises(PlanError, match=r"path one_shot is asked for, .* run absorbed only; ask for that one"):
        run(scene, policy=ExtendPolicy(forced=ExtendPath.ONE_SHOT))


# ---- what is refused ----


def test_a_sparse_layer_without_selected_rows_is_an_error():
    """A10: nothing is silently dense."""
    scene = SparseScene(CASES["decode"])
    batch = scene.planned()
    for call in (lambda: scene.attend(batch, None), lambda: scene.backend.forward_decode(
        scene.q, None, None, scene.layer, batch, save_kv_cache=False)):  # fmt: skip
        with pytest.raises(BackendError, match="layer 3 attends to rows that an index chooses, but backend under_test"):
            call()


def test_selected_rows_for_a_dense_layer_are_an_error():
    scene = SparseScene(CASES["decode"])
    dense, rows = replace(scene.layer, indexer=None), torch.zeros(4, 8, dtype=torch.int32)
    with pytest.raises(BackendError, match=r"layer 3 attends to all rows, but extras\.selected were given"):
        scene.attend(scene.planned(), SelectedPositions(rows), dense)


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, 8), torch.zeros(5, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)]
)
def test_selected_rows_of_another_shape_or_type_are_an_error(rows):
    scene = SparseScene(CASES["decode"])
    with pytest.raises(BackendError, match=r"extras.selected is .* give torch.int32 of shape \[4, rows chosen\]"):
        scene.attend(scene.planned(), SelectedSlots(rows))


def test_a_backend_that_does_not_know_selected_rows_refuses_them():
    scene = SparseScene(CASES["decode"])

    def narrow(context):
        declared = replace(context.declared, extras={"lse", "out"})
        return TorchNativeBackend(replace(context, declared=declared))

    scene = SparseScene(CASES["decode"], build=narrow)
    rows = SelectedPositions(torch.zeros(4, 8, dtype=torch.int32))
    with pytest.raises(BackendError, match="was asked for selected; it knows lse, out"):
        scene.attend(scene.planned(), rows)
    assert ForwardExtras(selected=rows).asked() == {"selected"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(4, 3, 16)}, r"index.q has shape \(4, 3, 16\); give \(4, 8, 16\) for 4 tokens"),
        ({"k": torch.zeros(4, 8)}, r"index.k has shape \(4, 8\); give \(4, 16\)"),
        ({"weights": torch.zeros(3, 8)}, r"index.weights has shape \(3, 8\)"),
        ({"weights": torch.zeros(4, 8).half()}, "index.weights is torch.float16; give torch.float32"),
    ],
)
def test_an_index_that_is_not_the_layers_is_an_error(change, message):
    scene = SparseScene(CASES["decode"])
    with pytest.raises(BackendError, match=message):
        scene.backend.select(replace(scene.index(), **change), scene.layer, scene.planned())


def test_a_selection_is_made_by_a_plan_of_the_backend_itself():
    """B5"""
    scene = SparseScene(CASES["decode"])
    with pytest.raises(PlanError, match="has no plan"):
        scene.backend.select(scene.index(), scene.layer, scene.batch())
    batch = scene.batch()
    plan_forward(TorchNativeBackend(scene.context), batch)
    with pytest.raises(PlanError, match="another instance of it"):
        scene.backend.select(scene.index(), scene.layer, batch)


def test_a_selection_for_a_layer_without_an_index_of_its_own_is_an_error():
    scene = SparseScene(CASES["decode"])
    batch, attention = scene.planned(), ModelAttention(scene.backend, scene.pools)
    dense = replace(scene.layer, indexer=None)
    for layer, why in ((scene.shared, "takes over the choice of layer 3"), (dense, "has no index")):
        with pytest.raises(BackendError, match=why):
            scene.backend.select(scene.index(), layer, batch)
    for layer, index, why in (
        (scene.shared, scene.index(), "takes over the choice of layer 3, and was to select rows by an index"),
        (scene.layer, None, "has an index of its own, and was to select rows by no index"),
        (dense, scene.index(), "attends to all rows, and was to select rows by an index"),
    ):
        with pytest.raises(BackendError, match=why):
            attention.select(index, layer, batch)


def test_a_layer_shares_only_what_was_chosen_in_its_own_batch():
    """A10: nothing is silently empty."""
    scene = SparseScene(CASES["decode"])
    batch, attention = scene.planned(), ModelAttention(scene.backend, scene.pools)
    with pytest.raises(BackendError, match="attends to the rows that layer 3 chose, and in this batch none has chosen"):
        attention.select(None, scene.shared, batch)
    attention.select(replace(scene.index(), k=None), replace(scene.layer, layer_id=1), batch)
    with pytest.raises(BackendError, match="layer 3 chose, and in this batch the last to choose was layer 1"):
        attention.select(None, scene.shared, batch)


def test_pools_without_index_keys_are_refused_for_a_sparse_model():
    scene = SparseScene(CASES["decode"])
    with pytest.raises(PoolError, match="the pools hold no cache 'index keys' of class IndexKeyPool"):
        TorchNativeBackend(replace(scene.context, pools=KVPools(mla=scene.mla)))


def test_index_keys_of_other_pages_than_the_rows_are_refused():
    scene = SparseScene(CASES["decode"])
    keys = IndexKeyPool(scene.case.layers, num_pages=3, page_size=16, dtype=DType.FLOAT32, device="cpu")
    with pytest.raises(PoolError, match="the index keys have 3 pages of 16, and the latent rows"):
        replace(scene.context, pools=KVPools(mla=scene.mla, caches={INDEX_KEYS: keys}))


def test_a_sparse_layer_of_a_batch_that_was_planned_as_mha_is_an_error():
    scene = SparseScene(CASES["extend"])
    attention = ModelAttention(scene.backend, KVPools(mla=scene.mla))  # its host forgot the index keys
    batch = scene.batch()
    attention.plan(batch)
    q = scene.normal(len(scene.q), scene.case.heads, scene.layer.head_dim)
    with pytest.raises(BackendError, match="layer 3 is sparse, and the batch was planned to run as MHA"):
        attention.attend_mla(q, scene.new_rows(scene.rows), scene.layer, weights(scene), batch)
    with pytest.raises(BackendError, match="the model was built without a pool of index keys"):
        attention.select(scene.index(), scene.layer, batch)


def test_an_mla_pool_holds_rows_of_sparse_layers_as_of_others():
    pool = MLAPool(CASES["decode"].layers, num_pages=2, page_size=4, dtype=DType.FLOAT32, device="cpu")
    assert pool.layer_ids == (1, LAYER, SHARED)


def test_a_backend_that_claims_selected_rows_must_be_able_to_select_them():
    """D3"""
    scene = SparseScene(CASES["decode"])
    backend, declared = Hookless(), scene.context.declared
    backend.claims = replace(declared.claims, mla_extend=frozenset({ExtendPath.ABSORBED}))
    assert [*claim_problems(backend, declared, 16)] == [
        "it claims the extra selected, but has no select(index: IndexInputs, layer: LayerSpec, batch: ForwardBatch) -> "
        "SelectedRows"
    ]


def test_a_backend_that_is_built_with_less_than_a_sparse_model_needs_is_found():
    """D3"""
    scene = SparseScene(CASES["decode"])
    claims, problem = scene.backend.claims, Problem(scene.context.model)
    assert [*unmet(claims, problem, [Role.PREFILL, Role.DECODE])] == []
    less = replace(claims, extras={"lse"}, mla_extend={ExtendPath.ONE_SHOT})
    assert [*unmet(less, problem, [Role.PREFILL])] == [
        "the model's sparse layers need the extra selected, but what was built claims the extras lse",
        "it was chosen to prefill sparse MLA, which runs absorbed, but what was built claims no absorbed extend",
    ]
