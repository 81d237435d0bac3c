"""Every backend on its scene: every kind of layer, every mode, and slots that must not be touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import ForwardMode, PlanError, PoolError
from attnplug.host import KVPools
from attnplug_hybrid_linear.fla_backend import MAX_RECURRENT_TOKENS
from attnplug_testing.batches import with_plan
from attnplug_testing.devices import nothing_waits
from attnplug_testing.errors import raises_naming
from linear_scene import LAYERS, PADDED, LinearScene, same_values
from linear_settings import INTERPRETED, ON_A_GPU, SETTINGS, TORCH, ReferenceChunks, Setting

DECODE, EXTEND, MIXED = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED
in_every_setting = pytest.mark.parametrize("setting", SETTINGS)
on_a_gpu = pytest.mark.parametrize("setting", ON_A_GPU)


def check(
    setting: Setting, scene: LinearScene, mode: ForwardMode, members: list[int], new: list[int], **batch: object
) -> None:
    scene.check(scene.run(mode, members, new, **batch), setting.tolerance)
    scene.check_states(setting.state_tolerance)


@in_every_setting
class TestBatches:
    def test_strong_decays(self, setting) -> None:
        check(setting, setting.scene(3, decay=20.0), EXTEND, [1, 0], [70, 9])

    def test_a_request_without_new_tokens_is_not_touched(self, setting) -> None:
        """A7: bit by bit."""
        scene = setting.scene(4)
        before = scene.bits()
        check(setting, scene, EXTEND, [3, 0, 2], [0, 5, 0])
        check(setting, scene, EXTEND, [3, 0, 2], [0, 0, 0])
        for old, new in zip(before, scene.bits(), strict=True):
            for request in (1, 2, 3):
                assert torch.equal(old[scene.slots[request]], new[scene.slots[request]])

    @pytest.mark.parametrize(
        ("mode", "members", "new"),
        [
            (DECODE, [PADDED, 1, 0, PADDED], [1, 1, 1, 1]),
            (EXTEND, [1, PADDED, 0, PADDED], [9, 0, 4, 20]),
        ],
    )
    def test_padded_requests_give_zero_and_touch_no_slot(self, mode, members, new, setting) -> None:
        """A7, B5: their rows are NaN, and none of it shows."""
        check(setting, setting.scene(3), mode, members, new)

    @pytest.mark.parametrize(("mode", "new"), [(DECODE, [1, 1]), (EXTEND, [3, 20])])
    def test_a_batch_of_padded_requests_alone_touches_no_slot(self, mode, new, setting) -> None:
        """A7, B5: slot 0 neither. (A GPU may write one NaN as another.)"""
        scene = setting.scene(3)
        before = scene.states()
        check(setting, scene, mode, [PADDED, PADDED], new)
        assert same_values(before, scene.states())

    @pytest.mark.parametrize(("mode", "new"), [(DECODE, [1, 1]), (EXTEND, [3, 20])])
    def test_inputs_may_be_slices_and_lie_anyhow(self, mode, new, setting) -> None:
        scene = setting.scene(3)
        scene.weights = {layer_id: (_turned(weight), bias) for layer_id, (weight, bias) in scene.weights.items()}
        step = scene.step(mode, [2, 0], new)
        step.conv_rows = {layer_id: _turned(x) for layer_id, x in step.conv_rows.items()}
        for layer_id, inputs in step.inputs.items():
            q, k, v = _wider(inputs.q), _turned(inputs.k), _wider(inputs.v)
            beta = None if inputs.beta is None else _turned(inputs.beta)
            step.inputs[layer_id] = replace(inputs, q=q, k=k, v=v, beta=beta, log_decay=_wider(inputs.log_decay))
        scene.forward(step)
        scene.check(step, setting.tolerance)
        scene.check_states(setting.state_tolerance)

    @pytest.mark.parametrize(
        ("mode", "new"), [(ForwardMode.TARGET_VERIFY, 4), (EXTEND, 20)], ids=lambda value: str(value)
    )
    def test_batches_of_equal_lengths_need_no_exact_ones_on_the_host(self, mode, new, setting) -> None:
        scene = setting.scene(4)
        step = scene.run(mode, [3, PADDED, 1], [new] * 3, exact=False, padding=2)
        if mode is ForwardMode.TARGET_VERIFY:
            scene.backend.commit_states(step.batch, torch.full((3,), new, device=setting.device))
        scene.check(step, setting.tolerance)
        scene.check_states(setting.state_tolerance)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, the first dimension innermost in memory."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as a slice of a wider tensor with NaN around them."""
    return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("before", [[1, 1, 0, 1, 16], [1], []], ids=str)
def test_planning_leaves_what_precedes_long_sequences_out_of_chunks(before, monkeypatch) -> None:
    """A7: a decode would take a chunk for itself. A short sequence behind a long one stays in the chunks."""
    chunked: list[tuple[int, list[int]]] = []
    run = ReferenceChunks.chunked

    def count(kernels, inputs, scale, chunks, states):
        chunked.append((inputs.v.shape[0], chunks.cu_seqlens.tolist()))
        return run(kernels, inputs, scale, chunks, states)

    monkeypatch.setattr(ReferenceChunks, "chunked", count)
    scene = INTERPRETED.scene(8)
    members = [*(6, PADDED, 1, 0, 5)[: len(before)], 2, PADDED, 3, 7]
    check(INTERPRETED, scene, MIXED, members, [*before, 40, 20, 3, 70], padding=2)
    assert set(map(str, chunked)) == {str((135, [0, 40, 60, 63, 133]))}


@on_a_gpu
@pytest.mark.parametrize(("mode", "new"), [(DECODE, [1, 1, 1, 1]), (MIXED, [1, 16, 5, 12]), (MIXED, [1, 40, 5, 12])])
def test_planning_and_running_wait_for_nothing(mode, new, setting) -> None:
    """Lengths on the CPU: nothing is copied from the device."""
    if setting.name == "fla" and max(new) > MAX_RECURRENT_TOKENS:
        pytest.skip("the library sends the chunks of its kernels to the device, and waits, once a batch")
    scene = setting.scene(4)
    check(setting, scene, mode, [3, 0, PADDED, 1], new)  # compiles, where there is something to compile
    step = scene.step(mode, [3, 0, PADDED, 1], new)
    with nothing_waits(setting.device):
        with_plan(step.batch, scene.backend.init_forward_metadata(step.batch))
        scene.forward(step)
    scene.check(step, setting.tolerance)


@st.composite
def batches(draw: st.DrawFn) -> tuple[ForwardMode, list[int], list[int], int]:
    members = draw(st.permutations(range(5)))[: draw(st.integers(1, 5))]
    members = [PADDED if draw(st.integers(0, 5)) == 0 else member for member in members]
    mode = draw(st.sampled_from([DECODE, EXTEND, MIXED]))
    lens = st.just(1) if mode is DECODE else st.sampled_from([0, 1, 1, 2, 5, 9, 17, 33])
    return mode, members, [draw(lens) for _ in members], draw(st.integers(0, 2))


@pytest.mark.parametrize("setting", [pytest.param(TORCH, id="torch-cpu")])
@settings(max_examples=12)
@given(steps=st.lists(batches(), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_any_steps_of_any_requests(steps, seed, setting) -> None:
    """A7: a step advances the states of its own requests by their own tokens, in any order of requests, and no other
    states."""
    _run_steps(steps, seed, setting)


@pytest.mark.parametrize("setting", [pytest.param(INTERPRETED, id="fla-planning-cpu")])
@settings(max_examples=3)
@given(steps=st.lists(batches(), min_size=1, max_size=2), seed=st.integers(0, 99))
def test_any_steps_of_any_requests_interpreted(steps, seed, setting) -> None:
    """A7: the same; an interpreted step takes a second."""
    _run_steps(steps, seed, setting)


def _run_steps(steps, seed: int, setting: Setting) -> None:
    scene = setting.scene(5, seed=seed)
    for mode, members, new, padding in steps:
        scene.check(scene.run(mode, members, new, padding=padding), setting.tolerance)
    scene.check_states(setting.state_tolerance)


@pytest.mark.parametrize("setting", [TORCH, INTERPRETED], ids=["torch", "fla"])
class TestRefusals:
    def test_a_batch_without_slots_is_refused(self, setting) -> None:
        scene = setting.scene(2)
        batch = scene.batch(EXTEND, [0, 1], [3, 4])
        for slots, named in ((None, "none"), (torch.zeros(3, dtype=torch.int64), "shape (3,)")):
            batch.geometry = replace(batch.geometry, state_slots=slots)
            with raises_naming(PlanError, named):
                scene.backend.init_forward_metadata(batch)

    def test_a_context_without_a_pool_of_states_is_refused(self, setting) -> None:
        with raises_naming(PoolError, "linear"):
            setting.scene(build=lambda context: setting.build(replace(context, pools=KVPools())))

    def test_a_layer_without_the_state_asked_for_is_refused(self, setting) -> None:
        scene = setting.scene(2)
        step = scene.step(DECODE, [0], [1])
        lightning, short_conv = LAYERS[2], LAYERS[4]
        x, inputs = next(iter(step.conv_rows.values())), next(iter(step.inputs.values()))
        with raises_naming(PoolError, "layer 5"):
            scene.backend.forward_conv(x, x, None, lightning, step.batch, True)
        with raises_naming(PoolError, "layer 9"):
            scene.backend.forward_linear(inputs, short_conv, step.batch)
