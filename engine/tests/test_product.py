"""Products of a weight and any number of rows, against float64."""

from __future__ import annotations

import pytest
import torch

from attnplug_engine.models.product import product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 24, 25, 48, 49])
def test_product_is_the_same_in_each_way(rows, dtype):
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype)
    for added in (None, bias):
        wanted = x.double() @ weight.double().T + (0 if added is None else added.double())
        out = product(x, weight, added)
        assert out.dtype is dtype and out.is_contiguous()
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.15)


def test_product_of_strided_rows_and_of_more_dimensions():
    weight, x = torch.randn(12, 16), torch.randn(9, 32)[:, ::2]
    torch.testing.assert_close(product(x, weight), x @ weight.T)
    torch.testing.assert_close(product(x.unflatten(0, (3, 3)), weight), (x @ weight.T).unflatten(0, (3, 3)))
