"""Triton kernels for the parts of a model between its attention layers. Their torch equivalents are at the call sites.

Most modules here import Triton, so they are imported only if ``usable`` returns True. On SM 90 and newer all kernels
use programmatic dependent launch: a kernel starts while the previous one still runs, loads what does not depend on it
(its weights), and then waits for its results. Each waits before its first store, so it never overwrites memory that an
earlier kernel still reads.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def usable(where: Tensor | torch.device) -> bool:
    """Return True if the kernels support a tensor or device: it is on a GPU, and Triton is installed."""
    # Tensor.is_cuda is faster than Tensor.device, and a step on a CPU asks five times per layer.
    on_gpu = where.type == "cuda" if isinstance(where, torch.device) else where.is_cuda
    return on_gpu and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def starts_early(device: torch.device) -> bool:
    """Return True if kernels on ``device`` use programmatic dependent launch. Triton for AMD does not support it."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def one_instruction(device: torch.device) -> bool:
    """Return True if all tiles of a product of 16-bit numbers with 64 rows or more in its first factor use one
    tensor-core instruction, up to its ``n``: ``mma`` on SM 8x, ``wgmma`` on SM 90 (``tests/compile_invariant.py``)."""
    if device.type != "cuda":
        return True  # the interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (8, 9)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory of a program in bytes. Unlimited in interpreter mode."""
    if device.type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))  # absent for AMD


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the keyword arguments of every launch."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}
