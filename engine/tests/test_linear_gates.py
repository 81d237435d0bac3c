"""The kernels around linear recurrences against float64: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from attnplug_testing.devices import DEVICES

on_every_device = pytest.mark.parametrize("device", DEVICES)
ROWS = 3


@pytest.fixture
def gates() -> ModuleType:
    """The kernels, interpreted without a GPU."""
    pytest.importorskip("triton")
    return import_module("attnplug_engine.kernels.linear_gates")


def slices(device: str, *widths: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Rows as a product gives them: side by side, so that each slice has gaps between its rows."""
    random = torch.Generator().manual_seed(sum(widths))
    product = scale * torch.randn(ROWS, sum(widths) + 3, generator=random)
    return product.to(device, dtype).split((*widths, 3), 1)[:-1]


def weights(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(device)


def softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(x.double().exp()))


@on_every_device
@pytest.mark.parametrize("key_dim", [None, 5])
def test_decays_and_betas(key_dim, device, gates) -> None:
    """From decays that forget at once to decays that ``log(1 + x)`` would lose."""
    heads, width = 6, key_dim or 1
    decay, beta = slices(device, heads * width, heads, scale=9.0)
    rate, bias = -weights(device, heads).exp(), weights(device, heads * width)
    shape = (ROWS, heads) if key_dim is None else (ROWS, heads, width)
    decay, per_head = decay.unflatten(1, shape[1:]), bias.view(shape[1:])
    log_decay, strength = gates.delta_gates(decay, beta, rate, per_head)
    rates = rate.double() if key_dim is None else rate.double().unsqueeze(-1)
    assert log_decay.dtype is torch.float32
    assert_close(log_decay.double(), rates * softplus(decay.double() + per_head), rtol=2e-6, atol=0)
    assert_close(strength.double(), beta.double().sigmoid(), rtol=1e-6, atol=0)


@on_every_device
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 0.5)])
def test_time_steps(limits, device, gates) -> None:
    heads, width = 3, 5
    x, step = slices(device, heads * width, heads)
    rate, bias = -weights(device, heads).exp(), weights(device, heads)
    values, log_decay = gates.time_steps(x.unflatten(1, (heads, width)), step, rate, bias, limits)
    steps = softplus(step.double() + bias).clamp(*limits)
    wanted = x.double().unflatten(1, (heads, width)) * steps.unsqueeze(-1)
    assert_close(values.double(), wanted, rtol=2e-6, atol=1e-7)
    assert_close(log_decay.double(), rate * steps, rtol=2e-6, atol=0)


@on_every_device
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["one weight for all groups", "a weight for each column"])
def test_a_norm_and_then_its_gate(shared, silu, device, gates) -> None:
    groups, width = 3, 6
    x, gate = slices(device, groups * width, groups * width)
    weight = weights(device, width if shared else groups * width)
    found = gates.gated_norm(x, gate, weight, 1e-5, groups=groups, silu=silu)
    each = weight.double().expand(groups, width) if shared else weight.double().view(groups, width)
    normed = F.rms_norm(x.double().unflatten(1, (groups, width)), (width,), eps=1e-5) * each
    opened = F.silu(gate.double()) if silu else gate.double().sigmoid()
    assert_close(found.double(), normed.flatten(1) * opened, rtol=2e-6, atol=1e-6)


@on_every_device
def test_a_gate_and_then_the_norm_of_a_sum(device, gates) -> None:
    """Mamba-2's gate: the part that bypasses the recurrence is added first, head by head. Groups hold several heads."""
    heads, width, groups = 4, 5, 2
    x, gate, past = slices(device, *[heads * width] * 3)
    weight, skip = weights(device, heads * width), weights(device, heads)
    found = gates.gated_norm(x, gate, weight, 1e-5, groups=groups, silu=True, gate_first=True, skip=(skip, past))
    summed = x.double() + skip.double().repeat_interleave(width) * past
    opened = (summed * F.silu(gate.double())).unflatten(1, (groups, -1))
    normed = F.rms_norm(opened, opened.shape[-1:], eps=1e-5).flatten(1) * weight.double()
    assert_close(found.double(), normed, rtol=2e-6, atol=1e-6)


@on_every_device
def test_a_sigmoid_gate(device, gates) -> None:
    """The gated softmax attention of Qwen3-Next."""
    x, gate = slices(device, 11, 11)
    found = gates.sigmoid_gate(x, gate)
    assert found.is_contiguous()
    assert_close(found.double(), x.double() * gate.double().sigmoid(), rtol=1e-6, atol=0)


def test_no_rows_are_no_launch(gates) -> None:
    empty = torch.zeros(0, 4)
    assert gates.sigmoid_gate(empty, empty).shape == (0, 4)
    assert gates.gated_norm(empty, empty, torch.ones(4), 1e-5, groups=1, silu=True).shape == (0, 4)
    assert gates.delta_gates(empty, empty, torch.ones(4), torch.ones(4))[0].shape == (0, 4)
