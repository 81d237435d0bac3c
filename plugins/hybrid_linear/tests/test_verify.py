"""Speculation: a target verify leaves every state as it was, and its commit advances each by what was accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import ForwardMode, PlanError
from attnplug_testing.devices import nothing_waits
from attnplug_testing.errors import raises_naming
from linear_scene import LAYERS, PADDED, LinearScene, same_bits
from linear_settings import INTERPRETED, ON_A_GPU, SETTINGS, TORCH

VERIFY, EXTEND, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND, ForwardMode.DECODE
in_every_setting = pytest.mark.parametrize("setting", SETTINGS)


def commit(scene: LinearScene, batch, accepted: list[int]) -> None:
    scene.backend.commit_states(batch, torch.tensor(accepted, device=scene.device))


@in_every_setting
@pytest.mark.parametrize(
    ("members", "new", "accepted"),
    [
        ([2, 0, 3, PADDED, 1], [4, 1, 0, 5, 3], [2, 1, 0, 5, 3]),
        ([0, 1], [9, 20], [8, 13]),
    ],
)
@pytest.mark.sample(2)
def test_verify_and_commit(members, new, accepted, setting) -> None:
    """A7: states untouched to the bit by the verify; then as if only the accepted tokens had been run."""
    scene = setting.scene(4)
    before = scene.bits()
    step = scene.run(VERIFY, members, new, padding=2)
    assert same_bits(before, scene.bits())
    commit(scene, step.batch, accepted)
    scene.check(step, setting.tolerance, accepted)
    scene.check_states(setting.state_tolerance)


@in_every_setting
def test_nothing_accepted_changes_nothing(setting) -> None:
    """A7: to the bit."""
    scene = setting.scene(3)
    before = scene.bits()
    commit(scene, scene.run(VERIFY, [2, 0, PADDED], [3, 9, 2]).batch, [0, 0, 0])
    assert same_bits(before, scene.bits())


@pytest.mark.parametrize(("setting", "tokens"), [(TORCH, 3), (TORCH, 20), (INTERPRETED, 3)])
def test_a_commit_equals_an_extend_by_the_accepted_tokens(setting, tokens) -> None:
    """A7: bit for bit if both process the tokens in the same way."""
    verified, extended = setting.scene(2), setting.scene(2)
    step = verified.run(VERIFY, [1, 0], [tokens, tokens])
    commit(verified, step.batch, [tokens, tokens])
    extended.run(EXTEND, [1, 0], [tokens, tokens])
    assert same_bits(verified.bits(), extended.bits())


@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 99))
def test_rounds_of_speculation(data, seed) -> None:
    """A7: verify, commit, and between them batches of other requests."""
    scene = TORCH.scene(4, seed=seed)
    for _ in range(data.draw(st.integers(1, 4))):
        order = data.draw(st.permutations(range(4)))
        drafted, others = order[:2], order[2:]
        new = [data.draw(st.integers(1, 10)) for _ in drafted]
        accepted = [data.draw(st.integers(0, count)) for count in new]
        step = scene.run(VERIFY, drafted, new)
        scene.check(scene.run(DECODE, others, [1, 1]), TORCH.tolerance)
        commit(scene, step.batch, accepted)
        scene.check(step, TORCH.tolerance, accepted)
    scene.check_states(TORCH.state_tolerance)


@in_every_setting
def test_what_was_rejected_leaves_no_trace(setting) -> None:
    """A7: not even NaN."""
    scene = setting.scene(2)
    step = scene.step(VERIFY, [1, 0], [12, 12])
    for layer in LAYERS:
        for tensors in (step.inputs.get(layer.layer_id), step.conv_rows.get(layer.layer_id)):
            if isinstance(tensors, torch.Tensor):
                tensors[12 + 5 :] = torch.nan
            elif tensors is not None:
                tensors.k[12 + 5 :] = tensors.v[12 + 5 :] = torch.nan
    scene.forward(step)
    commit(scene, step.batch, [12, 5])
    scene.accept(step, [12, 5])
    scene.check_states(setting.state_tolerance)


@in_every_setting
def test_a_model_may_reuse_its_inputs_memory_before_the_commit(setting) -> None:
    scene = setting.scene(2)
    step = scene.run(VERIFY, [1, 0], [4, 4])
    untouched = replace(step, inputs={}, conv_rows={layer_id: x.clone() for layer_id, x in step.conv_rows.items()})
    for layer_id, inputs in step.inputs.items():
        q, k, v, decay = (tensor.clone() for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
        beta = None if inputs.beta is None else inputs.beta.clone()
        untouched.inputs[layer_id] = replace(inputs, q=q, k=k, v=v, log_decay=decay, beta=beta)
        for tensor in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta):
            if tensor is not None:
                tensor.fill_(torch.nan)
    for x in step.conv_rows.values():
        x.fill_(torch.nan)
    commit(scene, step.batch, [3, 2])
    scene.check(untouched, setting.tolerance, [3, 2])
    scene.check_states(setting.state_tolerance)


@pytest.mark.parametrize("setting", ON_A_GPU)
def test_a_commit_waits_for_nothing(setting) -> None:
    scene = setting.scene(3)
    step = scene.run(VERIFY, [1, 0, PADDED], [4, 4, 4])
    accepted = torch.tensor([2, 4, 0], device=setting.device)
    with nothing_waits(setting.device):
        scene.backend.commit_states(step.batch, accepted)
    scene.check(step, setting.tolerance, [2, 4, 0])
    scene.check_states(setting.state_tolerance)


class TestRefusals:
    @in_every_setting
    def test_a_second_commit_is_refused(self, setting) -> None:
        scene = setting.scene(2)
        step = scene.run(VERIFY, [1], [4])
        commit(scene, step.batch, [4])
        with raises_naming(PlanError, "target_verify"):
            commit(scene, step.batch, [4])

    @in_every_setting
    @pytest.mark.parametrize("mode", [EXTEND, DECODE])
    def test_a_commit_of_states_that_advanced_already_is_refused(self, mode, setting) -> None:
        scene = setting.scene(2)
        with raises_naming(PlanError, mode):
            commit(scene, scene.run(mode, [1], [1]).batch, [1])

    @in_every_setting
    def test_a_number_for_each_request_is_needed(self, setting) -> None:
        scene = setting.scene(3)
        step = scene.run(VERIFY, [1, 0], [4, 4])
        with raises_naming(PlanError, (3,)):
            commit(scene, step.batch, [1, 2, 3])
