"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import DType, ForwardMode
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.captures import (
    check_copied_slots,
    check_overtaking,
    check_replays,
    check_second_capture,
    check_two_shapes,
    replay_scenes,
)
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import KernelScene, check_captured_lanes, check_replay, mla, replayed
from attnplug_testing.references.triton_mla import scene
from attnplug_triton_mla.configurations import MLAKernelConfig

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
EXTEND = ForwardMode.EXTEND
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


def coarse(*_: int, **__: bool) -> MLAKernelConfig:
    """A configuration with long steps, as the interpreter's time grows with the number of steps."""
    return MLAKernelConfig(16, 128, 4, 2, merge="last")


def scenes(
    mode: ForwardMode, new: int, device: str, heads: int = 2, page_size: int = 64, **changes
) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes, choose = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [2000, 900], [0, 1, 2, 3]], None
    if device == "cpu":
        prefixes, choose = [[150, 5, 64, 127], [90, 17, 1, 0], [63, 40]], coarse
    case = mla((), mode, page_size, heads, **changes)
    return replay_scenes(lambda each: scene(each, device, choose), case, new, prefixes, max(map(max, prefixes)))


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(VERIFY, 4), (DRAFT_EXTEND, 2)])
@pytest.mark.sample(1)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, device):
    check_replays(*scenes(mode, new, device))


@on_a_gpu
@pytest.mark.parametrize(
    ("heads", "page_size", "invariant"),
    [(8, 1, False), (16, 64, True), (24, 16, False), (128, 64, False), (128, 64, True)],
)
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_captures_of_every_shape(mode, new, heads, page_size, invariant, device):
    levels = frozenset({"run", "graph"} if invariant else ())
    check_replays(*scenes(mode, new, device, heads, page_size, levels=levels))


@on_a_gpu
def test_a_captured_fp8_cache(device):
    check_replays(*scenes(DECODE, 1, device, 16, kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.5, 0.5)))


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share partial results and counters, and each is planned anew in its own graph."""
    check_two_shapes(*scenes(DECODE, 1, device))


@on_every_device
def test_a_replay_is_as_a_batch_that_was_not_captured(device):
    """Equal bits: the schedule is the same, made from the same numbers."""
    stage, others = scenes(DECODE, 1, device)
    capture = Capture(stage).reserve().capture()
    assert torch.equal(replayed(capture, others[0]), others[0].results()[0])


@on_every_device
def test_replay_planning_launches_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(DECODE, 1, device)
    capture = Capture(stage).reserve().capture()
    replayed(capture, others[0])
    numbers = capture.plan.metadata.schedule.numbers.fill_(-7)
    with nothing_waits(device):
        assert stage.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan
    assert (numbers == -7).all()


@on_a_gpu
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays with different lengths are queued while the device is busy."""
    check_overtaking(*scenes(DECODE, 1, device, 16))


@on_every_device
def test_a_captured_extend_serves_any_division_of_its_rows(device):
    """ALWAYS: prompts of other lengths, after other prefixes, fewer of them, and rows that are padding."""
    divisions = [((0, 12), (30, 7), (5, 1)), ((100, 1), (0, 20)), ((3, 1), (64, 1), (0, 1), (70, 0)), ((200, 9),)]
    case = mla(((240, 6),) * 4, EXTEND, page_size=16, heads=2)
    capture = Capture(scene(case, device)).reserve().capture()
    for seed, division in enumerate(divisions):
        check_replay(capture, scene(replace(case, lengths=division, seed=seed), device))


@on_every_device
def test_a_second_capture_of_a_shape_reads_its_own_page_table(device):
    """Two captures share a plan, and each graph reads the memory that it was captured with."""
    stage, others = scenes(DECODE, 1, device)
    check_second_capture(stage, others[0])


@on_every_device
def test_a_replay_writes_new_rows_where_the_host_says(device):
    """Its slots are copied inside the graph, from wherever the batch has them then."""
    check_copied_slots(scene(mla(((64, 1),) * 4, DECODE, heads=2), device))


class TestLanes:
    """Plans of one shape, alive and running at the same time."""

    @on_a_gpu
    @pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 3)])
    def test_captured_lanes_run_on_two_streams(self, mode, new, device):
        given = tuple((prefix, new) for prefix in (30000, 5, 64, 15000))
        check_captured_lanes(scene(mla(given, mode, heads=2, lanes=2), device))

    def test_one_runs_while_parts_of_the_other_wait_to_be_merged(self, monkeypatch):
        """Partial results are a lane's own."""
        from attnplug_triton_mla import backend

        stage = scene(mla(((150, 1), (5, 1), (64, 1), (75, 1)), DECODE, heads=2, lanes=2), "cpu")
        halves, merge, outs = stage.halves(), backend.launch_merge, {}
        batches = [half.plan(half.batch(lane=lane)) for lane, half in enumerate(halves)]

        def run(lane: int) -> None:
            outs[lane] = halves[lane].forward(batches[lane])

        def merge_late(*arguments):
            monkeypatch.setattr(backend, "launch_merge", merge)
            run(1)
            merge(*arguments)

        monkeypatch.setattr(backend, "launch_merge", merge_late)
        run(0)
        for lane, half in enumerate(halves):
            assert relative_error(outs[lane], half.wanted()[0]) <= stage.tolerance
