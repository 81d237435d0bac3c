"""Levels of invariance: the bits of a request's rows and states, however its tokens came (E3)."""

from __future__ import annotations

import pytest
import torch

from attnplug import ForwardMode
from linear_scene import PADDED, LinearScene, Step
from linear_settings import SETTINGS, Setting

DECODE, VERIFY, EXTEND = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND
LEVELS = frozenset({"run", "batch", "graph", "chunks", "verify"})
TOKENS = 24


def same_request(scene: LinearScene, whole: Step, at: int, mode: ForwardMode, new: int, ahead: list[int]) -> Step:
    """A step with ``new`` tokens of request 0 from ``at`` on, those of ``whole``, behind other requests."""
    members = [*ahead, 0]
    step = scene.step(mode, members, [new] * len(members))
    own, source = scene.rows(step)[-1], slice(at, at + new)
    for layer_id, inputs in step.inputs.items():
        given = whole.inputs[layer_id]
        for name in ("q", "k", "v", "log_decay", "beta"):
            tensor = getattr(inputs, name)
            if tensor is not None and tensor.dim() > 1:
                tensor[own] = getattr(given, name)[source]
            elif tensor is not None:
                tensor.copy_(getattr(given, name))
    for layer_id, rows in step.conv_rows.items():
        rows[own] = whole.conv_rows[layer_id][source]
    scene.forward(step)
    return step


def results(step: Step, rows: slice) -> list[torch.Tensor]:
    return [out[rows].clone() for outs in (step.out, step.conv_out) for out in outs.values()]


@pytest.mark.parametrize("setting", SETTINGS)
def test_chunks_companions_and_verify_change_no_bit(setting: Setting) -> None:
    """A prompt at once; or in chunks, decoded and verified, next to others and padded requests."""
    one, other = (setting.scene(3, levels=LEVELS) for _ in range(2))
    whole = one.run(EXTEND, [0], [TOKENS])
    at = 0
    for mode, new, ahead in (
        (EXTEND, 17, [1]),
        (DECODE, 1, []),
        (VERIFY, 3, [PADDED, 2]),
        (DECODE, 1, [2, 1, PADDED]),
        (EXTEND, 2, []),
    ):
        step = same_request(other, whole, at, mode, new, ahead)
        for found, wanted in zip(results(step, other.rows(step)[-1]), results(whole, slice(at, at + new)), strict=True):
            assert torch.equal(found, wanted), (mode, at)
        if mode is VERIFY:
            other.backend.commit_states(step.batch, torch.full((len(step.members),), new))
        at += new
    assert at == TOKENS
    for mine, theirs in zip(one.states(), other.states(), strict=True):
        assert torch.equal(mine[one.slots[0]], theirs[other.slots[0]])


def test_without_a_level_tokens_are_processed_in_chunks() -> None:
    """Shows that the test above can fail."""
    torch_setting, fla_setting = SETTINGS[0].values[0], SETTINGS[2].values[0]
    for levels, groups in ((frozenset({"run"}), 1), (LEVELS, 2)):
        step = torch_setting.scene(3, levels=levels).step(EXTEND, [0, 1], [20, 20])
        assert len(step.batch.plan.attention.metadata.grouping.groups) == groups
        step = fla_setting.scene(3, levels=levels).step(EXTEND, [0, 1], [20, 20])
        assert (step.batch.plan.attention.metadata.chunks is None) == (levels == LEVELS)
