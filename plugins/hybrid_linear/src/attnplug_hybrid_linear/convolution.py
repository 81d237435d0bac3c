"""The short causal convolution of linear layers over padded requests.

A request's state is ``[channels, width]``: its last ``width`` raw rows, the newest last, zeros before its first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Convolve each row with the ``width - 1`` rows before it, channel by channel.

    x ``[requests, tokens, channels]``, state ``[requests, channels, width]``, weight ``[channels, width]`` (its last
    column is for the newest row), bias ``[channels]``. Returns x's shape and type; the sum is taken in float32.
    """
    tokens, width = x.shape[1], weight.shape[1]
    rows = _with_history(x, state)
    out = x.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    # A sum over the few taps: torch's convolution may round to TF32 on a GPU.
    for tap in range(width):
        out = out + rows[:, 1 + tap : 1 + tap + tokens] * weight[:, tap].float()
    return (F.silu(out) if silu else out).to(x.dtype)


def newest_rows(x: Tensor, state: Tensor, lens: Tensor) -> Tensor:
    """The state ``[requests, channels, width]`` after the first ``lens`` ``[requests]`` rows of each request in x."""
    width = state.shape[2]
    newest = lens.unsqueeze(1) + torch.arange(width, device=x.device)
    rows = _with_history(x, state)
    return rows.gather(1, newest.unsqueeze(-1).expand(-1, -1, rows.shape[2])).transpose(1, 2)


def _with_history(x: Tensor, state: Tensor) -> Tensor:
    """``[requests, width + tokens, channels]``: the rows of the state, then the new ones."""
    return torch.cat([state.transpose(1, 2), x], 1)
