"""Refusals of sparse layers: missing selections, selections of another shape, pools that do not fit (A10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import (
    BackendError,
    DType,
    ExtendPath,
    ForwardExtras,
    ForwardMode,
    MLAPool,
    PlanError,
    PoolError,
    Problem,
    Role,
)
from attnplug.host import (
    KVPools,
    ModelAttention,
    plan_forward,
)
from attnplug.registry.assembly import claim_problems, missing_claims
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_conformance.case import LAST, LAYER
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_sparse.selection import select_rows
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import SparseStage, sparse
from stubs import Hookless

CASE = sparse(((40, 1), (7, 1), (90, 1), (8, 1)), ForwardMode.DECODE)


def test_a_sparse_layer_without_selected_rows_is_an_error():
    """A10: nothing is silently dense."""
    stage = SparseStage(CASE)
    batch = stage.planned()
    for call in (lambda: stage.attend(batch, None), lambda: stage.backend.forward_decode(
        stage.q, None, None, stage.layer, batch, save_kv_cache=False)):  # fmt: skip
        with raises_naming(BackendError, "layer 3", "under_test", "extras.selected"):
            call()


def test_selected_rows_for_a_dense_layer_are_an_error():
    stage = SparseStage(CASE)
    dense, rows = replace(stage.layer, indexer=None), torch.zeros(4, 8, dtype=torch.int32)
    with raises_naming(BackendError, "layer 3", "extras.selected"):
        stage.attend(stage.planned(), SelectedPositions(rows), dense)


@pytest.mark.parametrize(
    "rows", [torch.zeros(4, 8), torch.zeros(5, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)]
)
def test_selected_rows_of_another_shape_or_type_are_an_error(rows):
    stage = SparseStage(CASE)
    with raises_naming(BackendError, "extras.selected", "torch.int32", 4):
        stage.attend(stage.planned(), SelectedSlots(rows))


def test_a_backend_that_does_not_know_selected_rows_refuses_them():
    def narrow(context):
        declared = replace(context.declared, extras={"lse", "out"})
        return TorchSparseBackend(replace(context, declared=declared))

    stage = SparseStage(CASE, make=narrow)
    rows = SelectedPositions(torch.zeros(4, 8, dtype=torch.int32))
    with raises_naming(BackendError, "selected", "lse, out"):
        stage.attend(stage.planned(), rows)
    assert ForwardExtras(selected=rows).given() == {"selected"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(4, 3, 16)}, ["index.q", (4, 3, 16), (4, 8, 16)]),
        ({"k": torch.zeros(4, 8)}, ["index.k", (4, 8), (4, 16)]),
        ({"weights": torch.zeros(3, 8)}, ["index.weights", (3, 8)]),
        ({"weights": torch.zeros(4, 8).half()}, ["index.weights", "torch.float16", "torch.float32"]),
    ],
)
def test_an_index_that_is_not_the_layers_is_an_error(change, named):
    stage = SparseStage(CASE)
    with raises_naming(BackendError, *named):
        stage.backend.select(replace(stage.given(), **change), stage.layer, stage.planned())


def test_a_selection_is_made_by_a_plan_of_the_backend_itself():
    """B5"""
    stage = SparseStage(CASE)
    with raises_naming(PlanError, "under_test", "plan"):
        stage.backend.select(stage.given(), stage.layer, stage.batch())
    batch = stage.batch()
    plan_forward(TorchSparseBackend(stage.context), batch)
    with raises_naming(PlanError, "under_test", "instance"):
        stage.backend.select(stage.given(), stage.layer, batch)


def test_a_selection_for_a_layer_without_an_index_of_its_own_is_an_error():
    stage = SparseStage(CASE)
    batch, attention = stage.planned(), ModelAttention(stage.backend, stage.pools)
    dense = replace(stage.layer, indexer=None)
    for layer, named in ((stage.shared, ["layer 3"]), (dense, ["index"])):
        with raises_naming(BackendError, f"layer {layer.layer_id}", *named):
            stage.backend.select(stage.given(), layer, batch)
    for layer, index, named in (
        (stage.shared, stage.given(), ["layer 3"]),
        (stage.layer, None, ["no index"]),
        (dense, stage.given(), ["all rows"]),
    ):
        with raises_naming(BackendError, f"layer {layer.layer_id}", *named):
            select_rows(attention, index, layer, batch)


def test_a_layer_shares_only_what_was_chosen_in_its_own_batch():
    """A10: nothing is silently empty."""
    stage = SparseStage(CASE)
    batch, attention = stage.planned(), ModelAttention(stage.backend, stage.pools)
    with raises_naming(BackendError, f"layer {stage.shared.layer_id}", "layer 3", "none"):
        select_rows(attention, None, stage.shared, batch)
    select_rows(attention, replace(stage.given(), k=None), replace(stage.layer, layer_id=1), batch)
    with raises_naming(BackendError, f"layer {stage.shared.layer_id}", "layer 3", "layer 1"):
        select_rows(attention, None, stage.shared, batch)


def test_pools_without_index_keys_are_refused_for_a_sparse_model():
    stage = SparseStage(CASE)
    with raises_naming(PoolError, "'index keys'", "IndexKeyPool"):
        TorchSparseBackend(replace(stage.context, pools=KVPools(mla=stage.pool)))


def test_index_keys_of_other_pages_than_the_rows_are_refused():
    stage = SparseStage(CASE)
    keys = IndexKeyPool(stage.case.layers, num_pages=3, page_size=16, dtype=DType.FLOAT32, device="cpu")
    with raises_naming(PoolError, "3 pages of 16"):
        replace(stage.context, pools=KVPools(mla=stage.pool, caches={INDEX_KEYS: keys}))


def test_an_mla_pool_holds_rows_of_sparse_layers_as_of_others():
    pool = MLAPool(CASE.layers, num_pages=2, page_size=4, dtype=DType.FLOAT32, device="cpu")
    assert pool.layer_ids == (1, LAYER, LAST)


def test_a_backend_that_claims_selected_rows_must_be_able_to_select_them():
    """D3"""
    stage = SparseStage(CASE)
    backend, declared = Hookless(), stage.context.declared
    backend.claims = replace(declared.claims, mla_extend=frozenset({ExtendPath.ABSORBED}))
    assert [*claim_problems(backend, declared, 16)] == [
        "it claims the extra selected, but has no select(index: IndexInputs, layer: LayerSpec, batch: ForwardBatch) -> "
        "SelectedRows"
    ]


def test_a_backend_that_is_built_with_less_than_a_sparse_model_needs_is_found():
    """D3"""
    stage = SparseStage(CASE)
    claims, problem = stage.backend.claims, Problem(stage.context.model)
    assert [*missing_claims(claims, problem, [Role.PREFILL, Role.DECODE])] == []
    less = replace(claims, extras={"lse"}, mla_extend={ExtendPath.ONE_SHOT})
    extra, path = missing_claims(less, problem, [Role.PREFILL])
    assert "extra selected" in extra and "absorbed" in path
