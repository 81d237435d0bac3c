"""The plain parts of a decoder on a CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from attnplug_engine.models import layers
from attnplug_engine.models.architectures import load_model


@pytest.fixture(scope="module")
def block():
    return load_model("tiny:llama", dtype=torch.float32, device="cpu").module.layers[0]


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_the_norm_of_float32_rows(block, size):
    """Small rows show that epsilon counts, large ones that nothing overflows."""
    norm = block.input_norm
    rows = size * torch.randn(2, 5, 2 * norm.weight.shape[0], generator=torch.Generator().manual_seed(1))
    rows[0, 0] = 0.0
    kept, view = rows.clone(), rows[..., ::2]
    found = norm(view)
    torch.testing.assert_close(found.double(), normed(view, norm.weight, norm.eps), rtol=1e-5, atol=1e-6)
    assert torch.equal(rows, kept)


def test_the_norm_of_rows_of_another_type_than_its_weight(block):
    norm, rows = block.input_norm, torch.randn(3, block.input_norm.weight.shape[0]).bfloat16()
    found = norm(rows)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), normed(rows, norm.weight, norm.eps), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("added", [False, True])
def test_an_mlp_of_many_rows_takes_them_in_parts(block, added, monkeypatch):
    mlp, norm, taken = block.mlp, block.mlp_norm, []
    activate = mlp._activate
    monkeypatch.setattr(mlp, "_activate", lambda x: taken.append(x.shape[0]) or activate(x))
    monkeypatch.setattr(layers, "_ROWS_AT_ONCE", 4)
    rows, onto = torch.randn(2, 10, norm.weight.shape[0], generator=torch.Generator().manual_seed(2))
    gate, up = (normed(rows, norm.weight, norm.eps) @ mlp.gate_up.weight.double().T).chunk(2, -1)
    wanted = (gate * gate.sigmoid() * up) @ mlp.down.weight.double().T + (onto.double() if added else 0)
    found = mlp(rows, norm=norm, onto=onto.clone() if added else None)
    assert taken == [4, 4, 2]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
