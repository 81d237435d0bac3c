"""Trees of drafts: prefix and new rows apart, merged, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnplug import DType, ForwardMode, PlanError, Serving
from flash_references import KERNELS, build, on_cpu, on_devices
from support.devices import nothing_waits
from support.mha_capture import MHACapture
from support.mha_scene import MHACase, MHAScene
from support.mla_scene import NAN, relative_error
from support.trees import ancestors, chain, random_trees

VERIFY = ForwardMode.TARGET_VERIFY
everywhere = on_devices(*KERNELS)


def trees(rows: int, prefixes: tuple[int, ...] = (0, 37, 64, 200), **changes: Any) -> MHACase:
    """A tree of its own for every request; four heads share keys and values."""
    given = {"heads": 8, "kv_heads": 2, "trees": random_trees(len(prefixes), rows, seed=rows), "seed": rows}
    return MHACase(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


def scene(case: MHACase, kernel: str, device: str) -> MHAScene:
    return MHAScene(on_cpu(case) if device == "cpu" else case, device, build(kernel))


def tolerance(stage: MHAScene) -> float:
    return 1e-6 if stage.case.dtype is DType.FLOAT32 else 5e-3


@everywhere
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (1, {"page_size": 16}),
        (5, {"page_size": 256, "padding": 3}),
        (7, {"page_size": 128, "sinks": True}),
        (16, {"prefixes": (0, 0), "page_size": 64}),
        (64, {"prefixes": (300, 63), "page_size": 256}),
    ],
)
def test_every_request_has_a_tree_of_its_own(rows, changes, kernel, device):
    """C4; pages of every kind of kernel, and prefixes of all, some or none of the requests."""
    stage = scene(trees(rows, **changes), kernel, device)
    out, lse = stage.run()
    wanted, wanted_lse = stage.wanted()
    assert relative_error(out[: len(wanted)], wanted) <= tolerance(stage)
    assert relative_error(lse[: len(wanted)], wanted_lse) <= tolerance(stage)
    assert (out[len(wanted) :] == 0).all() and (lse[len(wanted) :] == float("-inf")).all()
    assert stage.written() == sum(stage.totals)


@on_devices("fa4")
def test_capped_logits(kernel, device):
    stage = scene(trees(6, cap=3.0), kernel, device)
    assert relative_error(stage.run()[0], stage.wanted()[0]) <= tolerance(stage)


@everywhere
def test_a_chain_is_a_causal_batch(kernel, device):
    """Within rounding: its new rows are attended to apart."""
    tree, causal = (scene(trees(6, trees=some), kernel, device) for some in ((chain(6),) * 4, None))
    assert relative_error(tree.run()[0], causal.run()[0].double()) <= tolerance(tree)


@everywhere
@pytest.mark.parametrize("prefix", [0, 20])
def test_what_a_row_must_not_see_may_be_nan(prefix, kernel, device):
    """A sibling's values, without weight, do not get into the result. Who sees them gets NaN."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = scene(trees(6, (prefix,), trees=(parents,)), kernel, device)
    stage.values[0][prefix + 2] = NAN
    stage.keys[0][prefix + 5] = NAN
    out, wanted = stage.run()[0], stage.wanted()[0]
    seeing = [row for row in range(6) if {2, 5} & set(ancestors(parents, row))]
    blind = [row for row in range(6) if row not in seeing]
    assert relative_error(out[blind], wanted[blind]) <= tolerance(stage)
    assert out[seeing].isnan().all()


@everywhere
def test_rows_that_are_in_the_cache_already(kernel, device):
    stage = scene(trees(4), kernel, device)
    stage.store([(0, total) for total in stage.totals])
    assert relative_error(stage.run(save_kv_cache=False)[0], stage.wanted()[0]) <= tolerance(stage)


@on_devices("fa4")
@pytest.mark.parametrize("page_size", [16, 128])
def test_one_capture_serves_other_trees_lengths_and_fewer_requests(page_size, kernel, device):
    """Trees are read inside the graph; those of padded requests are nonsense and count for nothing."""
    case = trees(4, page_size=page_size, lse=False)
    stage, *others = (
        scene(replace(case, lengths=((before, 4),) * count, trees=random_trees(count, 4, seed)), kernel, device)
        for seed, (before, count) in enumerate([(300, 4), (130, 4), (0, 3), (65, 1)])
    )
    capture = MHACapture(stage, requests=4, per_request=4).capture()
    for other in others:
        out, wanted = capture.replay(other), other.wanted()[0]
        assert relative_error(out[: len(wanted)], wanted) <= tolerance(stage)
        assert (out[len(wanted) :] == 0).all()
        assert stage.written() == sum(other.totals)
        with nothing_waits(device):
            capture.backend.init_forward_metadata_out_graph(capture.batch)


def test_a_second_batch_of_a_captured_shape_needs_the_same_page_table():
    """Its kernel reads the table where it lies; trees and lengths are copied, and may lie anywhere."""
    stage = scene(trees(4, page_size=64), "fa4", "cpu")
    first = MHACapture(stage, requests=4, per_request=4).capture()
    geometry = first.batch.geometry
    first.batch.geometry = replace(geometry, tree=geometry.tree.clone(), seq_lens=geometry.seq_lens.clone())
    first.fill()
    first.batch.geometry = replace(geometry, page_table=geometry.page_table.clone())
    with pytest.raises(PlanError, match="capture it in a lane of its own"):
        first.fill()


def test_a_backend_that_keeps_no_cache_takes_no_trees():
    serving = Serving(is_embedding=True, chunked_prefill_size=-1, disable_radix_cache=True)
    stage = scene(trees(4, (0,), serving=serving), "fa4", "cpu")
    with pytest.raises(PlanError, match="takes chains only"):
        stage.run()
