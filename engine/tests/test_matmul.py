"""Products of a weight and any number of rows, against float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnplug_engine.models import matmul as room
from attnplug_engine.models.layers import Linear, pack_weights
from attnplug_engine.models.matmul import matmul, pack


def check(rows: int, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        out = matmul(x, weight, added, pack(weight))
        assert out.dtype is dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 8, 48, 65])
def test_product_of_a_tiny_weight(rows, dtype):
    check(rows, dtype)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 15, 16, 48, 49])
def test_product_with_the_weight_first(rows, small, monkeypatch):
    """A small weight is multiplied so from more rows on."""
    calls, multiply = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *of: calls.append(1) or multiply(*of))
    monkeypatch.setattr(room, "_MKL", True)
    monkeypatch.setattr(room, "_TINY", 0)
    if not small:
        monkeypatch.setattr(room, "_SMALL", 0)
    check(rows)
    assert bool(calls) is ((16 if small else 8) <= rows <= 48)


@pytest.mark.skipif(not room._ONEDNN, reason="torch has no oneDNN here")
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 64, 65])
def test_product_of_a_large_weight_by_onednn(rows, monkeypatch):
    calls, multiply = [], room._ONEDNN
    monkeypatch.setattr(room, "_ONEDNN", lambda *of: calls.append(1) or multiply(*of))
    monkeypatch.setattr(room, "_MKL", True)
    for limit in ("_TINY", "_SMALL", "_LARGE"):
        monkeypatch.setattr(room, limit, 0)
    check(rows)
    assert bool(calls) is (8 <= rows <= 64)


@pytest.fixture
def packing(monkeypatch):
    """Same as without MKL."""
    if not room._ONEDNN:
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(room, "_MKL", False)
    monkeypatch.setattr(room, "_TINY", 0)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 65])
def test_product_of_a_packed_weight(rows, packing, monkeypatch):
    """A single row is multiplied by the original weight."""
    calls, multiply = [], room._ONEDNN
    monkeypatch.setattr(room, "_ONEDNN", lambda *of: calls.append(1) or multiply(*of))
    check(rows)
    assert bool(calls) is (rows >= 2)


@pytest.mark.parametrize("lookahead", [0, -1])
def test_weights_are_packed_if_they_take_a_small_part_of_the_memory(lookahead, packing, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Linear(torch.randn(40, 24)), Linear(torch.randn(12, 40), torch.randn(12)))
    x = torch.randn(3, 24)
    before = model(x)
    size = 4 * (40 * 24 + 12 * 40)
    monkeypatch.setattr("attnplug_engine.models.layers.available_memory", lambda: 4 * size + lookahead)
    pack_weights(model)
    assert [layer.packed is not None for layer in model] == [lookahead == 0] * 2
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_the_operator_onednn_is_not_used(error, monkeypatch):
    """The operator is private to torch: a release may remove or rename it."""

    def gone(*_: object) -> torch.Tensor:
        raise error("_linear_pointwise")

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=gone))
    assert room._onednn() is None


def test_product_of_strided_rows_and_of_more_dimensions(monkeypatch):
    weight, x = torch.randn(12, 16), torch.randn(9, 32)[:, ::2]
    for tiny in (1 << 18, 0):
        monkeypatch.setattr(room, "_TINY", tiny)
        monkeypatch.setattr(room, "_SMALL", tiny)
        torch.testing.assert_close(matmul(x, weight), x @ weight.T)
        torch.testing.assert_close(matmul(x, weight, packed=pack(weight)), x @ weight.T)
        torch.testing.assert_close(matmul(x.unflatten(0, (3, 3)), weight), (x @ weight.T).unflatten(0, (3, 3)))
