"""Kernels for what a model does between its attention layers. Their torch twins are where they are called.

The modules in here import Triton, so they are imported only after ``usable`` said yes. On SM 90 and newer all kernels
are launched with programmatic dependent launch: a kernel starts while the one before it still runs, loads what does
not depend on that one (its weights), and then waits for its results. Each waits before its first store, so memory that
an earlier kernel reads is never written too early.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def usable(where: Tensor | torch.device) -> bool:
    """Whether the kernels can work on a tensor or on a device: it is a GPU, and Triton is installed."""
    # A tensor says this sooner than its device does, and a step on a CPU asks five times in every layer.
    on_gpu = where.type == "cuda" if isinstance(where, torch.device) else where.is_cuda
    return on_gpu and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels on ``device`` are launched while the one before still runs. Triton for AMD refuses to."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have. Interpreted, it has any number."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))  # torch has none for AMD


def launch_options(device: torch.device) -> dict[str, bool]:
    """What every launch is given beside its own arguments."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}
