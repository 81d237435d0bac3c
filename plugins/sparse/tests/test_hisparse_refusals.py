"""Refusals of HiSparse: other rows, pools and coordinators, small buffers, and backends that do not claim it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug import (
    BackendError,
    ForwardExtras,
    ForwardMode,
    ModelSpec,
    PlanError,
    PoolError,
    Problem,
    Role,
    UsageError,
)
from attnplug.kernels import PageCopy
from attnplug.sparse import SelectedPositions, SelectedSlots
from attnplug_sparse.hisparse import HostRows, HotSizes
from attnplug_sparse.plugin import attnplug_backends
from attnplug_sparse.torch_sparse import TorchSparseBackend
from attnplug_testing.errors import raises_naming
from attnplug_testing.sparse_scene import HotStage, SparseStage, sparse
from hisparse_trace import DIM, Trace, layers

DECODE = sparse(((30, 1), (5, 1), (90, 1)), ForwardMode.DECODE)


def refuse(**changes: Any) -> None:
    """Attend by a batch or a choice that is not as HiSparse needs it."""
    stage = HotStage(DECODE)
    batch = stage.planned()
    selected = stage.select(batch)
    extras = ForwardExtras(selected=changes.get("selected", selected))
    if "geometry" in changes:
        batch.geometry = replace(batch.geometry, **changes["geometry"])
        stage.plan(batch)
    stage.forward(batch, save=changes.get("save_kv_cache", True), extras=extras)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (
            {"selected": SelectedSlots(torch.zeros(3, 8, dtype=torch.int32))},
            BackendError,
            ["layer 3", "slots", "page table"],
        ),
        ({"save_kv_cache": False}, PlanError, ["save_kv_cache=True"]),
        ({"geometry": {"table_rows": None}}, BackendError, ["table_rows"]),
        (
            {"selected": SelectedPositions(torch.zeros(3, 9, dtype=torch.int32))},
            BackendError,
            [9, 8],
        ),
    ],
)
def test_a_call_that_would_read_other_rows_is_refused(changes, error, named):
    with raises_naming(error, *named):
        refuse(**changes)


def test_a_backend_that_writes_by_the_page_table_is_refused():
    stage = HotStage(DECODE)
    pool = stage.context.pools.mla
    with raises_naming(PoolError, "slots", "page table"):
        pool.write(3, torch.tensor([0]), torch.zeros(1, pool.rows(3).shape[3]))
    before = pool.rows(3).clone()
    stage.context.pools.copy_pages([PageCopy(0, 1)])
    stage.context.pools.move_rows(torch.tensor([0]), torch.tensor([1]))
    assert torch.equal(pool.rows(3).view(torch.uint8), before.view(torch.uint8))


def test_a_coordinator_that_the_spec_does_not_name_is_refused():
    stage = SparseStage(DECODE)
    with raises_naming(BackendError, "others"):
        TorchSparseBackend(replace(stage.context, coordinator=SimpleNamespace(name="others")))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"buffer_size": 4}, ["device_buffer_size", 4, 5]),
        ({"buffer_size": 14, "nodes": 3}, ["device_buffer_size", 14, 5, 3, 15]),
        ({"buffer_size": 1 << 15}, ["device_buffer_size", 32768, "5 to 32767"]),
    ],
)
def test_buffers_that_do_not_hold_a_choice_are_refused(changes, named):
    sizes = HotSizes(**{"max_requests": 1, "max_tokens": 4, "max_context": 8, **changes})
    with raises_naming(UsageError, *named):
        sizes.check(layers(5))
    with raises_naming(UsageError, "layer 1"):
        replace(sizes, buffer_size=20).check([layers(5)[0], replace(layers(5)[1], indexer=None)])


def test_entries_are_loaded_by_a_coordinator_that_has_them():
    trace = Trace(topk=2, buffer_size=2)
    with raises_naming(BackendError, "layer 0", "entries"):
        none = torch.zeros(0, dtype=torch.int32)
        trace.hisparse.load_entries(0, torch.zeros(0, DIM), none, SelectedPositions(none), SimpleNamespace())
    host = HostRows(2, num_pages=6, page_size=4, row_nbytes=3, device="cpu", ratio=2)
    assert host.cells.shape == (2, 12, 3)
    host.cells.copy_(torch.arange(host.cells.numel(), dtype=torch.uint8).view_as(host.cells))
    before = host.cells.clone()
    host.copy_pages([PageCopy(1, 4)])
    assert torch.equal(host.cells[:, 8:10], before[:, 2:4]) and torch.equal(host.cells[:, :8], before[:, :8])
    with raises_naming(PoolError, "entries"):
        host.move_rows(torch.tensor([0]), torch.tensor([1]))


def test_a_backend_has_to_claim_it():
    """D3: one that serves sparse layers, and reads rows on the device by the page table."""
    problem = Problem(ModelSpec("m", "test", tuple(layers(5)), 64), "cpu", coordinator="hisparse")
    spec = next(each for each in attnplug_backends() if each.name == "torch_sparse")
    assert list(spec.refusals(problem, Role.DECODE)) == []
    without = replace(spec, capabilities=replace(spec.capabilities, coordinators=frozenset()))
    (reason,) = without.refusals(problem, Role.DECODE)
    assert (reason.code, reason.value, reason.setting) == ("feature", "hisparse", "enable_hisparse")
    assert list(without.refusals(replace(problem, coordinator=None), Role.DECODE)) == []
    dense = replace(spec.capabilities, features=frozenset())
    assert any("coordinators hisparse" in problem for problem in dense.contradictions())
    with raises_naming(UsageError, "layer 1", "m", "mla"):
        Problem(ModelSpec("m", "test", (layers(5)[0], replace(layers(5)[1], indexer=None)), 64), coordinator="hisparse")
