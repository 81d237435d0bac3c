"""Merge of KV splits by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_splits(out: Tensor, lse: Tensor, count: int, merged_lse: Tensor | None) -> Tensor:
    """Merge attention over ``count`` disjoint KV splits.

    ``out`` is ``[rows * count, heads, dim]``. ``lse`` ``[rows * count, heads]`` float32 is in natural log, and -inf for
    an empty split, whose output is ignored even if it is NaN. Returns ``[rows, heads, dim]`` in the dtype of ``out``,
    and writes ``merged_lse`` ``[rows, heads]`` float32 if given.
    """
    if out.device.type == "cuda":
        from attnplug_flashattention.triton_kernels import launch_merge_splits

        return launch_merge_splits(out, lse, count, merged_lse)
    parts, sums = out.unflatten(0, (-1, count)), lse.unflatten(0, (-1, count))
    largest = sums.amax(1, keepdim=True)
    share = torch.exp(sums - torch.where(largest == float("-inf"), 0.0, largest)).unsqueeze(-1)
    total = share.sum(1)
    weighted = torch.where(share > 0, parts.float() * share, 0.0).sum(1)
    if merged_lse is not None:
        merged_lse.copy_(sums.logsumexp(1))
    return torch.where(total > 0, weighted / total, 0.0).to(out.dtype)
