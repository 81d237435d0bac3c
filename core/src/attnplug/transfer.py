"""Numbers from the host to a device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CPU = torch.device("cpu")


def to_device(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """A tensor of whole numbers; a copy, whatever ``numbers`` is."""
    tensor = torch.from_numpy(np.array(numbers, dtype))  # by way of numpy it costs a third of torch.tensor
    if device == _CPU:  # device.type makes a string, at ten times the cost
        return tensor
    # Pinned memory makes the copy asynchronous; torch keeps it until the copy is done.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
