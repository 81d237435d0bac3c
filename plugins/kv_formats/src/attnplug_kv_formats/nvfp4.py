"""Codec of ``nvfp4``: two e2m1 values per byte, the first in the low nibble, and an e4m3 scale per 16 values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GROUP = 16
_LARGEST, _LARGEST_SCALE = 6.0, 448.0


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Encode rows ``[..., width]``: bytes ``[..., width / 2]`` uint8, scales ``[..., width / 16]`` e4m3."""
    groups = rows.float().unflatten(-1, (-1, _GROUP))
    # Divide by a tensor: on a GPU, torch multiplies by the inverse of a Python number, which rounds twice.
    largest = groups.abs().amax(-1) / groups.new_full((), _LARGEST)
    scales = largest.clamp(max=_LARGEST_SCALE).to(torch.float8_e4m3fn)
    divisor = scales.float().unsqueeze(-1)
    scaled = groups / torch.where(divisor == 0, torch.inf, divisor)  # a group below the smallest scale is zero
    size = scaled.abs()
    # Halfway values go to the even code.
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5.0) + 8 * scaled.signbit().to(torch.uint8)
    pairs = code.flatten(-2).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def decode(parts: Sequence[Tensor]) -> Tensor:
    """Decode the parts of ``encode`` to float32 rows ``[..., width]``."""
    packed, scales = parts
    codes = packed.to(torch.int16)
    codes = torch.stack((codes, codes >> 4), -1).flatten(-2)
    # The bits of e2m1, shifted into a float16, are its value times 2 ** -14. A lookup table would have to be copied to
    # the device, which synchronizes.
    bits = (codes & 7) << 9 | (codes & 8) << 12
    values: Tensor = (bits.view(torch.float16).float() * 2.0**14).unflatten(-1, (-1, _GROUP))
    return (values * scales.float().unsqueeze(-1)).flatten(-2)
