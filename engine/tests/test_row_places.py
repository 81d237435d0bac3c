"""New rows of MLA layers that the host's own kernel stores: their slots, and the backends that must be given the
rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import BackendError, ExtendPath, ForwardMode, MLAPool, Plan, PlanError
from attnplug.auto.fastest import FastestBackend
from attnplug.host import ExtendPolicy, MLADims, ModelAttention
from attnplug.sparse import IndexerDims
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_engine.kernels.row_places import RowPlaces, row_places
from attnplug_testing.errors import raises_naming
from attnplug_testing.stage import Stage, error, small

DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
MODES = {
    ForwardMode.DECODE: ((20, 1), (7, 1), (0, 1)),
    ForwardMode.TARGET_VERIFY: ((20, 3), (7, 3)),
    ForwardMode.EXTEND: ((20, 9), (0, 5)),
    ForwardMode.MIXED: ((20, 1), (0, 9)),
}


class Model(UpProjected):
    """One MLA layer with random up-projections, with rows of padding after those of the requests."""

    def __init__(self, mode: ForwardMode = ForwardMode.DECODE, **changes: Any) -> None:
        self.stage = Stage(small(MODES[mode], mode, mla=DIMS, padding=2, **changes), "cpu")
        super().__init__(self.stage)
        self.layer, self.pool = self.stage.layer, self.stage.pools.mla
        self.attention = ModelAttention(self.stage.backend, self.stage.pools, ExtendPolicy(forced=ExtendPath.ABSORBED))
        self.planned_batch = self.stage.batch()

    def places(self, dtype: torch.dtype = torch.float32, tokens: int | None = None) -> RowPlaces | None:
        batch = self.planned_batch
        return row_places(self.attention, self.layer, batch, batch.num_tokens if tokens is None else tokens, dtype)

    def attended(self) -> torch.Tensor:
        """Attend with absorbed queries, after storing the rows at the slots from ``row_places``."""
        batch = self.planned_batch
        self.attention.plan(batch)
        places = self.places()
        assert places is not None
        for slot, row in zip(places.slots.tolist(), self.stage.new_rows(self.stage.keys).squeeze(1), strict=False):
            if slot >= 0:
                places.cache[slot] = row
        q = torch.cat((self.q, torch.full((2, *self.q.shape[1:]), torch.nan)))
        return self.attention.attend_mla(self.weights.absorb(q), None, self.layer, self.weights, batch)


def bits(pool: MLAPool) -> torch.Tensor:
    return pool.rows(3).view(torch.uint8)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_stored_are_attended_to_and_written_once(mode, monkeypatch):
    """B5: a step leaves the bytes in the cache that it leaves with rows, nothing for padding, and the same result."""
    given, stored = Model(mode), Model(mode)
    wanted = given.run(ExtendPolicy(forced=ExtendPath.ABSORBED))
    monkeypatch.setattr(MLAPool, "write", lambda *_: pytest.fail("written again"))
    found = stored.attended()
    assert torch.equal(found, wanted) and error(found[: len(stored.q)], stored.wanted()) <= 2e-6
    assert torch.equal(bits(stored.pool), bits(given.pool))


@pytest.mark.parametrize("wrap", [lambda b: SplitBackend(b, b), lambda b: FastestBackend({"a": b}, {"decode": "a"})])
def test_a_wrappers_plan_says_it_by_its_parts(wrap):
    model = Model()
    model.attention = ModelAttention(wrap(model.stage.backend), model.stage.pools)
    assert error(model.attended()[: len(model.q)], model.wanted()) <= 2e-6


def test_a_place_is_the_cache_itself_at_the_slots_of_the_plan():
    model = Model()
    model.attention.plan(model.planned_batch)
    places = model.places()
    assert places.cache.data_ptr() == model.pool.rows(3).data_ptr()
    assert places.cache.shape == (model.pool.num_pages * model.pool.page_size, 40)
    assert places.slots is model.planned_batch.plan.attention.new_slots


def test_rows_that_somebody_needs_have_no_place():
    """Such rows are rounded to another type, belong to a sparse layer that may keep them on the host, or are read by
    MHA."""
    model = Model()
    assert model.places() is None  # not planned
    model.attention.plan(model.planned_batch)
    assert model.places() is not None
    assert model.places(torch.bfloat16) is None
    model.layer = replace(model.layer, indexer=IndexerDims(heads=2, head_dim=16, topk=4))
    assert model.places() is None
    as_mha = Model(ForwardMode.EXTEND)
    as_mha.attention.plan(as_mha.planned_batch, ExtendPath.CHUNKED)
    assert as_mha.places() is None
    with raises_naming(BackendError, "layer 3", "MHA"):
        as_mha.attention.attend_mla(as_mha.q, None, as_mha.layer, as_mha.weights, as_mha.planned_batch)


def test_a_batch_of_which_a_part_runs_as_mha_has_no_place():
    model = Model(ForwardMode.MIXED)
    now = ExtendPolicy(split_threshold=0, query_threshold=0)
    model.attention = ModelAttention(model.stage.backend, model.stage.pools, now)
    model.attention.plan(model.planned_batch)
    assert model.planned_batch.plan.halves and model.places() is None


def test_without_rows_queries_are_absorbed_already():
    model = Model()
    model.attention.plan(model.planned_batch)
    heads = model.layer.num_heads
    with raises_naming(BackendError, f"(3, {heads}, 24)", f"[rows, {heads}, 40]"):
        model.attention.attend_mla(model.q, None, model.layer, model.weights, model.planned_batch)


def test_a_plan_without_slots_gives_no_place(monkeypatch):
    model = Model()
    backend = model.stage.backend
    monkeypatch.setattr(backend, "plan", lambda geometry: Plan.of(backend.backend_id, geometry))
    model.attention.plan(model.planned_batch)
    assert model.places() is None


def test_a_stale_plan_gives_no_place():
    """B5: rows are stored before attention could refuse the plan."""
    model = Model()
    model.attention.plan(model.planned_batch)
    with raises_naming(PlanError, 2, 3):
        model.places(tokens=2)
    model.planned_batch.geometry = replace(model.planned_batch.geometry)
    with raises_naming(PlanError, "geometry"):
        model.places()


def test_a_model_without_mla_has_no_place():
    attention = ModelAttention(Model().stage.backend, replace(Model().stage.pools, mla=None))
    assert row_places(attention, Model().layer, Model().planned_batch, 1, torch.float32) is None
