"""The table: every shape has an entry, and the configuration for a GPU compiles and fits, without needing that GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from attnplug import ForwardMode, Geometry
from attnplug_testing.devices import INTERPRETED
from attnplug_testing.triton_mode import compiled_by
from attnplug_triton_mha.configurations import (
    FORMATS,
    INVARIANT,
    LONG_ROWS,
    MAX_TILE,
    PACKS,
    TABLES,
    MHAKernelLimits,
    choose,
    fit_config,
    fit_invariant,
    max_partial_rows,
)

KIB = 1024
SHARED = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Maximum shared memory of a program, by SM."""


@pytest.mark.parametrize("format", range(len(TABLES)))
def test_every_shape_finds_its_entry(format):
    entries = [entry for *_, entry in TABLES[format]]
    for rows in (1, 4, 16, 17, 32, 33, 64, 65, 100_000):
        for requests in (1, 2, 64, 1000):
            for kv_heads in (1, 8, 128):
                entry = choose(rows, requests, kv_heads, format)
                assert entry in entries
                assert entry.tile == 16 or rows > entry.tile // 2, "a tile most of which is never used"
    assert choose(LONG_ROWS, 1, 8, format) is entries[-1] and choose(LONG_ROWS - 1, 1, 8, format) is entries[-2]


@pytest.mark.parametrize("format", range(len(TABLES)))
@pytest.mark.parametrize(("dim", "tiles"), [(64, [16, 64]), (128, [16, 64, 128]), (256, [16, 64])])
@pytest.mark.parametrize("sm", SHARED)
def test_invariant_configurations_have_equal_steps(sm, dim, tiles, format):
    """Steps set the order of sums. A tile that a GPU's memory holds with shorter steps only is left out."""
    limits = MHAKernelLimits(sm, SHARED[sm], dim, dim, format)
    fits = fit_invariant(INVARIANT, limits)
    assert len({each.step for each in fits}) == 1 and all(each.split for each in fits)
    found = [each.tile for each in fits]
    assert found == tiles if sm == 90 else max(found) <= max(tiles)


@INTERPRETED
@pytest.mark.parametrize(("kv_heads", "multiprocessors"), [(8, 132), (1, 132), (128, 20)])
def test_no_plan_asks_for_more_partial_results_than_were_reserved(kv_heads, multiprocessors):
    """A backend takes no more than it reserved when built: graphs freeze the workspace."""
    from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape

    for requests, new in ((1, 1), (64, 1), (256, 1), (4, 4), (4, 16), (2, 2000)):
        table, lens = torch.zeros(requests, 128, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
        rows = requests * new
        batch = Geometry(ForwardMode.EXTEND, table, lens, 64, rows=rows, max_seq_len=8192, max_new=new)
        for format in range(len(TABLES)):
            cut = choose(new * 4, requests, kv_heads, format)
            made = SplitKVSchedule.reserve(TritonLayerShape(kv_heads, 4, 64, 64, 0), cut, batch, multiprocessors)
            assert made.partial_rows * kv_heads <= max_partial_rows(multiprocessors, kv_heads)


def a_schedule(heads: tuple[int, int, int], requests: int, new: int, window: int = 0, differ: bool = False):
    """Schedule of a batch on an H200: (KV heads, query heads of each, columns), new tokens of each request."""
    from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape

    kv_heads, group, dim = heads
    table, lens = torch.zeros(requests, 512, dtype=torch.int32), torch.zeros(requests, dtype=torch.int32)
    mode, rows = ForwardMode.EXTEND, requests * new
    batch = Geometry(
        mode, table, lens, 64, rows=rows, max_seq_len=1 << 15, max_new=new, new_lens=lens if differ else None
    )
    cut = choose(new * group, requests, kv_heads, 0)
    return SplitKVSchedule.reserve(TritonLayerShape(kv_heads, group, dim, dim, window), cut, batch, 132)


@INTERPRETED
class TestWhoMerges:
    """Decided by shapes alone: lengths are on the device, and a captured graph serves all of them."""

    @pytest.mark.parametrize(
        ("heads", "requests", "new"),
        [
            ((2, 8, 256), 1, 1),
            ((2, 8, 256), 8, 1),
            ((2, 8, 256), 1, 4),
            ((1, 32, 128), 1, 1),
            ((2, 8, 256), 2, 60),
            ((8, 4, 64), 1, 1),
            ((8, 4, 64), 16, 1),
        ],
    )
    def test_a_separate_kernel_merges_many_parts(self, heads, requests, new):
        made = a_schedule(heads, requests, new)
        assert made.separate_merge is not None
        cut, group = made.separate_merge.config, heads[1]
        assert len(made.separate_merge.tiles) == requests * -(-new * group // made.configuration.tile)
        assert cut.parts * cut.columns <= 64 * 32 * cut.warps and cut.warps <= 4 and cut.columns <= heads[2]

    @pytest.mark.parametrize(
        ("heads", "requests", "new", "more"),
        [
            ((8, 4, 128), 64, 1, {}),
            ((2, 8, 256), 500, 1, {}),
            ((2, 8, 256), 1, 8192, {}),
            ((8, 8, 64), 1, 1, {"window": 16}),
            ((2, 8, 256), 3, 4, {"differ": True}),
        ],
        ids=["many requests", "not divided", "long prompts", "a short window", "different rows"],
    )
    def test_one_program_merges_few(self, heads, requests, new, more):
        assert a_schedule(heads, requests, new, **more).separate_merge is None

    def test_all_parts_of_one_request_are_loaded_at_once_and_by_all_multiprocessors(self):
        cut = a_schedule((2, 8, 256), 1, 1).separate_merge.config
        assert cut.parts >= 132 and 16 * 256 // cut.columns >= 120


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("format", range(len(TABLES)))
def test_what_is_chosen_has_room_by_our_own_count(format, sm, dim):
    for *_, entry in TABLES[format]:
        found = fit_config(entry, MHAKernelLimits(sm, SHARED[sm], dim, dim, format))
        if entry.step == 32 and dim == 64 and format == 0 and entry.tile == 16:  # few requests
            entry = replace(entry, step=64, prefetch=2)
        rows = found.stages * found.step * 4 * dim // PACKS[format] + found.tile * 2 * dim
        assert rows <= SHARED[sm] and found.tile >= 16 and found.step >= 16
        assert (found.overlap, found.prefetch) == ((True, entry.prefetch) if sm >= 90 else (False, 0))
        if sm == 90 and dim <= 128:
            wanted = TABLES[format][-2][-1] if entry.specialized else entry
            wanted = replace(wanted, warps=4) if dim == 64 and entry.tile == MAX_TILE else wanted
            assert found == wanted, "the table is for this GPU"


@pytest.mark.parametrize(
    ("changes", "short", "long"),
    [
        ({}, False, True),
        ({"width": 128}, False, True),
        ({"width": 128, "v_width": 128}, True, True),
        ({"sm": 80}, False, False),
        ({"sm": 100, "width": 128, "v_width": 128}, False, False),
        ({"width": 256}, False, False),
        ({"v_width": 32}, False, False),
        ({"format": 1, "width": 128, "v_width": 128}, False, False),
        ({"copied": False}, False, False),
    ],
    ids=str,
)
def test_prompts_have_the_specialized_kernel_where_it_runs_and_is_faster(changes, short, long):
    """SM 90, 16 bits, chunks of 64 columns, and rows that TMA can copy; from a length on, or if heads are wide."""
    limits = replace(MHAKernelLimits(90, SHARED[90], 64, 64, 0, copied=True), **changes)
    found = [fit_config(choose(rows, 1, 8, 0), limits) for rows in (64, LONG_ROWS - 1, LONG_ROWS)]
    assert [each.specialized for each in found] == [False, short, long]
    assert (found[1] == found[2]) == (short == long)


def test_rows_that_tma_copies():
    """Token-major pages of 16 rows or more, or of one head, at equal distances; otherwise the rows are loaded."""
    from attnplug_triton_mha.attention import CopiedRows

    pages = torch.arange(5 * 32 * 2 * 64).view(5, 32, 2, 64).bfloat16()
    head_major = pages.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack([pages, pages], 1)[:, 1]
    for given in (pages, both, head_major[:, :, 1:]):
        copied = CopiedRows.of(given)
        assert copied.rows.block_shape == [32, 64]
        at = copied.rows.base.as_strided(given.shape, (copied.page * given.stride(1), given.stride(1), copied.head, 1))
        assert torch.equal(at, given) and at.data_ptr() == given.data_ptr()
        assert copied.rows.shape[0] > 4 * copied.page + 31 and copied.rows.shape[1] >= copied.head + 64
    wider = torch.zeros(5, 33, 2, 72, dtype=torch.bfloat16)
    refused = {
        "columns apart": pages.transpose(2, 3).contiguous().transpose(2, 3),
        "32 bits": pages.float(),
        "float16": pages.half(),
        "head-major": head_major,
        "80 columns": torch.zeros(5, 32, 2, 80, dtype=torch.bfloat16),
        "pages of 8": pages[:, :8],
        "pages of 24": pages[:, :24],
        "not aligned": wider[:, :32, :, 4:68],
        "pages at other distances": wider.view(-1).as_strided((5, 32, 2, 64), (2 * 72 * 32 + 8, 144, 72, 1)),
    }
    assert not [name for name, given in refused.items() if CopiedRows.of(given) is not None]


@pytest.mark.cross_compile
def test_it_compiles_for_gpus_and_fits_them() -> None:
    """Every kernel by Triton's compiler, which needs no GPU. Whether it is right or fast there is not said.

    Extras, trees and coded caches come both before SM 90, where products are other instructions, and from there on.
    Plans have no products.
    """
    from attnplug_triton_mha.planner import padded

    wanted = []
    fp8, by_row, nvfp4 = ({"format": format} for format in ("float8_e4m3fn", "fp8_per_token_head", "nvfp4"))
    for sm, rows, requests, kind, dim, page_size, more in (
        (89, 4, 1, "bf16", 80, 16, {**fp8, "extras": True}),
        (86, 8000, 1, "bf16", 128, 64, {"extras": True}),
        (90, 8000, 1, "bf16", 64, 16, {"window": 100}),
        (90, LONG_ROWS, 1, "bf16", 64, 64, {}),
        (90, LONG_ROWS, 1, "bf16", 128, 16, {"extras": True, "window": 100, "separate_merge": True}),
        (80, 64, 1, "fp16", 128, 16, {"tree": True}),
        (90, 16, 1, "bf16", 128, 64, {"tree": True, "extras": True}),
        (90, 8000, 1, "bf16", 128, 64, {**fp8, "separate_merge": True}),
        (100, 4, 256, "bf16", 128, 1, {"extras": True}),
        (89, 4, 16, "bf16", 128, 64, {**by_row, "separate_merge": True}),
        (90, 8000, 1, "bf16", 128, 64, by_row),
        (120, 16, 1, "bf16", 128, 16, {**by_row, "tree": True, "extras": True}),
        (80, 4, 16, "bf16", 128, 64, {**nvfp4, "separate_merge": True}),
        (80, 8000, 1, "fp16", 64, 16, {**nvfp4, "extras": True}),
        (90, 16, 1, "bf16", 128, 64, {**nvfp4, "tree": True}),
        (90, 8000, 1, "bf16", 256, 64, nvfp4),
        (120, 4, 256, "bf16", 80, 16, {**nvfp4, "pairs": False}),
    ):
        format = FORMATS.get(more.get("format"), 0)
        width = padded(dim, PACKS[format])
        limits = MHAKernelLimits(sm, SHARED[sm], width, width, format, copied=True)
        cut = fit_config(choose(rows, requests, 8, format), limits)
        wanted.append({"sm": sm, "cut": asdict(cut), "type": kind, "dim": dim, "page_size": page_size, **more})
    compiled = compiled_by(Path(__file__).with_name("cross_compile.py"), json.dumps(wanted))
    assert {(sm, kernel) for sm, kernel, _ in compiled} == {
        *((sm, "attend") for sm in (80, 86, 89, 90, 100, 120)),
        (90, "attend long prompts"),
        *((90, kernel) for kernel in ("plan", "plan of different rows", "merge")),
        *((90, f"{kernel} splits") for kernel in ("attend by", "plan of", "merge of")),
    }
    for sm, kernel, taken in compiled:
        assert taken <= SHARED[sm], (sm, kernel)
        assert taken > 0 or kernel != "attend"


@pytest.mark.cross_compile
def test_the_compiler_fuses_nothing_at_levels_of_invariance() -> None:
    """E3: a product and a sum that it fuses in a loop without a mask, and not in one with it, gave other bits to a row
    that was prefilled than to the same row decoded. Only the fma of the weights is left, which is written as one."""
    for tile, weights, (free, (plain, coded, merge)) in compiled_by(
        Path(__file__).with_name("cross_compile.py"), "--fused"
    ):
        loops = 1 if tile == "tile 16" else 2
        assert (plain, coded, merge) == (loops * weights, 0, 0), tile
        assert all(without > with_it for without, with_it in zip(free, (plain, coded, merge), strict=True)), tile
