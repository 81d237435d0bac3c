"""Core's own device types, detected without torch and without creating CUDA state."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

from attnplug.declare.device import DeviceSpec, Processor

IS_ARM = platform.machine() in ("aarch64", "arm64")
"""True on Arm hosts. Some torch code paths are faster on Arm, others on x86."""


@cache
def _cpu_name() -> str:
    """Return the CPU's name from ``/proc/cpuinfo``, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.machine() or "CPU")


def visible_gpus() -> tuple[Processor, ...]:
    """Return the GPUs that NVML reports and ``CUDA_VISIBLE_DEVICES`` does not hide; empty without a driver.

    Uses NVML, because querying the CUDA driver would initialise it, which breaks processes that fork later.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return ()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count, version = ctypes.c_uint(), ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return ()
    nvml.nvmlSystemGetDriverVersion(version, len(version))
    gpus = []
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            continue
        nvml.nvmlDeviceGetName(handle, name, len(name))
        sm, driver = major.value * 10 + minor.value, version.value.decode()
        gpus.append(Processor(name.value.decode(errors="replace"), sm, driver))
    nvml.nvmlShutdown()
    chosen = [int(text) for text in (visible or "").split(",") if text.strip().isdigit()]
    return tuple(gpus[index] for index in chosen if index < len(gpus)) if chosen else tuple(gpus)


CPU = DeviceSpec("cpu", detect=lambda: (Processor(_cpu_name()),))
CUDA = DeviceSpec("cuda", lambda: visible_gpus(), "torch.cuda", streams=True, graphs="CUDAGraph", pinned=True)
