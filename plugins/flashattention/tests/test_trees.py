"""Trees of drafts: prefix and new rows are computed separately and merged; compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnplug import ForwardMode, PlanError, Serving
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import LAYER
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.reference import ancestors
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check, mha
from attnplug_testing.references.flashattention import KERNELS, build, on_cpu, on_devices
from attnplug_testing.trees import chain, random_trees

VERIFY = ForwardMode.TARGET_VERIFY
everywhere = on_devices(*KERNELS)


def trees(rows: int, prefixes: tuple[int, ...] = (0, 37, 64, 200), **changes: Any) -> KernelCase:
    """Every request has another tree; four heads share keys and values."""
    given = {"trees": random_trees(len(prefixes), rows, seed=rows), "seed": rows}
    return mha(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


def scene(case: KernelCase, kernel: str, device: str) -> KernelScene:
    return KernelScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


@everywhere
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (1, {"page_size": 16}),
        (7, {"page_size": 128, "sinks": True, "padding": 3}),
        (64, {"prefixes": (300, 0), "page_size": 256}),
    ],
)
def test_every_request_has_a_tree_of_its_own(rows, changes, kernel, device):
    """C4; pages of every kind of kernel, and prefixes of all, some or none of the requests."""
    check(scene(trees(rows, **changes), kernel, device))


@on_devices("fa4")
def test_capped_logits(kernel, device):
    check(scene(trees(6, (0, 37), cap=3.0), kernel, device))


@on_devices("fa4", "torch")
def test_a_chain_is_a_causal_batch(kernel, device):
    """Equal within rounding, because attention to the new rows is computed separately."""
    tree, causal = (scene(trees(6, trees=some), kernel, device) for some in ((chain(6),) * 4, None))
    assert relative_error(tree.results()[0], causal.results()[0].double()) <= tree.tolerance


@everywhere
def test_what_a_row_must_not_see_may_be_nan(kernel, device):
    """NaN rows of two tokens reach only the rows that attend to them, not those of their siblings."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = scene(trees(6, (20,), trees=(parents,)), kernel, device)
    wanted = stage.wanted()[0]
    stage.values[0][22] = NAN
    stage.keys[0][25] = NAN
    out = stage.results()[0]
    seeing = [row for row in range(6) if {2, 5} & set(ancestors(parents, row))]
    blind = [row for row in range(6) if row not in seeing]
    assert relative_error(out[blind], wanted[blind]) <= stage.tolerance
    assert out[seeing].isnan().all()


@everywhere
def test_rows_that_are_in_the_cache_already(kernel, device):
    stage = scene(trees(4), kernel, device)
    stage.store(LAYER, [(0, total) for total in stage.totals])
    out, _ = stage.results(save=False)
    assert relative_error(out, stage.wanted()[0]) <= stage.tolerance


def test_a_second_batch_of_a_captured_shape_needs_the_same_page_table():
    """The captured kernel reads the first batch's page table. Trees and lengths are copied, so they may be in other
    memory."""
    capture = Capture(scene(trees(4), "fa4", "cpu")).reserve().capture()
    geometry = capture.batch.geometry
    capture.batch.geometry = replace(geometry, tree=geometry.tree.clone(), seq_lens=geometry.seq_lens.clone())
    capture.scene.backend.init_forward_metadata_in_graph(capture.batch)
    capture.batch.geometry = replace(geometry, page_table=geometry.page_table.clone())
    with raises_naming(PlanError, "lane 0"):
        capture.scene.backend.init_forward_metadata_in_graph(capture.batch)


def test_a_backend_that_keeps_no_cache_takes_no_trees():
    serving = Serving(is_embedding=True, chunked_prefill_size=-1, disable_radix_cache=True)
    stage = scene(trees(4, (0,), serving=serving), "fa4", "cpu")
    assert not stage.backend.claims.trees
    with pytest.raises(PlanError):
        stage.run()
