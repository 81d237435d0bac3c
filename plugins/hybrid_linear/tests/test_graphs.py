"""Captured batches: planned once, replayed with other requests, inputs and slots."""

from __future__ import annotations

from random import Random

import pytest
import torch

from attnplug import ForwardMode, PlanError
from attnplug_hybrid_linear.varlen import VarlenBatch
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.errors import raises_naming
from linear_capture import Capture, CapturedExtend, in_every_graph_setting
from linear_scene import PADDED, random_members, same_bits
from linear_settings import ON_A_GPU

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


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
    """A7: replays run other requests in other slots, also fewer than were captured."""
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
@pytest.mark.parametrize(("rows", "requests"), [(150, 3), (12, 4)], ids=["chunked", "recurrent"])
@pytest.mark.sample(1)
def test_a_captured_extend_serves_any_lengths(setting, rows, requests) -> None:
    """A7, B5: one request or several, in any slots, with any padding behind them; a decode beside a prefill."""
    scene = setting.scene(5)
    scene.backend.init_cuda_graph_state(4, 160)
    before = scene.bits()
    capture = CapturedExtend(scene, requests, rows)
    assert same_bits(before, scene.bits())
    scene.check(capture.replay_lengths([4], [rows]), setting.tolerance)
    scene.check(capture.replay_lengths([2, 0, 1], [rows - 7, 1, 4]), setting.tolerance)
    scene.check(capture.replay_lengths([3], [1]), setting.tolerance)
    scene.check(capture.replay_lengths([1, 4], [rows // 2, rows // 2]), setting.tolerance)
    scene.check_states(setting.state_tolerance)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]])
def test_many_padded_rows_are_cleared_by_several_programs(device) -> None:
    """B5: of a captured extend, those of the last sequence."""
    from attnplug_hybrid_linear.triton_recurrence import clear_padded

    starts, lens, slots = torch.tensor([[0, 10, 10], [10, 0, 86], [3, -1, -1]], device=device).unbind()
    out = torch.ones(96, 4, 257, device=device)
    clear_padded(out, VarlenBatch(starts, lens, slots, 96, 96, captured=True))
    assert bool((out[:10] == 1).all()) and not out[10:].any()


@in_every_graph_setting
def test_random_captured_extends_equal_float64(setting) -> None:
    """A7: sizes at and around the chunk's, in one graph."""
    scene, drawn = setting.scene(4), Random(3)
    scene.backend.init_cuda_graph_state(4, 140)
    capture = CapturedExtend(scene, 4, 140)
    for _ in range(4 if setting.device == "cpu" else 40):
        left, new = 140, []
        for _ in range(drawn.randint(1, 4)):
            new.append(min(drawn.choice((1, 2, 17, 63, 64, 65)), max(left - 4, 1)))
            left -= new[-1]
        scene.check(capture.replay_lengths(drawn.sample(range(4), len(new)), new), setting.tolerance)
    scene.check_states(setting.state_tolerance)


@in_every_graph_setting
def test_graphs_of_one_shape_have_their_slots_in_one_memory(setting) -> None:
    """B5: kernels read slots in place, so a second graph of the shape would read those of the first. It is refused."""
    scene = setting.scene(4)
    scene.backend.init_cuda_graph_state(4, 16)
    Capture(scene, DECODE, 3, 1)
    with raises_naming(PlanError, "lane 0"):
        Capture(scene, DECODE, 3, 1)


@in_every_graph_setting
def test_a_captured_verify_is_committed_after_each_replay(setting) -> None:
    """A7: every replay stores again what a commit needs, and that can be committed once."""
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
        with raises_naming(PlanError, "target_verify"):
            scene.backend.commit_states(step.batch, torch.tensor(accepted, device=setting.device))


@in_every_graph_setting
def test_eager_batches_between_replays(setting) -> None:
    """B2: neither affects the other."""
    scene = setting.scene(5)
    scene.backend.init_cuda_graph_state(4, 16)
    capture = Capture(scene, DECODE, 2, 1)
    scene.check(scene.run(ForwardMode.EXTEND, [3, 1], [5, 9]), setting.tolerance)
    scene.check(capture.replay([1, 4]), setting.tolerance)
    scene.check(scene.run(DECODE, [0, 1], [1, 1]), setting.tolerance)
    scene.check(capture.replay([0, PADDED]), setting.tolerance)
    scene.check_states(setting.state_tolerance)
