"""A whole layer of the delta rule in one kernel: the same results as its parts, for any requests in the batch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardMode, LayerSpec, PlanError
from attnplug.linear import DeltaInputs, LinearDims, LinearInputs
from attnplug_hybrid_linear import triton_delta
from attnplug_testing.batches import with_plan
from attnplug_testing.triton_mode import compiled_by
from delta_scene import EPS, DeltaScene, DeltaStep
from linear_capture import graph_of
from linear_scene import PADDED, random_members, same_bits
from linear_settings import INTERPRETED, ON_A_GPU, SETTINGS

DECODE, EXTEND, VERIFY = ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY
in_every_setting = pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting.id.startswith("fla")])
REPLAYS = 50


@in_every_setting
def test_a_decode_is_what_float64_says(setting) -> None:
    """A7: requests in any order, padded ones between them, and rows after the last; no other slot is touched."""
    scene = DeltaScene(setting)
    for members in ([4, 0, 2], [PADDED], [1, PADDED, 2, 4]):
        step = scene.step(members, padding=len(members) % 2)
        scene.check(step, scene.run(step))
    scene.check_states()


@in_every_setting
def test_a_state_by_columns_is_the_same(setting, monkeypatch) -> None:
    """Columns are divided as with many heads, here 8 of 12; the norm is over all of them."""
    monkeypatch.setattr(triton_delta, "_FEW_HEADS", 0)
    monkeypatch.setattr(triton_delta, "_COLUMNS", 8)
    scene = DeltaScene(setting)
    for members in ([4, PADDED], [4]):
        step = scene.step(members)
        scene.check(step, scene.run(step))
    scene.check_states()


@in_every_setting
def test_counters_are_left_at_zero(setting) -> None:
    """A2: the next kernel that uses this memory expects counters of zero."""
    scene = DeltaScene(setting)
    for lane in (0, 1):
        scene.run(scene.step([PADDED, 1], lane=lane))
    found = [scene.backend._counters(8, lane) for lane in (0, 1)]
    assert not any(counters.any() for counters in found)
    assert found[0].data_ptr() != found[1].data_ptr()


@in_every_setting
def test_other_batches_are_left_to_the_parts(setting) -> None:
    """A verify must not change the states, and separate kernels are faster for an extend of many tokens."""
    scene = DeltaScene(setting)
    before = scene.bits()
    for mode, new in ((EXTEND, 3), (VERIFY, 1), (VERIFY, 4)):
        step = scene.step([0, 2], mode, new)
        for layer, inputs in zip(scene.layers, step.inputs, strict=True):
            assert scene.backend.forward_delta(inputs, layer, step.batch) is None
    assert same_bits(before, scene.bits())


@pytest.mark.parametrize("setting", [replace(INTERPRETED, dtype=DType.FLOAT16, tolerance=2e-3)])
def test_short_types_are_rounded_where_the_parts_round(setting) -> None:
    """A token has the same state whether it was prefilled or decoded."""
    whole, apart = DeltaScene(setting), DeltaScene(setting)
    for members in ([4, 0], [0, PADDED]):
        steps = [scene.step(members) for scene in (whole, apart)]
        found = whole.run(steps[0])
        layers = zip(apart.layers, steps[1].inputs, found, strict=True)
        for layer, inputs, one in layers:
            other = by_parts(apart, layer, inputs, steps[1])
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)
    for layer in whole.layers:
        for one, other in zip(whole.states(layer.layer_id), apart.states(layer.layer_id), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def by_parts(scene: DeltaScene, layer: LayerSpec, inputs: DeltaInputs, step: DeltaStep) -> Tensor:
    """The layer as models run it without the kernel."""
    dims, weights = layer.linear, inputs.weights
    assert dims is not None
    keys = dims.key_heads * dims.key_dim
    mixed = scene.backend.forward_conv(inputs.rows, weights.conv, None, layer, step.batch, True)
    q, k, v = mixed.split((keys, keys, dims.heads * dims.value_dim), 1)
    parts = LinearInputs(
        q.unflatten(1, (-1, dims.key_dim)),
        k.unflatten(1, (-1, dims.key_dim)),
        v.unflatten(1, (-1, dims.value_dim)),
        weights.rate * F.softplus(inputs.decay.float() + weights.bias),
        inputs.beta.sigmoid(),
        normalize=True,
    )
    out = scene.backend.forward_linear(parts, layer, step.batch)
    normed = F.rms_norm(out.float(), weights.norm.shape, weights.norm, EPS)
    gate = inputs.gate.float()
    opened = normed * (F.silu(gate) if weights.silu else gate.sigmoid())
    live = torch.tensor([member != PADDED for member in step.members], device=out.device)
    return opened.to(out.dtype).flatten(1).masked_fill(~live[:, None], 0)


class Captured:
    """A captured decode of fixed memory, all of whose requests are padded until something is replayed.

    Without a GPU it is a fake: the same code runs again over the same memory.
    """

    def __init__(self, scene: DeltaScene, size: int) -> None:
        self.scene, self.step = scene, scene.step([PADDED] * size, captured=True)
        self.plan = scene.backend.init_forward_metadata_out_graph(self.step.batch, in_capture=True)
        with_plan(self.step.batch, self.plan)
        self.graph = graph_of(scene.device, self.run)

    def run(self) -> None:
        self.scene.backend.init_forward_metadata_in_graph(self.step.batch)
        self.outs = self.scene.run(self.step)

    def replay(self, step: DeltaStep) -> list[Tensor]:
        self.step.batch.geometry.state_slots.copy_(step.batch.geometry.state_slots)
        for own, given in zip(self.step.inputs, step.inputs, strict=True):
            for name in ("rows", "decay", "beta", "gate"):
                getattr(own, name).copy_(getattr(given, name))
        assert self.scene.backend.init_forward_metadata_out_graph(self.step.batch) is self.plan
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        return [out.clone() for out in self.outs]


@in_every_setting
def test_one_capture_serves_whoever_comes(setting) -> None:
    """A7: replays match float64 for any requests and any padding: fifty batches on a GPU, a few in the interpreter."""
    scene, drawn = DeltaScene(setting, 7), random.Random(1)
    scene.backend.init_cuda_graph_state(4, 4)
    before = scene.bits()
    captured = Captured(scene, 4)
    assert same_bits(before, scene.bits()), "capturing touches no state"
    for _ in range(REPLAYS if setting.device == "cuda" else 2):
        step = scene.step(random_members(drawn, 7, 4))
        scene.check(step, captured.replay(step))
    scene.check_states()


@pytest.mark.parametrize("setting", [setting for setting in ON_A_GPU if setting.id.startswith("fla")])
def test_replays_equal_eager_steps_to_the_bit(setting) -> None:
    """B5: both run the same kernel on the same values, which are only in other memory."""
    scene, eager, drawn = DeltaScene(setting, 7), DeltaScene(setting, 7), random.Random(1)
    scene.backend.init_cuda_graph_state(4, 4)
    captured = Captured(scene, 4)
    eager.random.set_state(scene.random.get_state())
    for _ in range(REPLAYS):
        members = random_members(drawn, 7, 4)
        outs = captured.replay(scene.step(members))
        assert all(torch.equal(a, b) for a, b in zip(outs, eager.run(eager.step(members)), strict=True))
    assert same_bits(scene.bits(), eager.bits())


@in_every_setting
def test_a_frozen_workspace_has_what_captured_batches_need(setting) -> None:
    """A2: also if more requests are captured than the limits allow."""
    scene = DeltaScene(setting)
    scene.backend.init_cuda_graph_state(12, 12)
    captured = Captured(scene, 12)
    scene.workspace.freeze()
    step = scene.step([PADDED] * 11 + [2])
    scene.check(step, captured.replay(step))
    scene.check_states()


def test_a_state_too_large_for_a_program_is_left_to_the_parts() -> None:
    scene = DeltaScene(INTERPRETED, 1, {AttentionKind.GDN: LinearDims(1, 1, 256, 256, 768, 4)})
    step = scene.step([0])
    assert scene.backend.forward_delta(step.inputs[0], scene.layers[0], step.batch) is None


def test_a_batch_of_another_backend_is_refused() -> None:
    scene, other = DeltaScene(INTERPRETED), DeltaScene(INTERPRETED)
    step = other.step([0])
    with pytest.raises(PlanError):
        scene.run(step)


@pytest.mark.cross_compile
def test_it_compiles_for_gpus_and_holds_a_state_in_registers() -> None:
    """Triton's compiler needs no GPU. This shows neither correctness nor speed."""
    found = compiled_by(Path(__file__).with_name("cross_compile.py"))
    assert [(sm, by_channel) for sm, by_channel, *_ in found] == [(80, False), (90, False), (90, True), (90, True)]
    for _, _, shared, _, spilled in found:
        assert shared < 16_384, "a state that goes through shared memory is moved between threads for nothing"
        assert spilled == 0
