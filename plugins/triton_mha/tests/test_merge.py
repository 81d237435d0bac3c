"""The separate merge kernel against float64: interpreted on a CPU, compiled on a GPU.

Unwritten partial results are NaN, and so are cache rows that must not be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import SCRATCH, DType, ForwardMode
from attnplug_conformance.checks.graphs import Capture
from attnplug_conformance.diagnosis import check_output
from attnplug_conformance.scene import Output
from attnplug_testing.captures import replay_scenes
from attnplug_testing.devices import DEVICES
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_replay, check_stored, lengths, mha, ragged
from attnplug_testing.trees import random_trees
from attnplug_triton_mha.configurations import ENTRIES, MHAKernelConfig
from attnplug_triton_mha.plugin import COUNTERS
from interpreted_mha import CODED_TOLERANCE, Choose, check, scene

pytestmark = pytest.mark.long

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])
SEPARATE = MHAKernelConfig(16, 16, 4, 2, programs=4, separate_merge=True, overlap=False)
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.37, 1.7)}
QWEN = {"heads": 16, "kv_heads": 2, "head_dim": 256}
"""Qwen3-Next's full layers."""
SMALL = {"page_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 32}


def cut(**changes: Any) -> Choose:
    return lambda *_: replace(SEPARATE, **changes)


def poisoned(case: KernelCase, device: str, choose: Choose) -> KernelScene:
    """The case with NaN in the memory of partial results."""
    stage = scene(case, device, choose)
    stage.workspace.request("test", stage.device, SCRATCH, 1).buffer.fill_(255)
    return stage


def tiles(stage: KernelScene) -> torch.Tensor:
    """Planned parts and places of all tiles."""
    ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
    assert schedule.separate_merge is not None
    return schedule.separate_merge.tiles


def check_separate(case: KernelCase, device: str, choose: Choose) -> KernelScene:
    """float64's results, by a batch that has tiles of several parts."""
    stage = poisoned(case, device, choose)
    if case.kv_dtype is None:
        check_output(stage, Output(*stage.results(), 0.0, 0.0))
    else:
        check_stored(stage, CODED_TOLERANCE)
    assert int(tiles(stage)[:, 0].max()) > 1
    counters = stage.workspace.request("test", stage.device, COUNTERS, 1).buffer
    assert not counters.any()
    return stage


class TestBatches:
    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_wide_heads_of_few_kv_heads(self, mode, new, device):
        """C4; requests of many parts, of one part, and of no row but the new ones."""
        stage = check_separate(mha(((150, new), (0, new), (1, new)), mode, 16, **QWEN), device, cut(programs=8))
        parts = tiles(stage)[:, 0].tolist()
        assert max(parts) > 4 and min(parts) == 1

    @on_every_device
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
    def test_sinks_a_window_and_a_cap_at_once(self, mode, new, device):
        case = mha(((90, new), (3, new), (200, new)), mode, 16, 4, 2, 32, cap=2.0, sinks=True, window=70)
        check_separate(case, device, cut(programs=8))

    @on_every_device
    @pytest.mark.parametrize("changes", [{}, {"sinks": True}, {"head_dim": 80, "lse": True}], ids=str)
    def test_an_fp8_cache(self, changes, device):
        check_separate(mha(((170, 3), (0, 3), (3, 3)), VERIFY, **{**SMALL, **FP8, **changes}), device, cut())

    @on_every_device
    @pytest.mark.parametrize("dims", [(80, 80), (96, 48), (144, 144), (16, 16)])
    def test_values_of_other_widths_than_powers_of_two(self, dims, device):
        check_separate(mha(((120, 1), (33, 1)), DECODE, 16, 6, 2, *dims), device, cut(programs=6))

    @on_every_device
    @pytest.mark.parametrize("new", [11, 40])
    def test_several_tiles_of_a_request(self, new, device):
        """The last tile is not full."""
        check_separate(mha(((150, new), (0, new)), VERIFY, 16, 6, 2, 32), device, cut(programs=20))

    @on_every_device
    def test_tall_tiles(self, device):
        check_separate(mha(((150, 50), (60, 50)), VERIFY, 16, 4, 2, 32), device, cut(tile=64, programs=9))

    @on_every_device
    def test_trees(self, device):
        given = {**SMALL, "heads": 8, "trees": random_trees(3, 7, seed=7)}
        check_separate(mha(((0, 7), (37, 7), (164, 7)), VERIFY, **given), device, cut(programs=9))

    @on_every_device
    @pytest.mark.parametrize(("requests", "cached"), [(1, 700), (8, 800)])
    def test_many_parts(self, requests, cached, device):
        """All parts at once, or in several rounds if the batch is planned for equal requests."""
        case = mha(((cached, 1), *((0, 1),) * (requests - 1)), DECODE, 16, 8, 1, 32)
        stage = check_separate(case, device, cut(programs=20))
        ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
        parts = int(schedule.separate_merge.tiles[0, 0])
        assert parts > 32
        if device == "cpu":  # a GPU has programs for all steps of all requests
            assert (parts > 2 * schedule.separate_merge.config.parts) is (requests > 1)

    @on_every_device
    def test_without_a_log_sum_exp(self, device):
        stage = poisoned(mha(((90, 1), (3, 1)), DECODE, lse=False, **SMALL), device, cut())
        assert stage.error() <= stage.tolerance

    @on_every_device
    def test_requests_with_different_numbers_of_rows_are_merged_inside(self, device):
        stage = check(mha(((150, 20), (9, 1), (40, 0)), EXTEND, **SMALL), device, cut())
        ((schedule, _),) = stage.backend.init_forward_metadata(stage.batch()).metadata.schedules.values()
        assert schedule.separate_merge is None and int(schedule.records[:, 9].max()) > 1


@on_every_device
def test_the_same_batch_gives_the_same_bits(device):
    stage = poisoned(mha(((150, 1), (40, 1), (2, 1)), DECODE, **SMALL), device, cut())
    first, first_lse = stage.results()
    for _ in range(1 if device == "cpu" else 100):
        again, again_lse = stage.results()
        assert torch.equal(again, first) and torch.equal(again_lse, first_lse)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, for queries of padded requests
@on_every_device
@pytest.mark.parametrize(("mode", "new", "changes"), [(DECODE, 1, {}), (DECODE, 1, FP8), (VERIFY, 3, {"window": 60})])
def test_one_capture_serves_other_lengths_and_fewer_requests(mode, new, changes, device):
    """A tile that was divided may be whole in the next replay, and the other way round; padded requests are zero."""
    case = mha((), mode, **{**SMALL, **changes})
    prefixes = [[100, 5, 16, 31], [0, 1, 2, 3], [150, 150], [63]]
    stage, others = replay_scenes(lambda each: scene(each, device, cut()), case, new, prefixes, 300)
    capture = Capture(stage).reserve().capture()
    ((schedule, _),) = capture.plan.metadata.schedules.values()
    parts = []
    for other in others:
        stage.workspace.request("test", stage.device, SCRATCH, 1).buffer.fill_(255)
        check_replay(capture, other)
        parts.append(int(schedule.separate_merge.tiles[0, 0]))
    assert min(parts) == 1 and max(parts) > 1


class TestOnAGPU:
    """Entries of the table, merged in both ways, whichever it would choose."""

    @on_a_gpu
    @pytest.mark.parametrize("separate", [False, True, None])
    @pytest.mark.parametrize("entry", sorted(set(ENTRIES), key=str), ids=str)
    def test_every_entry_of_the_table(self, entry, separate, device):
        entry = replace(entry, separate_merge=separate)
        for given, mode in (
            (lengths(5, 5000, 1, seed=1), DECODE),
            (lengths(3, 2000, 4, seed=2), VERIFY),
            (ragged(6, 2000, 300, seed=3), EXTEND),
        ):
            check(mha(given, mode, **QWEN), device, lambda *_: entry)

    @on_a_gpu
    @pytest.mark.parametrize("separate", [False, True])
    @pytest.mark.parametrize("requests", [1, 2, 7, 60])
    def test_real_batches_give_the_same_bits(self, requests, separate, device):
        entry = replace(ENTRIES[0], separate_merge=separate)
        stage = check(mha(lengths(requests, 9000, 1, seed=requests), DECODE, **QWEN), device, lambda *_: entry)
        first = stage.results()[0]
        assert all(torch.equal(stage.results()[0], first) for _ in range(20))
