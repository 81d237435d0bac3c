"""Trees of drafts against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import DType, ForwardMode
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.reference import ancestors
from attnplug_conformance.scene import Output
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import KernelCase, mha
from attnplug_testing.trees import chain, random_trees
from attnplug_triton_mha.configurations import ENTRIES, MHAKernelConfig
from interpreted_mha import CODED_TOLERANCE, check, scene

VERIFY = ForwardMode.TARGET_VERIFY
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
LOW = MHAKernelConfig(16, 16, 4, 2, programs=3, overlap=False)
SINGLE = MHAKernelConfig(16, 64, 4, 2, programs=2, single=True, overlap=False)
TALL = MHAKernelConfig(64, 16, 4, 2, programs=2, overlap=False)


def trees(rows: int, prefixes: tuple[int, ...] = (0, 37, 64), **changes: Any) -> KernelCase:
    """Every request has another tree; groups of two heads share keys and values."""
    given = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 32, "seed": rows}
    given["trees"] = random_trees(len(prefixes), rows, seed=rows)
    return mha(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


@on_every_device
@pytest.mark.parametrize(
    ("rows", "cut", "changes"),
    [
        (2, SINGLE, {"prefixes": (0, 5, 30, 64), "page_size": 48}),
        (5, LOW, {"padding": 2, "cap": 3.0}),
        (7, TALL, {"heads": 6, "sinks": True, "page_size": 1}),
        (16, LOW, {"exact": False, "v_head_dim": 16}),
        (64, TALL, {"prefixes": (37,), "kv_heads": 4}),
    ],
)
@pytest.mark.sample(3)
def test_every_request_has_a_tree_of_its_own(rows, cut, changes, device):
    """C4; whole pages, parts of pages and no prefix at all; NaN in every row that must not be read."""
    check(trees(rows, **changes), device, lambda *_: cut)


@on_every_device
def test_a_tree_may_be_written_after_its_plan(device):
    """A plan is made while the draft still grows the tree."""
    stage = scene(trees(7, exact=False), device, lambda *_: LOW)
    batch = stage.batch()
    tree = batch.geometry.tree
    bits = tree.clone()
    tree.zero_()
    stage.plan(batch)
    tree.copy_(bits)
    check_output(stage, Output(*stage.results(batch), 0.0, 0.0))


@pytest.mark.parametrize("cut", [LOW, SINGLE], ids=["low", "single"])
def test_a_chain_is_a_causal_batch(cut):
    """Bit for bit: kernel and steps are the same."""
    tree, causal = (scene(trees(6, trees=some), "cpu", lambda *_: cut) for some in ((chain(6),) * 3, None))
    for mine, theirs in zip(tree.results(), causal.results(), strict=True):
        assert torch.equal(mine, theirs)


@on_every_device
@pytest.mark.parametrize("cut", [LOW, SINGLE], ids=["steps", "single"])
def test_what_a_row_must_not_see_may_be_nan(cut, device):
    """NaN rows of two tokens reach only the rows that attend to them, not those of their siblings."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = scene(trees(6, (20,), trees=(parents,)), device, lambda *_: cut)
    wanted = stage.wanted()[0]
    stage.values[0][22] = NAN
    stage.keys[0][25] = NAN
    out = stage.results()[0]
    seeing = [row for row in range(6) if {2, 5} & set(ancestors(parents, row))]
    blind = [row for row in range(6) if row not in seeing]
    assert blind == [0, 1, 3]
    assert relative_error(out[blind], wanted[blind]) <= stage.tolerance
    assert out[seeing].isnan().all()


@on_every_device
@pytest.mark.parametrize("format", ["float8_e4m3fn", "fp8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("cut", [LOW, SINGLE], ids=["steps", "single"])
def test_a_cache_in_a_coded_format(cut, format, device):
    """Its values, or their scales, may be NaN too."""
    parents = (-1, 0, 0, 1, 2, 0)
    case = trees(6, (20, 0), trees=(parents,) * 2, kv_dtype=format, kv_scales=(0.5, 0.25))
    stage = scene(replace(case, dtype=DType.FLOAT16), device, lambda *_: cut)
    wanted, blind = stage.wanted()[0], [0, 1, 3, *range(5, 12)]
    stage.values[0][22] = NAN
    out = stage.results()[0]
    assert relative_error(out[blind], wanted[blind]) <= CODED_TOLERANCE
    by_values = device == "cpu" and format == "float8_e4m3fn"
    assert by_values or out[[2, 4]].isnan().all(), "the interpreter converts fp8's NaN to a number"


@on_every_device
def test_trees_are_read_where_they_lie(device):
    """A slice of a larger tensor, with strided columns."""
    stage = scene(trees(4), device)
    batch = stage.batch()
    wide = torch.full((3, 12), -1, dtype=torch.int64, device=device)
    wide[:, ::3] = batch.geometry.tree
    batch.geometry = replace(batch.geometry, tree=wide[:, ::3])
    assert stage.error(batch) <= stage.tolerance


@on_a_gpu
def test_planning_and_running_wait_for_nothing(device):
    stage = scene(trees(4, exact=False), device)
    stage.results()  # compiles what there is to compile
    batch = stage.batch()
    with nothing_waits(device):
        stage.forward(stage.plan(batch))


class TestOnAGPU:
    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_every_entry_of_the_table(self, entry, dim, device):
        check(trees(9, (0, 100, 3000, 64), page_size=64, heads=8, head_dim=dim), device, lambda *_: entry)

    @on_a_gpu
    @pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (14, 2)])
    @pytest.mark.parametrize(("rows", "dtype"), [(1, DType.FLOAT16), (16, DType.BFLOAT16), (64, DType.BFLOAT16)])
    def test_real_shapes(self, dtype, rows, heads, kv_heads, device):
        case = trees(rows, (0, 1, 63, 2500), page_size=64, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=dtype)
        check(case, device)
