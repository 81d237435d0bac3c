"""Codec of e4m3 rows, and the kernel that writes them. Their scale, if any, is the layer's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnplug.kv.buffer import RowKernel, triton_writer

_LARGEST = 448.0


def encode(rows: Tensor) -> tuple[Tensor]:
    # torch's own cast turns overflow into NaN before pytorch/pytorch#178817 (CPU) and saturates after it. In place:
    # rows of a format with a layer scale are the result of a division.
    return (rows.clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn),)


def decode(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].to(torch.float32)


def row_writer(parts: Sequence[Tensor], scale: float) -> RowKernel | None:  # Triton converts to e4m3 from SM 89 on
    return triton_writer(parts[0], scale) if torch.cuda.get_device_capability(parts[0].device) >= (8, 9) else None
