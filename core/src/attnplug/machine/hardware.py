"""CPU and GPU detection without torch and without creating CUDA state."""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

IS_ARM = platform.machine() in ("aarch64", "arm64")
"""True on Arm hosts. Some torch code paths are faster on Arm, others on x86."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A visible NVIDIA GPU or a CPU.

    ``sm`` is a GPU's compute capability as one number (90 for 9.0), 0 for a CPU. ``driver`` is the driver's version.
    """

    name: str
    sm: int
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.name} (SM {self.sm})" if self.sm else self.name


def this_processor(device: str | None, sm: int | None = None) -> Processor | None:
    """Return the first visible GPU for ``"cuda"``, or the CPU for ``"cpu"``.

    Returns None if there is no such device, or if ``sm`` is given and differs from its compute capability.
    """
    if device == "cpu":
        return Processor(_cpu_name(), 0)
    gpus = visible_gpus() if device == "cuda" else ()
    if not gpus or sm not in (None, gpus[0].sm):
        return None
    return gpus[0]


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
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        version = ctypes.create_string_buffer(96)
        nvml.nvmlSystemGetDriverVersion(version, len(version))
        driver = version.value.decode(errors="replace")
        gpus = [gpu for index in range(count.value) if (gpu := _gpu(nvml, index, driver)) is not None]
    finally:
        nvml.nvmlShutdown()
    chosen = [int(text) for text in (visible or "").split(",") if text.strip().isdigit()]
    return tuple(gpus[index] for index in chosen if index < len(gpus)) if chosen else tuple(gpus)


def _gpu(nvml: ctypes.CDLL, index: int, driver: str) -> Processor | None:
    handle = ctypes.c_void_p()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, len(name))
    return Processor(name.value.decode(errors="replace"), major.value * 10 + minor.value, driver)
