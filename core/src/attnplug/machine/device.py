"""The device that a command runs on: the one asked for, or the best there is."""

from __future__ import annotations

import torch

from attnplug.declare.capabilities import DEVICES
from attnplug.declare.errors import UsageError
from attnplug.declare.settings import Setting


def open_device(asked: str | None) -> tuple[torch.device, int | None]:
    """The device of this process and, on CUDA, its compute capability as one number; an error if there is none."""
    if asked is not None and asked not in DEVICES:
        message = f"`device` {asked!r} is unknown; use one of {', '.join(DEVICES)}"
        raise UsageError(message, settings=[Setting.DEVICE])
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise UsageError(
            f"`device` cuda is asked for, but torch {torch.__version__} sees no CUDA device; use `device` cpu, or see "
            "'attnplug doctor' for what is missing",
            settings=[Setting.DEVICE],
        )
    if asked == "cpu" or not available:
        return torch.device("cpu"), None
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    return device, 10 * major + minor
