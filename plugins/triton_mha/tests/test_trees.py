"""Trees of drafts against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import DType, ForwardMode
from attnplug.host import plan_forward
from attnplug_triton_mha.configurations import ENTRIES, Configuration
from interpreted_mha import TOLERANCE, check, scene
from support.devices import DEVICES, nothing_waits
from support.mha_scene import MHACase
from support.mla_scene import NAN, relative_error
from support.trees import ancestors, chain, random_trees

VERIFY = ForwardMode.TARGET_VERIFY
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
LOW = Configuration(16, 16, 4, 2, programs=3, overlap=False)
SINGLE = Configuration(16, 64, 4, 2, programs=2, single=True, overlap=False)
TALL = Configuration(64, 16, 4, 2, programs=2, overlap=False)


def trees(rows: int, prefixes: tuple[int, ...] = (0, 37, 64), **changes: Any) -> MHACase:
    """A tree of its own for every request; groups of two heads share keys and values."""
    given = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 32, "seed": rows}
    given["trees"] = random_trees(len(prefixes), rows, seed=rows)
    return MHACase(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


@on_every_device
@pytest.mark.parametrize(
    ("rows", "cut", "changes"),
    [
        (1, LOW, {"page_size": 1}),
        (2, SINGLE, {"prefixes": (0, 5, 30, 64), "page_size": 48}),
        (5, LOW, {"padding": 2, "cap": 3.0}),
        (7, TALL, {"heads": 6, "sinks": True}),
        (16, LOW, {"exact_lengths": False, "v_head_dim": 16}),
        (64, TALL, {"prefixes": (37,), "kv_heads": 4}),
    ],
)
def test_every_request_has_a_tree_of_its_own(rows, cut, changes, device):
    """C4; whole pages, parts of pages and no prefix at all; NaN in every row that must not be read."""
    check(trees(rows, **changes), device, lambda *_: cut)


@on_every_device
def test_a_tree_may_be_written_after_its_plan(device):
    """A plan is made while the draft still grows the tree."""
    stage = scene(trees(7, exact_lengths=False), device, lambda *_: LOW)
    batch = stage.batch()
    tree = batch.geometry.tree
    bits = tree.clone()
    tree.zero_()
    plan_forward(stage.backend, batch)
    tree.copy_(bits)
    for mine, wanted in zip(stage.run(batch), stage.wanted(), strict=True):
        assert relative_error(mine, wanted) <= TOLERANCE[stage.case.dtype]


@pytest.mark.parametrize("cut", [LOW, SINGLE, TALL], ids=["low", "single", "tall"])
def test_a_chain_is_a_causal_batch(cut):
    """Bit for bit: the same kernel, and steps are where they were."""
    tree, causal = (scene(trees(6, trees=some), "cpu", lambda *_: cut) for some in ((chain(6),) * 3, None))
    for mine, theirs in zip(tree.run(), causal.run(), strict=True):
        assert torch.equal(mine, theirs)


@on_every_device
@pytest.mark.parametrize("cut", [LOW, SINGLE], ids=["steps", "single"])
@pytest.mark.parametrize("prefix", [0, 20])
def test_what_a_row_must_not_see_may_be_nan(prefix, cut, device):
    """A sibling's values, without weight, do not get into the result. Who sees them gets NaN."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = scene(trees(6, (prefix,), trees=(parents,)), device, lambda *_: cut)
    stage.values[0][prefix + 2] = NAN
    stage.keys[0][prefix + 5] = NAN
    out, wanted = stage.run()[0], stage.wanted()[0]
    seeing = [row for row in range(6) if {2, 5} & set(ancestors(parents, row))]
    blind = [row for row in range(6) if row not in seeing]
    assert blind == [0, 1, 3]
    assert relative_error(out[blind], wanted[blind]) <= TOLERANCE[stage.case.dtype]
    assert out[seeing].isnan().all()


@on_every_device
@pytest.mark.parametrize("cut", [LOW, SINGLE], ids=["steps", "single"])
def test_an_fp8_cache(cut, device):
    """Its values may be NaN too."""
    parents = (-1, 0, 0, 1, 2, 0)
    case = trees(6, (20, 0), trees=(parents,) * 2, kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.5, 0.25))
    stage = scene(replace(case, dtype=DType.FLOAT16), device, lambda *_: cut)
    stage.values[0][22] = NAN
    out, wanted = stage.run()[0], stage.wanted()[0]
    assert relative_error(out[[0, 1, 3, *range(5, 12)]], wanted[[0, 1, 3, *range(5, 12)]]) <= 5e-3
    assert device == "cpu" or out[[2, 4]].isnan().all(), "the interpreter converts fp8's NaN to a number"


@on_every_device
def test_trees_are_read_where_they_lie(device):
    """A part of a larger tensor, with its columns apart."""
    stage = scene(trees(4), device)
    batch = stage.batch()
    wide = torch.full((3, 12), -1, dtype=torch.int64, device=device)
    wide[:, ::3] = batch.geometry.tree
    batch.geometry = replace(batch.geometry, tree=wide[:, ::3])
    assert relative_error(stage.run(batch)[0], stage.wanted()[0]) <= TOLERANCE[stage.case.dtype]


@on_a_gpu
def test_planning_and_running_wait_for_nothing(device):
    stage = scene(trees(4, exact_lengths=False), device)
    stage.run()  # compiles what there is to compile
    batch = stage.batch()
    with nothing_waits(device):
        stage.run(batch)


class TestOnAGPU:
    @on_a_gpu
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    @pytest.mark.parametrize("dim", [64, 128, 256])
    def test_every_entry_of_the_table(self, entry, dim, device):
        check(trees(9, (0, 100, 3000, 64), page_size=64, heads=8, head_dim=dim), device, lambda *_: entry)

    @on_a_gpu
    @pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (14, 2)])
    @pytest.mark.parametrize("rows", [1, 4, 16, 33, 64])
    @pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
    def test_real_shapes(self, dtype, rows, heads, kv_heads, device):
        case = trees(rows, (0, 1, 63, 2500), page_size=64, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=dtype)
        check(case, device)
