"""Moving numbers from the host to a device, without waiting for it."""

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
    """A tensor of whole numbers; always a copy, whatever ``numbers`` is."""
    tensor = on_host(numbers, device, dtype)
    return tensor if device == _CPU else tensor.to(device, non_blocking=True)


def on_host(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """The same on the host, in pinned memory: a copy to ``device`` does not wait. torch keeps the memory for that
    long."""
    tensor = torch.from_numpy(np.array(numbers, dtype))  # through numpy it costs a third of torch.tensor
    # device.type makes a string, at ten times the cost of a comparison
    return tensor.pin_memory() if device != _CPU and device.type == "cuda" else tensor
