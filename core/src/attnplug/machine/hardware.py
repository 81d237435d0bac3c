"""Which GPUs are here, according to the driver: without torch, and without creating any CUDA state."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GPU:
    """One visible NVIDIA GPU; ``sm`` is its compute capability as one number (90 for 9.0)."""

    name: str
    sm: int


def visible_gpus() -> tuple[GPU, ...]:
    """The GPUs that NVML knows and ``CUDA_VISIBLE_DEVICES`` does not hide; none if there is no driver.

    NVML is asked, not the CUDA driver: asking the latter initialises it, which breaks processes that fork later.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return ()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        gpus = [gpu for index in range(count.value) if (gpu := _gpu(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()
    chosen = [int(text) for text in (visible or "").split(",") if text.strip().isdigit()]
    return tuple(gpus[index] for index in chosen if index < len(gpus)) if chosen else tuple(gpus)


def _gpu(nvml: ctypes.CDLL, index: int) -> GPU | None:
    handle = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, len(name))
    return GPU(name.value.decode(errors="replace"), major.value * 10 + minor.value)
