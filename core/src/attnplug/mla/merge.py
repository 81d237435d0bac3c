"""Merge of partial attention results by log-sum-exp (C4)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partial(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys; returns output and log-sum-exp over both.

    Outputs are ``[tokens, heads, dim]``, log-sum-exps ``[tokens, heads]`` float32, natural log; the result is float32.
    A part without keys has log-sum-exp -inf, or +inf from some kernels. It has weight 0, and its output is ignored even
    if it is NaN. A log-sum-exp of NaN was never filled and gives NaN.
    """
    # Some kernels return +inf for a part without keys.
    lse, part_lse = (torch.where(each == float("inf"), float("-inf"), each) for each in (lse, part_lse))
    largest = torch.maximum(lse, part_lse)
    base = torch.where(largest == float("-inf"), 0.0, largest)  # both empty: exp(-inf - 0) is 0, not NaN
    weight, part_weight = torch.exp(lse - base), torch.exp(part_lse - base)
    total = weight + part_weight
    merged = _weighted(out, weight) + _weighted(part, part_weight)
    merged = torch.where(total.unsqueeze(-1) == 0, 0.0, merged / total.unsqueeze(-1))
    return merged, base + torch.log(total)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, out.float() * weight)
