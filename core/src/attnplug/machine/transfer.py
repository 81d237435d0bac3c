"""Asynchronous copies of integers from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnplug.machine.runtime import runtime_of

_CPU = torch.device("cpu")


def to_device(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """Copy integers to a tensor of the same shape on ``device``, without synchronising. Never aliases ``numbers``."""
    tensor = on_host(numbers, device, dtype)
    return tensor if device == _CPU else tensor.to(device, non_blocking=True)


def on_host(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """Copy integers to a host tensor, pinned if the device allows it, for a later asynchronous copy to ``device``.

    torch's allocator keeps the pinned memory until that copy has finished.
    """
    tensor = torch.from_numpy(np.array(numbers, dtype))  # a third of the time of torch.tensor
    return tensor.pin_memory() if device != _CPU and runtime_of(device).pinned else tensor
