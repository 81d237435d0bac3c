"""Two plans of one backend, alive at once in two lanes: eager and captured, of one shape, between each other."""

from __future__ import annotations

import pytest
import torch

from attnplug import ForwardMode, PlanError
from attnplug_hybrid_linear import torch_backend
from attnplug_testing.batches import with_plan
from attnplug_testing.errors import raises_naming
from linear_capture import Capture, in_every_graph_setting
from linear_scene import LAYERS, PADDED, LinearScene, Step
from linear_settings import ON_A_GPU, SETTINGS, TORCH

VERIFY, EXTEND, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND, ForwardMode.DECODE
in_every_setting = pytest.mark.parametrize("setting", SETTINGS)


def forward_in_turns(scene: LinearScene, *steps: Step) -> None:
    """Run two steps layer by layer in turns, as two lanes on one thread do."""
    for layer in LAYERS:
        for step in steps:
            scene.forward(step, [layer])


def commit(scene: LinearScene, step: Step, accepted: list[int]) -> None:
    scene.backend.commit_states(step.batch, torch.tensor(accepted, device=scene.device))


@in_every_setting
@pytest.mark.parametrize(("mode", "new"), [(DECODE, [1, 1]), (EXTEND, [5, 20])])
@pytest.mark.sample(2)
def test_eager_batches_alternate(mode, new, setting) -> None:
    """B5: all state of a batch is in its plan, so two batches can run in turns."""
    scene = setting.scene(4)
    first, second = scene.step(mode, [0, 2], new), scene.step(mode, [3, 1], new, lane=1)
    forward_in_turns(scene, first, second)
    for step in (first, second):
        scene.check(step, setting.tolerance)
    scene.check_states(setting.state_tolerance)


@in_every_setting
@pytest.mark.sample(1)
def test_eager_verifies_keep_their_own_inputs(setting) -> None:
    """A7: of one shape, and committed in the other order."""
    scene = setting.scene(4)
    first, second = scene.step(VERIFY, [0, 2], [4, 4]), scene.step(VERIFY, [3, 1], [4, 4], lane=1)
    forward_in_turns(scene, first, second)
    commit(scene, second, [2, 4])
    commit(scene, first, [3, 1])
    scene.check(first, setting.tolerance, [3, 1])
    scene.check(second, setting.tolerance, [2, 4])
    scene.check_states(setting.state_tolerance)


@in_every_graph_setting
def test_captured_verifies_of_one_shape(setting) -> None:
    """A7: two graphs are replayed with different requests; then both are committed."""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    captures = [Capture(scene, VERIFY, 2, 4, lane=lane) for lane in range(2)]
    assert captures[0].plan is not captures[1].plan
    for members in (([0, 2], [3, PADDED]),):
        steps = [capture.replay(own) for capture, own in zip(captures, members, strict=True)]
        for step, accepted in zip(steps, ([2, 4], [1, 3]), strict=True):
            commit(scene, step, accepted)
            scene.check(step, setting.tolerance, accepted)
    scene.check_states(setting.state_tolerance)


@in_every_graph_setting
def test_a_captured_and_an_eager_verify_of_one_shape(setting) -> None:
    """A7"""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    captured = Capture(scene, VERIFY, 2, 4, lane=1).replay([3, 1])
    eager = scene.run(VERIFY, [0, 2], [4, 4])
    commit(scene, captured, [4, 1])
    commit(scene, eager, [2, 3])
    scene.check(captured, setting.tolerance, [4, 1])
    scene.check(eager, setting.tolerance, [2, 3])
    scene.check_states(setting.state_tolerance)


def test_padded_requests_leave_the_slots_of_other_lanes_alone(monkeypatch) -> None:
    """A7: not even what was read is written back, since the owner may have moved on meanwhile."""
    scene = TORCH.scene(7)
    owner = scene.slots.index(0)
    others = [request for request in range(7) if request != owner]
    padded = scene.step(EXTEND, [others[0], PADDED], [9, 1])
    decode = scene.step(DECODE, [owner], [1], lane=1)
    own = torch_backend.advance

    def meanwhile(tokens, state):
        """Run the other lane's whole step between this lane's read and its write."""
        after = own(tokens, state)
        if not decode.out and tokens.q.shape[1] == 1:  # the group that holds only the padded request
            monkeypatch.setattr(torch_backend, "advance", own)
            scene.forward(decode)
        return after

    monkeypatch.setattr(torch_backend, "advance", meanwhile)
    scene.forward(padded)
    assert decode.out
    scene.check(padded, TORCH.tolerance)
    scene.check(decode, TORCH.tolerance)
    scene.check_states()


ROUNDS = (([0, 2, 4], [3, 1, 5]), ([5, PADDED, 1], [0, 4, 2]))
"""Requests of each lane, by round. The first round compiles, so that only the second is sure to overlap."""
ACCEPTED = [2, 4, 1]


@pytest.mark.parametrize("setting", ON_A_GPU)
@pytest.mark.parametrize("mode", [DECODE, EXTEND, VERIFY])
def test_eager_batches_on_two_streams(mode, setting) -> None:
    """A7, B5: each lane has its own stream; they share only the pool."""
    scene = setting.scene(6)
    lengths = {DECODE: [1, 1, 1], EXTEND: [5, 70, 3], VERIFY: [4, 4, 4]}[mode]
    accepted = torch.tensor(ACCEPTED, device=setting.device)
    for members in ROUNDS:
        steps = [scene.step(mode, own, lengths, lane=lane) for lane, own in enumerate(members)]
        for step, stream in zip(steps, streams(), strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                with_plan(step.batch, scene.backend.init_forward_metadata(step.batch))
                scene.forward(step)
                if mode is VERIFY:
                    scene.backend.commit_states(step.batch, accepted)
        torch.cuda.synchronize()
        for step in steps:
            scene.check(step, setting.tolerance, ACCEPTED if mode is VERIFY else None)
    scene.check_states(setting.state_tolerance)


@pytest.mark.parametrize("setting", [setting for setting in ON_A_GPU if setting.id == "fla-cuda"])
@pytest.mark.parametrize(("mode", "new"), [(DECODE, 1), (VERIFY, 4)])
def test_captured_batches_on_two_streams(mode, new, setting) -> None:
    """A7: two graphs of one shape replayed at the same time."""
    scene = setting.scene(6)
    scene.backend.init_cuda_graph_state(4, 16)
    captures = [Capture(scene, mode, 3, new, lane=lane) for lane in range(2)]
    accepted = torch.tensor(ACCEPTED, device=setting.device)
    for members in ROUNDS:
        steps = [capture.load(own) for capture, own in zip(captures, members, strict=True)]
        for lane, stream in enumerate(streams()):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP)
                steps[lane] = captures[lane].launch(steps[lane])
                if mode is VERIFY:
                    scene.backend.commit_states(steps[lane].batch, accepted)
        torch.cuda.synchronize()
        for step in steps:
            scene.check(step, setting.tolerance, ACCEPTED if mode is VERIFY else None)
    scene.check_states(setting.state_tolerance)


SLEEP = 20_000_000
"""Clock cycles, about ten milliseconds: long enough to launch both lanes meanwhile."""


def streams() -> list[torch.cuda.Stream]:
    """One for each of two lanes; they wait for what was done so far, and for nothing later."""
    made = [torch.cuda.Stream() for _ in range(2)]
    for stream in made:
        stream.wait_stream(torch.cuda.current_stream())
    return made


@pytest.mark.parametrize("setting", SETTINGS[::2])
def test_a_lane_that_the_backend_was_not_built_for_is_refused(setting) -> None:
    with raises_naming(PlanError, "lane 2"):
        setting.scene(2).step(DECODE, [0], [1], lane=2)
