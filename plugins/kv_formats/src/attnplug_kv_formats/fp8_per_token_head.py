"""Codec of ``fp8_per_token_head``: e4m3 rows with one float32 scale each, rounded as vLLM's Triton kernels do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGEST = 448.0
_SMALLEST_SCALE = 1e-6
"""vLLM's lower bound, so that a row of zeros has a scale too."""


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows ``[..., width]``: e4m3 values ``[..., width]``, float32 scales ``[..., 1]``."""
    rows = rows.float()
    # Divide by a tensor: on a GPU, torch multiplies by the inverse of a Python number, which rounds twice.
    scales = (rows.abs().amax(-1, keepdim=True) / rows.new_full((), _LARGEST)).clamp(min=_SMALLEST_SCALE)
    return (rows * (1.0 / scales)).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


def decode(parts: Sequence[Tensor]) -> Tensor:
    """Decode the parts of ``encode`` to float32 rows ``[..., width]``."""
    values, scales = parts
    return values.float() * scales
