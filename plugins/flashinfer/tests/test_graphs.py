"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest

import paged_reference
from attnplug import BackendContext, BackendError, CacheLayout, DType, ForwardMode
from attnplug_conformance.checks.graphs import Capture
from attnplug_flashinfer.shapes import FlashInferLayerShape
from attnplug_testing.captures import check_host_slots, check_replays, replay_scenes
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import KernelCase, KernelScene, check_captured_lanes, check_replay, mha, replayed
from paged_reference import FP8_TOLERANCE, build, scene

DECODE, VERIFY, DRAFT_EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND
FP8 = {"kv_dtype": DType.FLOAT8_E4M3, "kv_scales": (0.5, 3.0)}
on_every_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.parametrize("device", DEVICES[1:])


def scenes(case: KernelCase, new: int, device: str) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[1000, 17, 1, 0], [3000, 2900], [3900, 10, 3900, 200]]
    return replay_scenes(lambda each: scene(each, device), case, new, prefixes, max(map(max, prefixes)))


@on_a_gpu
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_one_capture_serves_other_batches(mode, new, device):
    """Captured by the library itself; over stand-ins the conformance kit proves it."""
    check_replays(*scenes(mha((), mode), new, device))


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "changes"),
    # What the conformance kit does not capture: windows, caps, fp8, and tiles of every height.
    [
        (DECODE, 1, {"window": 200, "page_size": 16}),
        (DECODE, 1, FP8),
        (DECODE, 1, {"heads": 4, "kv_heads": 4, "head_dim": 128, "page_size": 1, "cap": 3.0}),
        (VERIFY, 6, {"window": 40, "heads": 14, "page_size": 16}),
        (VERIFY, 5, {"heads": 32, "head_dim": 128}),
        (DRAFT_EXTEND, 2, {"layout": CacheLayout.HEAD_MAJOR}),
    ],
    ids=["window", "fp8", "pages-of-1", "verify-window", "tiles-of-128", "draft"],
)
@pytest.mark.sample(4)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, changes, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    most = FP8_TOLERANCE[device] if "kv_dtype" in changes else None
    check_replays(*scenes(mha((), mode, **changes), new, device), most)


@on_every_device
def test_layers_of_different_windows_are_captured_each(device):
    """Their work lists differ, and their lengths and pages are the same memory."""

    def with_others(context: BackendContext):
        first, own, last = context.model.layers
        layers = (replace(first, sliding_window=5), own, replace(last, sliding_window=5))
        return build(replace(context, model=replace(context.model, layers=layers)))

    stage = scene(mha(((1000, 1), (40, 1)), DECODE), device, with_others)
    capture = Capture(stage).reserve().capture()
    check_replay(capture, stage)
    short, long = (call.work_list for call in capture.plan.metadata.calls.values())
    assert int(short.valid.sum()) < int(long.valid.sum())


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(mha((), DECODE), 1, device)
    capture = Capture(stage).reserve().capture()
    replayed(capture, others[0])
    assert capture.batch.geometry.host is None
    with nothing_waits(device):
        assert stage.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan


@on_every_device
def test_captured_rows_go_where_the_host_says(device):
    """A host that owns its slots has them in the batch."""
    stage, others = scenes(mha((), DECODE), 1, device)
    check_host_slots(stage, others[0])


@pytest.mark.parametrize(
    ("requests", "queries", "tiles", "rows"), [(1, 1, 33, 16), (160, 1, 199, 16), (40, 9, 40, 64), (40, 33, 80, 128)]
)
def test_scratch_of_a_capture_holds_the_parts_of_all_tiles(requests, queries, tiles, rows):
    """The same number as the library reserves: 32 heads over 8 of 128, on 132 SMs."""
    parts = 4 * 32 * tiles * rows * 129
    found = FlashInferLayerShape(32, 8, 128, 1.0, None, None).captured_scratch(132, requests, queries)
    assert parts < found <= parts + (1 << 20)


@on_a_gpu
@pytest.mark.parametrize("requests", [1, 40, 160])
def test_captures_of_many_requests_have_scratch_of_their_size(requests, device):
    """More than eager batches take. Graphs that hold memory which has grown since still run on their own."""
    stage = scene(mha(((700, 4),) * requests, VERIFY, heads=64, head_dim=128, kv_heads=8), device)
    check_replay(Capture(stage).reserve().capture(), stage)


@pytest.mark.parametrize("changed", ["order", "chunks", "numbers"])
def test_a_plan_laid_out_in_an_unknown_way_is_not_captured(monkeypatch, changed):
    """A later FlashInfer may lay its plans out differently: then there are no graphs, instead of wrong results."""
    real = paged_reference.Decode.make_plan

    def other(self, given):
        real(self, given)
        if changed == "order":  # of requests and parts
            self._plan_info[4], self._plan_info[6] = self._plan_info[6], self._plan_info[4]
        elif changed == "chunks":
            self.array(9, 1).fill_(100)
        else:
            self._plan_info.append(0)

    monkeypatch.setattr(paged_reference.Decode, "make_plan", other)
    capture = Capture(scene(mha(((20, 1), (9, 1)), DECODE), "cpu")).reserve()
    with pytest.raises(BackendError, match="work list layout"):
        capture.capture()


def test_page_indices_are_filled_after_the_work_lists(monkeypatch):
    """Attention kernels may read work lists before the previous kernel has ended, so another one comes between."""
    order = []
    for name in ("fill_work_list", "fill_indices"):
        monkeypatch.setattr(f"attnplug_flashinfer.graphs.{name}", lambda *_, name=name: order.append(name))
    capture = Capture(scene(mha(((20, 1), (9, 1)), DECODE), "cpu")).reserve()
    capture.attention.capture(capture.batch, in_capture=True)
    capture.attention.refill(capture.batch)
    assert order == ["fill_work_list", "fill_work_list", "fill_indices"]


@on_a_gpu
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_captured_lanes_run_on_two_streams(mode, new, device):
    """B5: plans of one shape share no wrapper, no scratch and no graph memory."""
    given = tuple((prefix, new) for prefix in (3000, 2900, 3800, 3500))
    check_captured_lanes(scene(mha(given, mode, lanes=2), device))
