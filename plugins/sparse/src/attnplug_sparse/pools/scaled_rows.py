"""Codec of e4m3 rows with a float32 scale per group, e.g. FlashMLA's latent rows of 656 bytes.

Scales are powers of two: dividing by one rounds nothing, and kernels that multiply by it in bfloat16 are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnplug_sparse.pools.triton_scaled_rows import ScaledWriter

_LARGEST = 448.0
_SMALLEST = 1e-4
"""Lower bound of a group's largest magnitude, so that a group of zeros has a scale too."""
_GROUP = 128
"""Values of a latent row that share a scale."""


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    return encode_groups(rows, _GROUP)


def encode_groups(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return e4m3 values ``[tokens, heads, width]`` and float32 scales of groups of ``size`` values."""
    groups = rows.float().unflatten(-1, (-1, size))
    scales = group_scales(groups.abs().amax(-1))
    values = (groups / scales.unsqueeze(-1)).clamp_(-_LARGEST, _LARGEST)
    return values.flatten(-2).to(torch.float8_e4m3fn), scales


def decode(parts: Sequence[Tensor]) -> Tensor:
    values, scales = parts
    groups: Tensor = values.float().unflatten(-1, (scales.shape[-1], -1))
    return groups.mul_(scales.unsqueeze(-1)).flatten(-2)


def group_scales(largest: Tensor) -> Tensor:
    """Return the scales of groups, float32, given their largest magnitudes: the smallest power of two that fits."""
    scales = largest.clamp(min=_SMALLEST) / _LARGEST
    # Round up to a power of two: any bit of the mantissa raises the exponent.
    return (scales.view(torch.int32) + 0x7FFFFF).bitwise_and_(-0x800000).view(torch.float32)


def row_writer(parts: Sequence[Tensor], scale: float) -> ScaledWriter | None:
    values, scales, *rest = parts
    if torch.cuda.get_device_capability(values.device) < (8, 9):
        return None  # Triton does not convert to e4m3 there
    try:
        from attnplug_sparse.pools.triton_scaled_rows import ScaledWriter
    except ImportError:
        return None
    return ScaledWriter(values, scales, rest[0] if rest else None, _SMALLEST)
