"""Products of a weight and any number of rows, against float64."""

from __future__ import annotations

import pytest
import torch

from attnplug_engine.models import product as room
from attnplug_engine.models.product import product


def check(rows: int, dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        out = product(x, weight, added)
        assert out.dtype is dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 8, 48, 65])
def test_product_of_a_small_weight(rows, dtype):
    check(rows, dtype)


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 48, 49])
def test_product_with_the_weight_first(rows, monkeypatch):
    monkeypatch.setattr(room, "_MKL", True)
    monkeypatch.setattr(room, "_ONEDNN", False)
    monkeypatch.setattr(room, "_SMALL", 0)
    check(rows)


@pytest.mark.skipif(not room._ONEDNN, reason="torch has no oneDNN here")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 24, 25, 64, 65])
def test_product_by_onednn(rows, large, monkeypatch):
    """A larger weight is multiplied so for more rows."""
    calls, multiply = [], room._by_onednn
    monkeypatch.setattr(room, "_by_onednn", lambda *of: calls.append(1) or multiply(*of))
    monkeypatch.setattr(room, "_SMALL", 0)
    if large:
        monkeypatch.setattr(room, "_LARGE", 0)
    check(rows)
    assert bool(calls) is (8 <= rows <= (64 if large else 24))


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_without_the_operator_onednn_is_not_used(error, monkeypatch):
    """It is private to torch: a release may drop it, or call it otherwise."""

    def gone(*_: object) -> torch.Tensor:
        raise error("_linear_pointwise")

    monkeypatch.setattr(room, "_by_onednn", gone)
    assert room._onednn_is_there() is False


def test_product_of_strided_rows_and_of_more_dimensions(monkeypatch):
    weight, x = torch.randn(12, 16), torch.randn(9, 32)[:, ::2]
    for small in (1 << 18, 0):
        monkeypatch.setattr(room, "_SMALL", small)
        torch.testing.assert_close(product(x, weight), x @ weight.T)
        torch.testing.assert_close(product(x.unflatten(0, (3, 3)), weight), (x @ weight.T).unflatten(0, (3, 3)))
