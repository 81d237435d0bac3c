"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug import BackendError, DType, ForwardMode
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.graphs import Capture
from attnplug_testing.captures import check_overtaking, check_replays, replay_scenes
from attnplug_testing.devices import DEVICES, nothing_waits
from attnplug_testing.kernel_scene import (
    KernelScene,
    check_captured_lanes,
    check_replay,
    check_replays_in_parts,
    mla,
    replayed,
)
from attnplug_testing.references.flashinfer_mla import build, library_schedule, on_cpu

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(
    mode: ForwardMode, new: int, device: str, heads: int = 16, page_size: int = 64, **changes
) -> tuple[KernelScene, list[KernelScene]]:
    """A large pool to capture on, and batches to replay: long and short, full and with fewer requests."""
    prefixes = [[300, 5, 64, 127], [200, 17, 1, 0], [63], [0, 1, 2, 3]]
    if device != "cpu":
        prefixes += [[2000, 900], [1000, 17, 1, 0]]
    case = mla((), mode, page_size, heads, **changes)
    case = on_cpu(case) if device == "cpu" else case
    return replay_scenes(lambda each: KernelScene(each, device, build), case, new, prefixes, max(map(max, prefixes)))


@on_every_device
@pytest.mark.parametrize(("mode", "new", "heads", "page_size"), [(DECODE, 1, 128, 1), (VERIFY, 4, 24, 16)])
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    """Replays give float64's result; padded requests read and write nothing; NaN is everywhere else."""
    check_replays(*scenes(mode, new, device, heads, page_size))


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_one_capture_serves_an_fp8_cache_too(mode, new, device):
    """Padding writes nothing there either. The library rounds the scale to bfloat16, which holds this one."""
    stage, others = scenes(mode, new, device, kv_dtype=DType.FLOAT8_E4M3, kv_scales=(0.375, 0.375))
    capture = Capture(stage).reserve().capture()
    for other in others:
        check_replay(capture, other)
        wanted = other.wanted()[0]
        assert relative_error(capture.out[: len(wanted)], wanted) <= (1e-5 if device == "cpu" else 2e-2)


@on_every_device
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_one_capture_takes_queries_in_parts(mode, new, device):
    check_replays_in_parts(*scenes(mode, new, device))


def swapped(one: str, other: str):
    """As if two arrays of the library were swapped."""

    def made(call):
        work_list = library_schedule(call)
        return replace(work_list, **{one: getattr(work_list, other), other: getattr(work_list, one)})

    return made


@on_every_device
def test_replays_are_planned_without_lengths_on_the_host(device):
    """Nothing is sent, and nothing read back."""
    stage, others = scenes(DECODE, 1, device)
    capture = Capture(stage).reserve().capture()
    replayed(capture, others[0])
    assert capture.batch.geometry.host is None
    with nothing_waits(device):
        assert stage.backend.init_forward_metadata_out_graph(capture.batch) is capture.plan


@pytest.mark.parametrize("device", DEVICES[1:])
def test_plans_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Replays with different lengths are queued while the device is busy."""
    check_overtaking(*scenes(DECODE, 1, device))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_captured_lanes_run_on_two_streams(mode, new, device):
    """B5: plans of one shape share no wrapper, no scratch and no graph memory. Requests are long: their parts are
    merged from scratch memory."""
    given = tuple((prefix, new) for prefix in (3000, 2900, 3800, 3500))
    check_captured_lanes(KernelScene(mla(given, mode, lanes=2), device, build))


@pytest.mark.parametrize("rearranged", [swapped("q_len", "kv_len"), swapped("kv_start", "kv_end")])
def test_a_plan_laid_out_in_an_unknown_way_is_not_captured(monkeypatch, rearranged):
    """A later FlashInfer may lay its plans out differently: then there are no graphs, instead of wrong results."""
    stage = KernelScene(mla(((20, 1), (9, 1)), DECODE, dtype=DType.FLOAT32), "cpu", build)
    monkeypatch.setattr("attnplug_testing.references.flashinfer_mla.library_schedule", rearranged)
    capture = Capture(stage).reserve()
    with pytest.raises(BackendError, match="work list layout"):
        capture.capture()
