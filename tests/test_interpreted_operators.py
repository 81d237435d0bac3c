"""Operators, choices and casts of interpreted kernels, which are remembered per type, are right each time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

INT32, INT64, UINT8, FLOAT32, BOOL = torch.int32, torch.int64, torch.uint8, torch.float32, torch.bool
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]
COMPARISONS = [operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne]
BITWISE = [operator.and_, operator.or_, operator.xor]
CASES = [
    *((function, (left, right)) for function in ARITHMETIC for left in (INT32, INT64) for right in (INT32, INT64)),
    *((function, (INT32, UINT8)) for function in ARITHMETIC[:3]),
    *((function, (FLOAT32, FLOAT32)) for function in (*ARITHMETIC[:3], *COMPARISONS)),
    *((function, (FLOAT32, INT32)) for function in (*ARITHMETIC[:3], *COMPARISONS)),
    *((function, (INT32, INT64)) for function in (*COMPARISONS, *BITWISE)),
    *((function, (BOOL, BOOL)) for function in (*BITWISE, operator.eq)),
]
"""Functions with the types of their operands. ``//`` and ``%`` of positive numbers are Python's."""
NUMBER = 3


@triton.jit
def apply(left, right, outer, row, number, FUNCTION: tl.constexpr, NUMBER: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(left + at), tl.load(right + at)
    square = at[:, None] * SIZE + at[None, :]
    tl.store(outer + square, FUNCTION(x[:, None], y[None, :]))
    tl.store(row + at, FUNCTION(x, tl.load(right)))
    if NUMBER is not None:
        tl.store(number + at, FUNCTION(x, NUMBER))


def values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    drawn = torch.randint(1, 100, (8,), generator=torch.Generator().manual_seed(seed))
    return drawn % 2 == 0 if dtype is BOOL else drawn.to(dtype)


@pytest.mark.parametrize(
    ("function", "dtypes"), CASES, ids=[f"{f.__name__}-{a}-{b}".replace("torch.", "") for f, (a, b) in CASES]
)
def test_each_time(function: Callable[[Any, Any], Any], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for seed in range(3):  # the first takes Triton's way
        left, right = values(dtypes[0], seed), values(dtypes[1], seed + 10)
        wide = [torch.float64 if FLOAT32 in dtypes else INT64 if BOOL not in dtypes else BOOL] * 2
        x, y = left.to(wide[0]), right.to(wide[1])
        wanted = function(x[:, None], y), function(x, y[0]), None if BOOL in dtypes else function(x, NUMBER)
        outer, row, number = (torch.zeros(*size, dtype=wanted[0].dtype) for size in ((8, 8), (8,), (8,)))
        apply[(1,)](left, right, outer, row, number, function, None if BOOL in dtypes else NUMBER, 8)
        assert torch.equal(outer, wanted[0]) and torch.equal(row, wanted[1])
        assert wanted[2] is None or torch.equal(number, wanted[2])


@triton.jit
def choose(left, right, outer, numbers, casts, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(left + at), tl.load(right + at)
    square = at[:, None] * SIZE + at[None, :]
    tl.store(outer + square, tl.where((x > 40)[:, None], x[:, None], y[None, :]))
    tl.store(numbers + at, tl.where(x > 40, x.to(tl.float32), 0.0) + tl.where(x > 40, -1.5, 0.5))
    tl.store(casts + at, x.to(tl.int64) * 2**32 + y.to(tl.uint8).to(tl.int64))


def test_choices_and_casts_each_time() -> None:
    for seed in range(3):
        x, y = values(INT32, seed), values(INT32, seed + 10)
        outer, numbers, casts = (torch.zeros(*s, dtype=t) for s, t in (((8, 8), INT32), ((8,), FLOAT32), ((8,), INT64)))
        choose[(1,)](x, y, outer, numbers, casts, 8)
        assert torch.equal(outer, torch.where((x > 40)[:, None], x[:, None], y))
        assert torch.equal(numbers, torch.where(x > 40, x - 1.5, 0.5))
        assert torch.equal(casts, x.long() * 2**32 + y.long())
