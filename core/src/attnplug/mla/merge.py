"""Merging attention over parts of the keys, by their log-sum-exps: in one place (C4)."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partial(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from attention over each.

    Outputs are ``[tokens, heads, dim]``, log-sum-exps ``[tokens, heads]`` float32, natural log; the result is float32.
    A part without keys has the log-sum-exp -inf; some kernels give +inf instead. It takes no share, and its output is
    not looked at, even if it is NaN. A log-sum-exp of NaN was never filled; the result is NaN then.
    """
    mine, theirs = _of_the_empty(lse), _of_the_empty(part_lse)
    largest = torch.maximum(mine, theirs)
    base = torch.where(largest == float("-inf"), 0.0, largest)  # both empty: exp(-inf - 0) is 0, not NaN
    share, part_share = torch.exp(mine - base), torch.exp(theirs - base)
    total = share + part_share
    merged = _weighted(out, share) + _weighted(part, part_share)
    merged = torch.where(total.unsqueeze(-1) == 0, 0.0, merged / total.unsqueeze(-1))
    return merged, base + torch.log(total)


def _of_the_empty(lse: Tensor) -> Tensor:
    return torch.where(lse == float("inf"), float("-inf"), lse)


def _weighted(out: Tensor, share: Tensor) -> Tensor:
    share = share.unsqueeze(-1)
    return torch.where(share == 0, 0.0, out.float() * share)
