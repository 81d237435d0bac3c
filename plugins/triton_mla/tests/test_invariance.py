"""Levels of invariance: a request's rows have the same bits in every batch and every mode (E3)."""

from __future__ import annotations

import pytest
import torch

from attnplug import DType, ExtendPath, ForwardMode, Geometry
from attnplug_testing import same_bits
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelScene, mla
from attnplug_testing.references.triton_mla import FIXED, check, scene, small
from attnplug_testing.same_bits import SCALE, assert_same_bits, decode_span, rows_of, store_all
from attnplug_triton_mla.configurations import ENTRIES, choose_invariant, on_triton

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
LEVELS = frozenset({"run", "batch", "graph", "chunks", "verify"})
on_every_device = pytest.mark.parametrize("device", DEVICES)
SETTINGS = {
    "few heads": {"heads": 4},
    "many heads": {"heads": 40},
    "fp8": {"heads": 4, "dtype": DType.FLOAT16, "kv_dtype": "float8_e4m3fn"},
}


def stage_of(device: str, heads: int, **changes) -> KernelScene:
    """Two requests: on a CPU splits have 16 rows up to row 256, and then 32."""
    heads, scale = min(heads, 4) if device == "cpu" else heads, SCALE[device]
    return store_all(scene(mla(((0, 300 * scale), (0, 40)), EXTEND, 16, heads, levels=LEVELS, **changes), device))


@on_every_device
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sample(1)
def test_a_decoded_row_has_the_same_bits_in_every_batch(setting, device):
    same_bits.check_decoded_in_every_batch(stage_of(device, **SETTINGS[setting]))


@on_every_device
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.sample(1)
def test_a_row_has_the_same_bits_decoded_verified_and_prefilled(setting, device):
    """Chunk boundaries, prefix hits, speculation and another request in the batch do not change a bit."""
    same_bits.check_every_mode(stage_of(device, **SETTINGS[setting]), first=250, new=9)


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (MIXED, 9)])
@pytest.mark.sample(1)
def test_results_are_those_of_float64(mode, new, device):
    """C4; NaN in every row that must not be read. Requests without rows and shorter than a split are among them."""
    check(mla(((290, new), (0, new), (15, new), (31, new)), mode, 16, 4, levels=LEVELS), device)


def test_memory_limits_how_many_requests_are_split_and_not_their_bits():
    """Partial results have the memory that the backend was built with; requests without any are not divided."""
    stage, found, shared = stage_of("cpu", 4), [], []
    (scratch,) = stage.backend._scratch
    for most in (scratch.max_rows, 1):
        scratch.max_rows = most
        found += rows_of(stage, [decode_span(0, 300)])
        table, lens = stage.page_table[:1], torch.tensor([300], dtype=torch.int32)
        geometry = Geometry(DECODE, table, lens, 16, rows=1, max_seq_len=300, max_new=1)
        shared.append(int(stage.backend.plan(geometry).metadata.schedule.numbers[8 + 5]))
    assert shared == [0, -1]
    assert_same_bits(*found)


@pytest.mark.parametrize("levels", [frozenset(), frozenset({"run"})])
def test_without_a_level_nothing_changes(levels):
    """Configurations and schedules are those of the table, without splits; all paths of an extend are claimed."""
    stage = scene(mla(((300, 1), (40, 1)), DECODE, 16, 4, levels=levels), "cpu")
    schedule = stage.backend._metadata(stage.geometry()).schedule
    assert schedule.configuration == small(4, 2, 0)
    assert (schedule.tile_rows, schedule.partial_slots) == (schedule.configuration.tile, 2 * schedule.programs)
    assert not any(entry.split for entry in ENTRIES)
    assert stage.backend.claims.mla_extend == frozenset(ExtendPath)


def test_levels_need_one_path_of_extends():
    """The lengths of a batch would decide between absorbed and MHA paths, and decode is absorbed."""
    stage = scene(mla(((30, 1),), DECODE, 16, 4, levels=frozenset({"run", "batch"})), "cpu")
    assert stage.backend.claims.mla_extend == {ExtendPath.ABSORBED}
    assert stage.backend._metadata(stage.geometry()).schedule.configuration == FIXED


@pytest.mark.parametrize(("heads", "format"), [(16, "plain"), (32, "plain"), (128, "plain"), (128, "fp8")])
def test_configurations_of_a_model_have_the_same_splits(heads, format):
    """Only ``gluon_wide`` has tiles for many heads, and it reads rows of 16 bits."""
    entries = choose_invariant(heads, format)
    assert all((entry.kernel == "wide") == (heads > 32 and format == "plain") for entry in entries)
    assert len({(entry.split, entry.grows, entry.step) for entry in entries}) == 1
    for entry in (*entries, *map(on_triton, entries)):
        assert entry.split and entry.split % entry.step == 0
    assert all(on_triton(entry).kernel == "triton" for entry in entries)
