"""Latent rows in fp8_per_token_head, fp8_ds_mla and nvfp4 against float64 over rows as the formats read them back.

Interpreted on a CPU, compiled on a GPU. The conformance kit checks the same claims over more kinds of batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import DType, ForwardMode
from attnplug.host import MLADims
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_conformance.case import LAYER
from attnplug_conformance.reference import ancestors
from attnplug_testing.captures import check_replays, replay_scenes
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelCase, KernelScene, lengths, mla, ragged
from attnplug_testing.kernel_scene import check as check_scene
from attnplug_testing.references.triton_mla import scene
from attnplug_testing.trees import random_trees
from attnplug_triton_mla.configurations import TABLES

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
formats = pytest.mark.parametrize("format", ["fp8_per_token_head", "fp8_ds_mla", "nvfp4"])


def case(format: str, given: tuple[tuple[int, int], ...], mode: ForwardMode = DECODE, **changes: Any) -> KernelCase:
    settings = {"heads": 2, "kv_dtype": format, "kv_scales": (0.37, 0.37)}
    if format == "fp8_ds_mla":  # scales per 128 values, none per layer
        settings |= {"dims": MLADims(256, 128, 16), "kv_scales": (1.0, 1.0)}
    return mla(given, mode, **{**settings, **changes})


def built(case: KernelCase, device: str, choose: Any = None) -> KernelScene:
    if device == "cuda" and case.kv_dtype != "nvfp4" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 caches are read on SM 89 or newer")
    return scene(case, device, choose)


@on_every_device
@formats
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    [
        (DECODE, 1, {"page_size": 1}),
        (VERIFY, 3, {"page_size": 48, "heads": 6}),
        (EXTEND, 5, {"padding": 2, "dtype": DType.FLOAT16}),
    ],
)
@pytest.mark.sample(4)
def test_batches(format, mode, new, changes, device):
    check_scene(built(case(format, lengths(3, 70, new, seed=4), mode, **changes), device))


@on_every_device
@formats
def test_trees_of_drafts(format, device):
    given = case(format, ((0, 7), (37, 7), (64, 7)), VERIFY, page_size=16, trees=random_trees(3, 7, seed=7))
    check_scene(built(given, device))


@on_every_device
@pytest.mark.parametrize("format", ["fp8_per_token_head", "nvfp4"])  # Triton's interpreter reads e4m3's NaN as a number
def test_a_row_with_nan_reaches_those_who_see_it_only(format, device):
    """Its scale is NaN, too."""
    parents = (-1, 0, 0, 1, 2, 0)
    stage = built(case(format, ((20, 6),), VERIFY, page_size=16, trees=(parents,)), device)
    wanted = stage.wanted()[0]
    stage.keys[0][22, 0, 3] = NAN
    out = stage.results()[0]
    blind = [row for row in range(6) if 2 not in ancestors(parents, row)]
    assert relative_error(out[blind], wanted[blind]) <= stage.tolerance
    assert out[[2, 4]].isnan().all()


@on_every_device
@formats
def test_small_rows_keep_their_precision(format, device):
    """Weights times scales of such rows are too small for fp16."""
    given = ((90, 1), (40, 1))
    stage = built(case(format, given, kv_scales=(1e-4, 1e-4)), device)
    stage.keys = [rows * 1e-4 for rows in stage.keys]
    stage.values = [rows[..., : stage.widths[1]] for rows in stage.keys]
    stage.store(LAYER, [(0, before) for before, _ in given])
    stage.q *= 1e4
    assert stage.error() <= 5e-3


@on_every_device
def test_scales_of_all_magnitudes(device):
    """A row's scale is no more than a part of its logit and of its weight."""
    given = ((90, 1), (40, 1))
    stage = built(case("fp8_per_token_head", given), device)
    for rows in stage.keys:
        rows *= torch.logspace(-6, 0, len(rows), device=rows.device).view(-1, 1, 1).to(rows.dtype)
    stage.values = [rows[..., : stage.widths[1]] for rows in stage.keys]
    stage.store(LAYER, [(0, before) for before, _ in given])
    assert stage.error() <= 5e-3


class TestOnAGPU:
    @on_a_gpu
    @formats
    @pytest.mark.parametrize(("rank", "rope"), [(512, 64), (512, 0), (256, 64), (256, 0)])
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (EXTEND, 5)])
    def test_widths(self, format, mode, new, rank, rope, device):
        dims = MLADims(rank, 128, rope)
        check_scene(built(case(format, lengths(6, 2000, new, seed=rank), mode, dims=dims, heads=16), device))

    @on_a_gpu
    @formats
    @pytest.mark.parametrize("heads", [8, 128])
    def test_extends_of_different_numbers_of_tokens(self, format, heads, device):
        check_scene(built(case(format, ragged(9, 3000, 300, 1), EXTEND, page_size=16, heads=heads), device))

    @on_a_gpu
    @formats
    def test_every_entry_of_the_table(self, format, device):
        for *_, entry in TABLES[format]:
            given = case(format, ((0, 1), (100, 1), (9000, 1), (64, 1)), heads=16)
            check_scene(built(given, device, lambda *_, entry=entry, **__: entry))

    @on_a_gpu
    @formats
    def test_captured_decodes(self, format, device):
        prefixes = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [2000, 900], [0, 1, 2, 3]]
        empty = case(format, (), heads=16)
        check_replays(*replay_scenes(lambda each: built(each, device), empty, 1, prefixes, 2000))

    @on_a_gpu
    @formats
    def test_the_same_bits(self, format, device):
        stage = built(case(format, ((9000, 1), (64, 1), (700, 1)), heads=16), device)
        batch = stage.plan(stage.batch())
        first = stage.results(batch)[0]
        assert all(torch.equal(stage.results(batch)[0], first) for _ in range(20))
