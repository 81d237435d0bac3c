"""Trees of drafts against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import DType, ForwardMode
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.reference import ancestors
from attnplug_conformance.scene import Output
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import KernelCase, check_replay, mla
from attnplug_testing.references.triton_mla import check, scene
from attnplug_testing.trees import chain, random_trees
from attnplug_triton_mla.configurations import ENTRIES, MLAKernelConfig

VERIFY = ForwardMode.TARGET_VERIFY
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


def trees(rows: int, prefixes: tuple[int, ...] = (0, 37, 64), **changes: Any) -> KernelCase:
    """Every request has another tree."""
    given = {"page_size": 16, "heads": 2, "trees": random_trees(len(prefixes), rows, seed=rows), "seed": rows}
    return mla(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


@on_every_device
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (2, {"page_size": 48}),
        (3, {"page_size": 1, "padding": 2}),
        (7, {"heads": 6}),
        (16, {"exact": False}),
        (64, {"prefixes": (37,), "page_size": 64, "heads": 1}),
    ],
)
@pytest.mark.sample(3)
def test_every_request_has_a_tree_of_its_own(rows, changes, device):
    """C4; whole pages, parts of pages and no prefix at all; NaN in every row that must not be read."""
    check(trees(rows, **changes), device)


@on_every_device
def test_a_request_that_is_cut_into_parts(device):
    """Parts that end before the new rows, within them, and at them."""
    cut = MLAKernelConfig(16, 16, 4, 2, programs=3, start_steps=1, merge="kernel", merge_columns=512)
    check(trees(9, (90, 5), heads=4), device, lambda *_, **__: cut)


@on_every_device
def test_an_fp8_cache(device):
    stage = scene(trees(5, kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.5, 0.5), dtype=DType.FLOAT16), device)
    assert stage.error() <= 2e-2


@on_every_device
def test_a_tree_may_be_written_after_its_plan(device):
    """A plan is made while the draft still grows the tree."""
    stage = scene(trees(7, exact=False), device)
    batch = stage.batch()
    tree = batch.geometry.tree
    bits = tree.clone()
    tree.zero_()
    stage.plan(batch)
    tree.copy_(bits)
    check_output(stage, Output(*stage.results(batch), 0.0, 0.0))


def test_a_chain_is_a_causal_batch():
    """Bit for bit: kernel and steps are the same."""
    tree, causal = scene(trees(6, trees=(chain(6),) * 3), "cpu"), scene(trees(6, trees=None), "cpu")
    for mine, theirs in zip(tree.results(), causal.results(), strict=True):
        assert torch.equal(mine, theirs)


@on_every_device
def test_what_a_row_must_not_see_may_be_nan(device):
    """A NaN row of one token reaches only the rows that attend to it, not those of its siblings."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = scene(trees(6, (20,), trees=(parents,)), device)
    wanted = stage.wanted()[0]
    stage.keys[0][22] = NAN
    out = stage.results()[0]
    blind = [row for row in range(6) if 2 not in ancestors(parents, row)]
    assert relative_error(out[blind], wanted[blind]) <= stage.tolerance
    assert out[[2, 4]].isnan().all()


@on_every_device
def test_trees_are_read_where_they_lie(device):
    """A slice of a larger tensor, with strided columns."""
    stage = scene(trees(4), device)
    batch = stage.batch()
    wide = torch.full((3, 12), -1, dtype=torch.int64, device=device)
    wide[:, ::3] = batch.geometry.tree
    batch.geometry = replace(batch.geometry, tree=wide[:, ::3])
    assert stage.error(batch) <= stage.tolerance


def test_kernels_of_trees_are_tritons():
    stage = scene(trees(4, exact=False), "cpu")
    assert stage.backend.init_forward_metadata(stage.batch()).metadata.schedule.configuration.kernel == "triton"


@on_every_device
def test_one_capture_serves_other_trees_lengths_and_fewer_requests(device):
    """Trees are read inside the graph; those of padded requests are nonsense and count for nothing."""
    case = trees(4, page_size=64)
    stage, *others = (
        scene(replace(case, lengths=((before, 4),) * count, trees=random_trees(count, 4, seed)), device)
        for seed, (before, count) in enumerate([(90, 4), (30, 3), (0, 1)])
    )
    capture = Capture(stage).reserve().capture()
    for other in others:
        check_replay(capture, other)


class TestOnAGPU:
    @on_a_gpu
    def test_planning_and_running_wait_for_nothing(self, device):
        stage = scene(trees(4, exact=False), device)
        stage.results()  # compiles what there is to compile
        batch = stage.batch()
        with nothing_waits(device):
            stage.forward(stage.plan(batch))

    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted({entry for entry in ENTRIES if entry.merge == "kernel"}, key=str), ids=str)
    def test_every_entry_of_the_table(self, entry, device):
        """Those for kernels in Gluon give the Triton kernel of their shape."""
        fp8 = entry.kernel == "triton" and entry.stages == 4
        case = trees(8, (0, 100, 3000, 64), page_size=64, heads=16, kv_dtype=DType.FLOAT8_E4M3 if fp8 else None)
        stage = scene(case, device, lambda *_, **__: entry)
        assert stage.error() <= 2e-2

    @on_a_gpu
    @pytest.mark.parametrize("heads", [8, 16, 128])
    @pytest.mark.parametrize("rows", [1, 16, 64])
    def test_real_shapes(self, rows, heads, device):
        check(trees(rows, (0, 1, 63, 2500), page_size=64, heads=heads), device)

    @on_a_gpu
    def test_the_same_bits(self, device):
        stage = scene(trees(16, (9000, 64, 700), page_size=64, heads=16), device)
        batch = stage.plan(stage.batch())
        first = stage.results(batch)[0]
        assert all(torch.equal(stage.results(batch)[0], first) for _ in range(20))
