"""Levels of invariance: a request's rows have the same bits in every batch and every mode (E3)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from attnplug import DType, ForwardMode, Geometry
from attnplug_testing import same_bits
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelScene, mha
from attnplug_testing.same_bits import SCALE, Span, assert_same_bits, decode_span, rows_of, store_all
from attnplug_triton_mha.configurations import INVARIANT, TABLES
from attnplug_triton_mha.triton_splits import max_splits, split_from, split_rows, splits_before
from interpreted_mha import check, scene, small

DECODE, VERIFY, EXTEND, MIXED = (
    ForwardMode.DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
)
LEVELS = frozenset({"run", "batch", "graph", "chunks", "verify"})
on_every_device = pytest.mark.parametrize("device", DEVICES)
SETTINGS = {
    "plain": {},
    "window, sinks and cap": {"window": 40, "sinks": True, "cap": 2.0},
    "fp8": {"dtype": DType.FLOAT16, "kv_dtype": "float8_e4m3fn"},
}


def stage_of(device: str, **changes) -> KernelScene:
    """Two requests: on a CPU splits have 16 rows up to row 256, and then 32."""
    lengths = ((0, 300 * SCALE[device]), (0, 40))
    return store_all(scene(mha(lengths, EXTEND, 16, 2, 1, 32, levels=LEVELS, **changes), device))


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
    same_bits.check_every_mode(stage_of(device, **SETTINGS[setting]), first=240, new=17)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_largest_tile_gives_the_bits_of_the_others():
    """Only head dim 128 has it: extends run on it, verified rows on the tile below, decoded ones on the smallest."""
    case = mha(((0, 300 * SCALE["cuda"]), (0, 40)), EXTEND, 16, 8, 2, 128, levels=LEVELS)
    same_bits.check_every_mode(store_all(scene(case, "cuda")), first=240, new=17)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("heads", "dim"), [(12, 64), (8, 128)])
def test_every_row_of_a_chunk_has_the_bits_of_a_decoded_one(heads: int, dim: int):
    """In large tiles, some steps of a row have no mask. Most rows' log-sum-exps differed if only these were fused."""
    stage = store_all(scene(mha(((0, 2400), (0, 40)), EXTEND, 16, heads, 1, dim, levels=LEVELS), "cuda"))
    (whole,) = rows_of(stage, [Span(0, 2300, 100)], EXTEND)
    for row in range(100):
        (decoded,) = rows_of(stage, [Span(0, 2300 + row)])
        assert_same_bits((whole[0][row : row + 1], whole[1][row : row + 1]), decoded)


@pytest.mark.parametrize("levels", [frozenset(), LEVELS])
def test_kernels_are_launched_with_their_compiler_options(levels, monkeypatch):
    """Planning test: nothing is fused at levels of invariance (see ``test_configurations``)."""
    from attnplug_triton_mha import attention, triton_merge

    given: list[dict[str, object]] = []

    class Kernel:
        def __init__(self, kernel: object) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object):
            return lambda *given_, **named: (given.append(named), self.kernel[grid](*given_, **named))

    for module, name in ((attention, "attend"), (triton_merge, "merge_splits"), (triton_merge, "merge")):
        monkeypatch.setattr(module, name, Kernel(getattr(module, name)))
    stage = store_all(scene(mha(((0, 300), (0, 40)), EXTEND, 16, 2, 1, 32, levels=levels), "cpu"))
    rows_of(stage, [decode_span(0, 300)])
    assert len(given) == 1 + bool(levels)  # without levels, the merge is fused
    assert {named.get("enable_fp_fusion", True) for named in given} == {not levels}


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3), (MIXED, 20)])
@pytest.mark.sample(1)
def test_results_are_those_of_float64(mode, new, device):
    """C4; NaN in every row that must not be read. Requests without rows and shorter than a split are among them."""
    check(mha(((290, new), (0, new), (15, new), (31, new)), mode, 16, 4, 2, 32, levels=LEVELS), device)


def test_memory_limits_how_many_requests_are_split_and_not_their_bits():
    """Partial results have the memory that the backend was built with; requests without any are not divided."""
    stage, found, parts = stage_of("cpu"), [], []
    for most in (None, 1):
        (scratch,) = stage.backend._scratch
        if most is not None:
            scratch._nbytes = most
        table, lens = stage.page_table[:1], torch.tensor([300], dtype=torch.int32)
        geometry = Geometry(DECODE, table, lens, 16, rows=1, max_seq_len=300, max_new=1)
        ((schedule, _),) = stage.backend.plan(geometry).metadata.schedules.values()
        parts.append(int(schedule.records[0, 9]))
        found += rows_of(stage, [decode_span(0, 300)])
    assert parts[0] > 1 and parts[1] == 1
    assert_same_bits(*found)


@pytest.mark.parametrize("levels", [frozenset(), frozenset({"run"})])
def test_without_a_level_nothing_changes(levels):
    """Configurations and schedules are those of the table; its kernels have no splits."""
    stage = scene(mha(((300, 1), (40, 1)), DECODE, 16, 4, 2, 32, levels=levels), "cpu")
    for schedule, _ in stage.backend._metadata(stage.geometry()).schedules.values():
        assert schedule.configuration == small(2, 2, 2, 0)
        assert (schedule.configuration.split, schedule.tile_rows) == (0, schedule.configuration.tile)
        assert schedule.partial_rows == 2 * schedule.target * schedule.configuration.tile
    assert not any(entry.split for table in TABLES for *_, entry in table) and all(entry.split for entry in INVARIANT)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 256, 257, 288, 289, 768, 769, 832, 833, 2816, 2817, 5000])
def test_splits_are_counted_alike_on_host_and_device(rows):
    """The first 16 splits of 16 rows, the next 16 of 32, the next 32 of 64, all others of 128."""
    lengths = [16] * 16 + [32] * 16 + [64] * 32 + [128] * 100
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    assert max_splits(rows, 16, 16) == sum(start < rows for start in starts)
    assert max_splits(rows, 16, 0) == -(-rows // 16)
    found = torch.zeros(3, dtype=torch.int32)
    _splits[(1,)](found, rows)
    inside = sum(start <= rows for start in starts) - 1
    behind = next(start for start in starts if start >= rows)
    assert found.tolist() == [lengths[inside], behind, max_splits(rows, 16, 16)]


@triton.jit
def _splits(found, row):
    tl.store(found, split_rows(row, 16, 16))
    tl.store(found + 1, split_from(row, 16, 16))
    tl.store(found + 2, splits_before(row, 16, 16))
