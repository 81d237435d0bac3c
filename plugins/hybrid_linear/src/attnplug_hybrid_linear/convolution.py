"""Short causal convolution of linear layers over padded requests, in torch.

A request's state ``[channels, width]`` holds its last ``width`` input rows, the newest last, and zeros before its
first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool, by_token: bool = False
) -> Tensor:
    """Convolve each row with the ``width - 1`` rows before it, per channel (depthwise).

    x ``[requests, tokens, channels]``, state ``[requests, channels, width]``, weight ``[channels, width]`` (its last
    column is for the newest row), bias ``[channels]``. Returns x's shape and dtype; accumulates in float32.

    With ``by_token``, the bits of a row do not depend on the number of rows: on a CPU, torch's exponentials of a
    tensor's last elements differ from those before them.
    """
    tokens, width = x.shape[1], weight.shape[1]
    rows = _with_history(x, state)
    out = x.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    # A sum over the few taps: torch's convolution may round to TF32 on a GPU.
    for tap in range(width):
        out = out + rows[:, 1 + tap : 1 + tap + tokens] * weight[:, tap].float()
    if silu and by_token:
        out = torch.cat([F.silu(row.contiguous()) for row in out.split(1, 1)], 1)
    elif silu:
        out = F.silu(out)
    return out.to(x.dtype)


def newest_rows(x: Tensor, state: Tensor, lens: Tensor) -> Tensor:
    """Return the state ``[requests, channels, width]`` after the first ``lens`` ``[requests]`` rows of x."""
    width = state.shape[2]
    newest = lens.unsqueeze(1) + torch.arange(width, device=x.device)
    rows = _with_history(x, state)
    return rows.gather(1, newest.unsqueeze(-1).expand(-1, -1, rows.shape[2])).transpose(1, 2)


def _with_history(x: Tensor, state: Tensor) -> Tensor:
    """Return ``[requests, width + tokens, channels]``: the rows of the state, then the new ones."""
    return torch.cat([state.transpose(1, 2), x], 1)
