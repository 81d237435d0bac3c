"""Device selection for a command."""

from __future__ import annotations

import torch

from attnplug.declare.capabilities import check_device
from attnplug.declare.errors import UsageError
from attnplug.declare.settings import Setting


def open_device(requested: str | None) -> tuple[torch.device, int | None]:
    """Return the device to run on and, for CUDA, its compute capability as one number (90 for 9.0).

    ``None`` selects the current CUDA device if there is one, otherwise the CPU. Raises UsageError if the requested
    device is unknown or absent.
    """
    check_device(requested)
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise UsageError(
            f"`device` cuda is requested, but torch {torch.__version__} sees no CUDA device; use `device` cpu, or see "
            "'attnplug doctor' for what is missing",
            settings=[Setting.DEVICE],
        )
    if requested == "cpu" or not available:
        return torch.device("cpu"), None
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    return device, 10 * major + minor
