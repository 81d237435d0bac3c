"""The table: every shape has an entry, and the configuration for a GPU compiles and fits, without needing that GPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, astuple, replace
from pathlib import Path

import pytest
import torch

from attnplug_testing.triton_mode import compiled_by
from attnplug_triton_mla.configurations import (
    ANY,
    ENTRIES,
    RAGGED,
    TABLES,
    MLAKernelConfig,
    MLAKernelLimits,
    RowFormat,
    choose,
    fit_config,
    max_partial_rows,
    on_triton,
)
from attnplug_triton_mla.planner import BatchShape, MLASchedule
from attnplug_triton_mla.ragged import fit_ragged

KIB = 1024
SHARED = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
"""Maximum shared memory of a program, by SM."""
WIDTH = 576
ROW_BYTES = {"plain": 2 * WIDTH, "fp8": WIDTH, "fp8_per_token_head": 656, "fp8_ds_mla": 656, "nvfp4": 416}


def limits(sm: int, format: str) -> MLAKernelLimits:
    """Limits of a GPU for latent rows of 512 + 64 columns."""
    converted = {"plain": 0, "fp8_ds_mla": 1024, "nvfp4": 1024}.get(format, ROW_BYTES[format])
    return MLAKernelLimits(sm, SHARED[sm], 2 * WIDTH, ROW_BYTES[format], converted_bytes=converted)


@pytest.mark.parametrize("format", TABLES)
def test_every_shape_finds_its_entry(format):
    for rows in (1, 8, 16, 17, 32, 33, 64, 128, 1024):
        for requests in (1, 2, 3, 16, 64, 1000):
            for tokens in (0, 100, 8192, 8193, ANY):
                entry = choose(rows, requests, tokens, format=format)
                assert entry in ENTRIES
                assert entry.tile == 16 or rows > entry.tile // 4, "a tile most of which is never used"
    assert choose(0, 4, 100, format=format) is RAGGED


def test_who_merges_a_batch_of_different_rows():
    """The merging kernel counts on equally many rows of every request, and those in Gluon leave merging to it."""
    assert RAGGED.merge == "last" and RAGGED.kernel == "triton"
    assert all(entry.merge == "kernel" for entry in ENTRIES if entry.kernel != "triton")


@pytest.mark.parametrize("sm", SHARED)
def test_no_plan_asks_for_more_partial_results_than_were_reserved(sm):
    """A backend takes no more than it reserved when built: graphs freeze the workspace."""
    for format, rows, requests, tokens in itertools.product(TABLES, (0, 1, 16, 17, 33, 512), (1, 3, 99), (99, ANY)):
        cut = fit_config(choose(rows, requests, tokens, format=format), limits(sm, format))
        shape = BatchShape(requests, requests * max(rows, 1), rows, 1, 64, 8)
        slots = MLASchedule.reserve(shape, cut, 132, torch.device("meta")).partial_slots
        assert slots * cut.tile <= max_partial_rows(132)


@pytest.mark.parametrize("sm", SHARED)
@pytest.mark.parametrize("format", TABLES)
def test_what_is_chosen_has_room_by_our_own_count(sm, format):
    room, row_bytes = limits(sm, format), ROW_BYTES[format]
    for entry in (RAGGED, *(entry for *_, entry in TABLES[format])):
        found = fit_config(entry, room)
        kept = found.stages if found.kernel != "triton" else max(found.stages - 1, 1)
        rows = found.tile * 2 * WIDTH + kept * found.step * row_bytes
        assert rows <= SHARED[sm] and found.tile >= 16 and found.step >= 32
        if sm == 90:
            assert found == entry, "the tables are for this GPU"


def test_an_early_launch_is_for_gpus_that_know_it():
    entry = replace(RAGGED, overlap=True)
    assert [fit_config(entry, MLAKernelLimits(sm, 1 << 20, 2 * WIDTH, WIDTH)).overlap for sm in (80, 90)] == [
        False,
        True,
    ]


@pytest.mark.parametrize(("kernel", "rows", "tile", "instead"), [("low", 16, 16, 16), ("wide", 128, 64, 32)])
def test_kernels_in_gluon_are_for_sm_90_and_16_bits(kernel, rows, tile, instead):
    entry = choose(rows, 4, ANY, format="plain")
    assert (entry.kernel, entry.tile) == (kernel, tile)
    assert {each.kernel for name, table in TABLES.items() if name != "plain" for *_, each in table} == {"triton"}
    for sm in SHARED:
        found = fit_config(entry, MLAKernelLimits(sm, 1 << 20, 2 * WIDTH, 2 * WIDTH))
        assert (found.kernel, found.tile) == ((kernel, tile) if sm == 90 else ("triton", instead))
    crowded = fit_config(entry, MLAKernelLimits(90, 120 * KIB, 2 * WIDTH, 2 * WIDTH))
    assert (crowded.kernel, crowded.tile) == ("triton", instead), "they know one shape, which is not cut down"
    odd = fit_config(entry, MLAKernelLimits(90, 1 << 20, 2 * WIDTH, 2 * WIDTH, copied=False))
    assert (odd.kernel, odd.tile) == ("triton", instead), "they copy rows by 16 bytes"


def test_trees_are_for_the_triton_kernel():
    """This holds whatever kernel the table lists for a shape, and needs no more partial results than are reserved."""
    for entry in ENTRIES:
        found = on_triton(entry)
        assert (found.kernel, found.programs, found.merge) == ("triton", entry.programs, entry.merge)
        assert found.tile <= min(entry.tile, 32) and (entry.kernel != "triton" or found is entry)


@pytest.mark.cross_compile
def test_it_compiles_for_gpus_and_fits_them() -> None:
    """Every kernel by Triton's compiler, which needs no GPU: Triton's own for every SM, others for the SM they are for.

    Whether it is right or fast there is not said. A case without a word on trees is one of selected rows.
    """

    def chosen(rows: int, requests: int, format: RowFormat = "plain") -> MLAKernelConfig:
        return choose(rows, requests, ANY, format=format)

    wanted = []
    token, nvfp4, packed = "fp8_per_token_head", "nvfp4", "fp8_ds_mla"
    for sm, entry, q, format, page_size, apart, tree in (
        (80, RAGGED, "fp16", "plain", 64, False, True),
        (80, chosen(16, 1), "fp16", "plain", 1, False, None),
        (80, chosen(16, 1, nvfp4), "fp16", nvfp4, 64, False, False),
        (80, RAGGED, "bf16", nvfp4, 16, False, True),
        (89, chosen(16, 1, "fp8"), "bf16", "fp8", 64, True, False),
        (89, RAGGED, "fp16", token, 64, False, True),
        (89, chosen(16, 1, packed), "bf16", packed, 1, True, None),
        (90, chosen(16, 1), "bf16", "plain", 64, True, False),
        (90, on_triton(chosen(16, 1)), "bf16", "plain", 48, True, True),
        (90, chosen(128, 100), "bf16", "plain", 64, True, False),
        (90, chosen(128, 100), "bf16", "plain", 1, False, None),
        (90, chosen(16, 16, token), "bf16", token, 64, True, False),
        (90, chosen(16, 16, nvfp4), "bf16", nvfp4, 1, False, None),
        (90, chosen(128, 16, nvfp4), "bf16", nvfp4, 64, True, False),
        (100, chosen(128, 1, "fp8"), "bf16", "fp8", 1, False, False),
        (120, chosen(16, 1, token), "bf16", token, 1, False, None),
        (120, chosen(128, 64, packed), "bf16", packed, 1, True, None),
        (120, chosen(16, 1, nvfp4), "bf16", nvfp4, 64, False, True),
    ):
        found = fit_config(entry, limits(sm, format))
        case = {"sm": sm, "cut": asdict(found), "q": q, "format": format, "page_size": page_size}
        wanted.append({**case, "apart": apart, "tree": bool(tree), "selected": tree is None})
    ragged_cases = (80, 128, 64, 128), (90, 128, 64, 128), (90, 256, 0, 256), (100, 256, 0, 256), (120, 128, 64, 128)
    for sm, nope, rope, value in ragged_cases:
        ragged = fit_ragged(sm, SHARED[sm], (nope + rope, value))
        wanted.append({"sm": sm, "ragged": astuple(ragged), "dims": (nope, rope, value)})
    compiled = compiled_by(Path(__file__).with_name("cross_compile.py"), json.dumps(wanted))
    around = {"plan", "plan of different rows", "merge", "plan of splits", "merge of splits"}
    assert {(sm, kernel) for sm, kernel, _ in compiled} == {
        *((sm, "triton") for sm in (80, 89, 90, 100, 120)),
        *((sm, "ragged") for sm in (80, 90, 100, 120)),
        (90, "specialized ragged"),
        *((90, kernel) for kernel in ("low", "wide", "triton by splits", "wide by splits", *around)),
    }
    for sm, kernel, taken in compiled:
        assert taken <= SHARED[sm], (sm, kernel)
        assert taken > 0 or kernel in around


def test_only_the_triton_kernel_merges_by_its_last_program():
    """Other kernels would leave splits unmerged."""
    low = next(entry for entry in ENTRIES if entry.kernel == "low")
    with pytest.raises(ValueError, match="merge='last' requires 'triton'"):
        replace(low, merge="last")
    assert on_triton(low).merge == "kernel" and replace(on_triton(low), merge="last")
