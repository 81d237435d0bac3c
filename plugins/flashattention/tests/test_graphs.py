"""Captured batches: one graph serves other lengths and pages. On a CPU the calls are made again, not replayed."""

from __future__ import annotations

import pytest

from attnplug import DType, ForwardMode, GraphLevel, PlanError
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.captures import check_host_slots, check_overtaking, replay_scenes
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import (
    KernelCase,
    KernelScene,
    check_captured_lanes,
    check_replay,
    mha,
)
from attnplug_testing.references.flashattention import build, on_cpu, on_devices

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
everywhere = on_devices("fa4")


def scenes(case: KernelCase, new: int, device: str) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    case = on_cpu(case) if device == "cpu" else case
    prefixes = [[300, 5, 64, 127], [1000, 17, 1, 0], [63], [2000, 900], [0, 1, 2, 3]]
    if device == "cpu":
        prefixes = [[300, 5, 64, 127], [63], [500, 90], [0, 1, 2, 3]]
    room = 2 * max(map(max, prefixes))
    return replay_scenes(lambda each: KernelScene(each, device, build("fa4")), case, new, prefixes, room)


@everywhere
@pytest.mark.parametrize(
    ("mode", "new", "page_size", "shape"),
    # What the conformance kit does not capture: windows, other widths, and pages of a tile.
    [(DECODE, 1, 64, {"window": 100}), (VERIFY, 4, 128, {"head_dim": 192, "v_head_dim": 128})],
    ids=["window", "192-128"],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, page_size, shape, kernel, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    stage, others = scenes(mha((), mode, page_size, **shape), new, device)
    capture = Capture(stage).reserve().capture()
    cached = capture.plan.metadata.cached
    calls = [call for call in (cached.whole, cached.split and cached.split.call) if call is not None]
    assert calls
    held = [capture.plan.new_slots, *(tensor for call in calls for tensor in (call.page_table, call.kv_lens))]
    addresses = [tensor.data_ptr() for tensor in held]
    for other in others:
        check_replay(capture, other)
        assert [tensor.data_ptr() for tensor in held] == addresses


@everywhere
def test_decode_is_divided_as_the_longest_context_asks(kernel, device):
    """The parts are counted at capture; which pages each has is found when the graph runs."""
    stage, others = scenes(mha((), DECODE, 128), 1, device)
    capture = Capture(stage).reserve().capture()
    cached = capture.plan.metadata.cached
    assert cached.split is not None and cached.whole is None
    assert cached.split.call.page_table.shape[0] == 4 * cached.split.count
    check_replay(capture, others[0])


@everywhere
def test_an_undivided_batch_is_read_by_its_own_table(kernel, device):
    """If pages are not divided, kernels read the batch's page table and lengths in place. The graph copies neither."""
    stage, _ = scenes(mha((), VERIFY, 64), 4, device)
    capture = Capture(stage).reserve().capture()
    whole = capture.plan.metadata.cached.whole
    assert whole.page_table is capture.batch.geometry.page_table
    assert whole.kv_lens is capture.batch.geometry.seq_lens


@pytest.mark.parametrize("device", DEVICES[1:])
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays with different lengths are queued while the device is busy."""
    check_overtaking(*scenes(mha((), DECODE, 64), 1, device))


@everywhere
def test_captured_rows_go_where_the_host_says(kernel, device):
    stage, others = scenes(mha((), DECODE, 64), 1, device)
    check_host_slots(stage, others[0])


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(
    ("mode", "page_size", "new", "longest"),
    [(DECODE, 64, 1, 300), (DECODE, 128, 1, 2000), (VERIFY, 16, 4, 300)],
    ids=["gqa", "divided", "verify"],
)
def test_captured_lanes_run_on_two_streams(mode, page_size, new, longest, device):
    given = tuple((longest - 31 * number, new) for number in range(8))
    check_captured_lanes(KernelScene(mha(given, mode, page_size, lanes=2), device, build("fa4")))


class TestWrongUse:
    def stage(self, kernel: str = "fa4") -> KernelScene:
        return KernelScene(mha(((20, 4), (9, 4)), VERIFY, dtype=DType.FLOAT32), "cpu", build(kernel))

    def test_a_kernel_that_cannot_be_captured_claims_no_graphs(self):
        assert self.stage("torch").backend.claims.cuda_graph is GraphLevel.NEVER
        assert self.stage("fa4").backend.claims.cuda_graph is GraphLevel.UNIFORM

    def test_a_shape_captured_anew_with_other_memory_is_refused(self):
        """A shape is planned once, and its kernels read the page table of the batch that was captured first."""
        first = Capture(self.stage()).reserve().capture()
        with raises_naming(PlanError, "lane 0"):
            Capture(first.scene, 0, first.attention).capture()
