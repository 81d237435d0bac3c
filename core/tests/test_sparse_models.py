"""Sparse layers of a model: choices that are shared, wrappers, halves of a batch, and prefill (A10)."""

from __future__ import annotations

import pytest
import torch

from attnplug import (
    BackendError,
    ExtendPath,
    IndexInputs,
    PlanError,
)
from attnplug.host import (
    ExtendPolicy,
    HybridLinearBackend,
    KVPools,
    MLAWeights,
    ModelAttention,
    SplitBackend,
    TorchNativeBackend,
    plan_forward,
)
from support.recorder import Hookless, Recorder
from support.sparse_scene import CASES, SparseCase, SparseScene


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> SparseCase:
    return request.param


@pytest.fixture
def scene(case: SparseCase) -> SparseScene:
    return SparseScene(case)


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
