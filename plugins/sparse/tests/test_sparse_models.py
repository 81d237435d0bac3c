"""Sparse layers of a model: choices that are shared, wrappers, halves of a batch, and prefill (A10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError, ExtendPath, ForwardMode, PlanError
from attnplug.host import ExtendPolicy, KVPools, MLAWeights, ModelAttention, plan_forward
from attnplug.sparse import IndexInputs
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_conformance.arithmetic import pad_rows
from attnplug_engine.execution.two_batch import BatchSplit, plan_halves, split_batch
from attnplug_sparse.selection import select_rows
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import SparseStage, sparse
from stubs import Hookless, Linear

CASES = {
    "decode": sparse(((40, 1), (7, 1), (90, 1), (8, 1)), ForwardMode.DECODE),
    "extend": sparse(((50, 20), (3, 4), (16, 33), (5, 4))),
    "verify": sparse(((30, 4), (6, 4), (47, 4)), ForwardMode.TARGET_VERIFY),
    "padding": sparse(((40, 1), (7, 1)), ForwardMode.DECODE, padding=3),
}


def weights(stage: SparseStage) -> MLAWeights:
    heads, dims = stage.layer.num_heads, stage.case.mla
    return MLAWeights(
        stage.normal(heads, dims.qk_nope_head_dim, dims.kv_lora_rank),
        stage.normal(heads, dims.kv_lora_rank, stage.case.v_head_dim),
    )


def run(stage: SparseStage, backend=None, policy: ExtendPolicy | None = None) -> list[torch.Tensor]:
    """The layer under test and the one that shares its choice, by the facade."""
    stage.store_shared()
    attention, up = ModelAttention(backend or stage.backend, stage.pools, policy), weights(stage)
    batch = stage.batch()
    attention.plan(batch)
    tokens = batch.num_tokens
    q = pad_rows(stage.normal(len(stage.q), stage.layer.num_heads, stage.layer.head_dim), tokens)
    rows, outs = stage.inputs(tokens)[1].squeeze(1), []
    for layer, index in ((stage.layer, stage.given()), (stage.shared, None)):
        selected = select_rows(attention, index, layer, batch)
        outs.append(attention.attend_mla(q, rows, layer, up, batch, selected=selected))
    return outs


@pytest.mark.parametrize("name", CASES)
def test_a_layer_that_shares_a_choice_attends_as_if_it_had_chosen_the_same(name):
    """A10"""
    own, shared = run(SparseStage(CASES[name]))
    assert torch.equal(own, shared) and own.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_wrappers_forward_the_selection_and_what_was_selected(name):
    """A9"""
    wanted = run(SparseStage(CASES[name]))
    stage = SparseStage(CASES[name])
    split = SplitBackend(stage.backend, TorchSparseBackend(stage.context))
    hybrid = HybridLinearBackend(split, Linear(), stage.context.model)
    assert "selected" in hybrid.claims.extras
    assert all(map(torch.equal, run(stage, hybrid), wanted))


def test_a_split_is_as_sparse_as_the_weaker_of_both():
    """A9"""
    stage = SparseStage(CASES["decode"])
    split = SplitBackend(stage.backend, Hookless())
    assert "selected" not in split.claims.extras and split.limiting_children["extras"] == ("decode",)
    batch = stage.batch()
    plan_forward(split, batch)
    with raises_naming(BackendError, "select", "decode", "hookless"):
        split.select(stage.given(), stage.layer, batch)


def test_a_backend_without_selection_is_found_when_a_sparse_model_is_put_on_it():
    stage = SparseStage(CASES["decode"])
    with raises_naming(BackendError, "index keys", "hookless", "select"):
        ModelAttention(Hookless(), stage.pools)


def test_halves_of_a_batch_keep_their_own_choices():
    """B4"""
    stage = SparseStage(sparse(((20, 6), (0, 9), (40, 3))))
    whole = run(stage)
    stage = SparseStage(stage.case)
    stage.store_shared()
    attention, up = ModelAttention(stage.backend, stage.pools), weights(stage)
    batch = stage.batch()
    halves = split_batch(batch, BatchSplit(1, 4), (0, 0))
    plan_halves(attention, batch, halves)
    q, rows = stage.normal(18, stage.layer.num_heads, stage.layer.head_dim), stage.new_rows(stage.keys).squeeze(1)
    index, outs = stage.given(), []
    for layer in (stage.layer, stage.shared):
        parts = []
        for half, part in zip(halves, (slice(0, 10), slice(10, 18)), strict=True):
            given = IndexInputs(index.q[part], index.k[part], index.weights[part]) if layer is stage.layer else None
            selected = select_rows(attention, given, layer, half)
            parts.append(attention.attend_mla(q[part], rows[part], layer, up, half, selected=selected))
        outs.append(torch.cat(parts))
    for found, wanted in zip(outs, whole, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


class AlsoAsMHA(TorchSparseBackend):
    """Claims to run dense MLA as MHA, too."""

    def __init__(self, context):
        super().__init__(context, replace(context.declared.claims, mla_extend=frozenset(ExtendPath)))

    def forward_ragged(self, q, k, v, layer, call, plan=None, lse=None):
        raise NotImplementedError


def test_a_sparse_prefill_runs_absorbed_and_no_other_path_can_be_asked_for():
    """C1"""
    stage = SparseStage(CASES["extend"], make=AlsoAsMHA)
    assert ExtendPath.ONE_SHOT in stage.backend.claims.mla_extend
    attention, batch = ModelAttention(stage.backend, stage.pools), stage.batch()
    attention.plan(batch)
    assert batch.plan.extend is None and not batch.geometry.calls
    with raises_naming(PlanError, "one_shot", "absorbed"):
        run(stage, policy=ExtendPolicy(forced=ExtendPath.ONE_SHOT))


def test_a_sparse_layer_of_a_batch_that_was_planned_as_mha_is_an_error():
    stage = SparseStage(sparse(((0, 37), (0, 5))), make=AlsoAsMHA)
    attention = ModelAttention(stage.backend, KVPools(mla=stage.pool))  # its host forgot the index keys
    batch = stage.batch()
    attention.plan(batch)
    q = stage.normal(len(stage.q), stage.layer.num_heads, stage.layer.head_dim)
    with raises_naming(BackendError, "layer 3", "MHA"):
        attention.attend_mla(q, stage.new_rows(stage.keys).squeeze(1), stage.layer, weights(stage), batch)
