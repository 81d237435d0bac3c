"""Planning around captured graphs: the protocol on a CPU, real captures on a GPU (B2's ground)."""

from __future__ import annotations

import pytest
import torch

from attnplug import BackendError, ForwardMode, PlanError
from reference_flashmla import build, on, scene
from support.devices import DEVICES, nothing_waits
from support.mla_capture import MLACapture, check_replays, replay_scenes
from support.mla_scene import MLACase, MLAScene

on_every_device = pytest.mark.parametrize("device", DEVICES)


def scenes(mode: ForwardMode, new: int, device: str, heads: int = 16, page_size: int = 64):
    return replay_scenes(on(MLACase(((0, new),), mode, page_size, heads), device), device, build)


@on_every_device
@pytest.mark.parametrize(
    ("mode", "new", "heads", "page_size"),
    [
        (ForwardMode.DECODE, 1, 16, 64),
        (ForwardMode.DECODE, 1, 24, 128),
        (ForwardMode.TARGET_VERIFY, 4, 32, 64),
        (ForwardMode.TARGET_VERIFY, 4, 128, 64),
        (ForwardMode.DRAFT_EXTEND, 2, 64, 128),
    ],
)
def test_one_capture_serves_other_lengths_pages_and_fewer_requests(mode, new, heads, page_size, device):
    check_replays(*scenes(mode, new, device, heads, page_size))


@on_every_device
def test_two_shapes_captured_side_by_side_do_not_disturb_each_other(device):
    """They share memory, and each is planned anew in its own graph."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
    large, small = (MLACapture(stage, requests, 1) for requests in (4, 2))
    large.capture()
    stage.backend.init_cuda_graph_state = lambda *_: None
    small.capture()
    four = [other for other in others if len(other.totals) == 4]
    alone = [large.replay(other).clone() for other in four]
    for other, wanted in zip(four, alone, strict=True):
        small.replay(next(other for other in others if len(other.totals) <= 2))
        assert torch.equal(large.replay(other), wanted)


@on_every_device
def test_replay_planning_waits_for_nothing(device):
    """Nothing is sent, nothing read back, and no length is needed on the host."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    captured.replay(others[0])
    captured.batch.seq_lens_cpu = None
    with nothing_waits(device):
        assert captured.backend.init_forward_metadata_out_graph(captured.batch) is captured.plan


@on_every_device
def test_replays_that_overtake_the_device_do_not_overwrite_each_other(device):
    """Queued one behind the other, each with lengths of its own, while the device is busy."""
    stage, others = scenes(ForwardMode.DECODE, 1, device)
    captured = MLACapture(stage, requests=4, per_request=1)
    captured.capture()
    ready = [captured.stage(other) for other in others if len(other.totals) == 4]
    alone = [replay().clone() for replay in ready]
    if device == "cuda":
        busy = torch.randn(8192, 8192, device=device)
        for _ in range(20):
            busy = busy @ busy / 8192
        assert not torch.cuda.current_stream().query()
    with nothing_waits(device):
        queued = [replay().clone() for replay in ready * 3]
    for found, wanted in zip(queued, alone * 3, strict=True):
        assert torch.equal(found, wanted)


class TestWrongUse:
    def stage(self, mode: ForwardMode = ForwardMode.DECODE, new: int = 1) -> MLAScene:
        return scene(MLACase(((20, new), (9, new)), mode), "cpu")

    def test_graph_planning_without_memory_says_what_to_call(self):
        stage = self.stage()
        with pytest.raises(BackendError, match="init_cuda_graph_state"):
            stage.backend.init_forward_metadata_out_graph(stage.batch(), in_capture=True)

    def test_a_page_table_wider_than_the_memory_is_refused_whenever_it_comes(self):
        stage = self.stage()
        stage.backend.init_cuda_graph_state(4, 4)
        batch = stage.batch()
        stage.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        batch.page_table = torch.zeros(2, 65, dtype=torch.int32)
        with pytest.raises(PlanError, match=r"65 pages a request does not fit .* 64 pages"):
            stage.backend.init_forward_metadata_out_graph(batch)
