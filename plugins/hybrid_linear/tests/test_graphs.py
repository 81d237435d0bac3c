"""Captured batches: planned once, replayed with other requests, inputs and slots."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from attnplug import ForwardMode, LinearInputs, PlanError
from linear_scene import PADDED, LinearScene, Step, random_members, same_bits
from linear_settings import ON_A_GPU, SETTINGS
from support.batches import with_plan

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
in_every_graph_setting = pytest.mark.parametrize(
    "setting", [setting for setting in SETTINGS if setting.id.startswith("fla")]
)


class Capture:
    """A captured batch of fixed memory. Nobody is in it until something is replayed: all its requests are padded."""

    def __init__(
        self, scene: LinearScene, mode: ForwardMode, requests: int, per_request: int, *, lane: int = 0
    ) -> None:
        self.scene = scene
        self.step = scene.step(mode, [PADDED] * requests, [per_request] * requests, lane=lane, captured=True)
        self.plan = scene.backend.init_forward_metadata_out_graph(self.step.batch, in_capture=True)
        with_plan(self.step.batch, self.plan)
        self.graph = None
        self.run()
        if scene.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run()

    def run(self) -> None:
        self.scene.backend.init_forward_metadata_in_graph(self.step.batch)
        self.scene.forward(self.step)

    def replay(self, members: list[int]) -> Step:
        """A step of these requests through the captured memory."""
        return self.launch(self.load(members))

    def load(self, members: list[int]) -> Step:
        """Plan a step of these requests, and copy it to the captured memory."""
        own = self.step
        step = self.scene.step(own.batch.forward_mode, members, own.new)
        own.batch.geometry.state_slots.copy_(step.batch.geometry.state_slots)
        for layer_id, inputs in step.inputs.items():
            for target, source in zip(_tensors(own.inputs[layer_id]), _tensors(inputs), strict=True):
                target.copy_(source)
        for layer_id, x in step.conv_rows.items():
            own.conv_rows[layer_id].copy_(x)
        assert self.scene.backend.init_forward_metadata_out_graph(own.batch) is self.plan
        return step

    def launch(self, step: Step) -> Step:
        own = self.step
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        out, conv_out = ({key: each.clone() for key, each in outs.items()} for outs in (own.out, own.conv_out))
        return replace(step, batch=own.batch, out=out, conv_out=conv_out)


def _tensors(inputs: LinearInputs) -> list[torch.Tensor]:
    given = (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)
    return [tensor for tensor in given if tensor is not None]


@in_every_graph_setting
def test_capturing_touches_no_state(setting) -> None:
    """A7: to the bit."""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    before = scene.bits()
    Capture(scene, DECODE, 3, 1)
    Capture(scene, VERIFY, 3, 4)
    assert same_bits(before, scene.bits())


@in_every_graph_setting
def test_one_capture_serves_whoever_comes(setting) -> None:
    """A7: other requests, other slots, fewer than captured."""
    scene = setting.scene(5)
    scene.backend.init_cuda_graph_state(4, 16)
    capture = Capture(scene, DECODE, 3, 1)
    for members in ([4, 0, 2], [1, PADDED, 3]):
        scene.check(capture.replay(members), setting.tolerance)
    scene.check_states(setting.state_tolerance)


@pytest.mark.parametrize("setting", [setting for setting in ON_A_GPU if setting.id.startswith("fla")])
def test_fifty_random_batches_equal_eager_steps_and_float64(setting) -> None:
    """A7, B5: any requests with any padding; outputs and states are an eager step's to the bit."""
    scene, eager, drawn = setting.scene(7), setting.scene(7), Random(2)
    scene.backend.init_cuda_graph_state(4, 16)
    capture = Capture(scene, DECODE, 4, 1)
    eager.random.set_state(scene.random.get_state())
    for _ in range(50):
        members = random_members(drawn, 7, 4)
        step, other = capture.replay(members), eager.run(DECODE, members, [1] * 4)
        scene.check(step, setting.tolerance)
        for found, wanted in ((step.out, other.out), (step.conv_out, other.conv_out)):
            assert all(torch.equal(found[layer_id], wanted[layer_id]) for layer_id in wanted)
    scene.check_states(setting.state_tolerance)
    assert same_bits(scene.bits(), eager.bits())


@in_every_graph_setting
def test_graphs_of_one_shape_have_their_slots_in_one_memory(setting) -> None:
    """B5: kernels read them where they lie. A second graph would read those of the first."""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    Capture(scene, DECODE, 3, 1)
    with pytest.raises(PlanError, match="with its state slots in other memory"):
        Capture(scene, DECODE, 3, 1)


@in_every_graph_setting
def test_a_captured_verify_is_committed_after_each_replay(setting) -> None:
    """A7: what it keeps for that is filled again by every replay, and committed once."""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    capture = Capture(scene, VERIFY, 3, 4)
    for members, accepted in (([3, 0, 1], [1, 4, 0]), ([2, PADDED, 0], [3, 4, 2])):
        before = scene.bits()
        step = capture.replay(members)
        assert same_bits(before, scene.bits())
        scene.backend.commit_states(step.batch, torch.tensor(accepted, device=setting.device))
        scene.check(step, setting.tolerance, accepted)
        scene.check_states(setting.state_tolerance)
        with pytest.raises(PlanError, match="committed once"):
            scene.backend.commit_states(step.batch, torch.tensor(accepted, device=setting.device))


@in_every_graph_setting
def test_eager_batches_between_replays(setting) -> None:
    """B2: neither sees anything of the other."""
    scene = setting.scene(5)
    scene.backend.init_cuda_graph_state(4, 16)
    capture = Capture(scene, DECODE, 2, 1)
    scene.check(scene.run(ForwardMode.EXTEND, [3, 1], [5, 9]), setting.tolerance)
    scene.check(capture.replay([1, 4]), setting.tolerance)
    scene.check(scene.run(DECODE, [0, 1], [1, 1]), setting.tolerance)
    scene.check(capture.replay([0, PADDED]), setting.tolerance)
    scene.check_states(setting.state_tolerance)
