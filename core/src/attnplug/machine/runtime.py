"""Open devices: streams, graphs and pinned memory, by torch's own module of the type; copies of integers to devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnplug.declare.device import DeviceSpec, Processor
from attnplug.declare.errors import UsageError, describe_error
from attnplug.declare.reading import of_type
from attnplug.machine.hardware import CUDA

_CPU = torch.device("cpu")
_STREAMS = "Stream Event stream current_stream synchronize mem_get_info empty_cache device_count set_device"
_GRAPHS = "graph graph_pool_handle is_current_stream_capturing"


class DeviceRuntime:
    """A device type in use. ``module`` is torch's module of a type with streams, None for a synchronous one."""

    def __init__(self, spec: DeviceSpec) -> None:
        imported = None if spec.module is None else import_module(spec.module)
        self.spec, self.pinned = spec, spec.pinned
        self.module: Any = imported if spec.streams else None
        self.graph: Any = None if spec.graphs is None else getattr(imported, spec.graphs)
        for needed, names in ((spec.streams, _STREAMS), (spec.graphs, _GRAPHS)):
            for name in names.split() if needed else ():
                getattr(imported, name)  # one that is missing is reported now, not when it is called

    def processor(self, device: torch.device) -> Processor:
        """Return the name and architecture of a device."""
        found = of_type("detect", next(iter(self.spec.detect()), Processor(self.spec.name)), Processor, "a Processor")
        if self.spec.name != CUDA.name:
            return found
        major, minor = torch.cuda.get_device_capability(device)
        sm = 10 * major + minor
        return found if found.sm == sm else Processor(torch.cuda.get_device_name(device), sm)


_OPENED: dict[str, DeviceRuntime] = {CUDA.name: DeviceRuntime(CUDA)}


@cache
def runtime_of(device: torch.device) -> DeviceRuntime:
    """Return the runtime of a device. A type that was not opened by name is used as a synchronous one."""
    return _OPENED.get(device.type) or DeviceRuntime(DeviceSpec(device.type))


def open_device(requested: str | None, find: Callable[[str], DeviceSpec]) -> tuple[torch.device, Processor]:
    """Return the device to run on, and its name and architecture. ``find`` is ``Registry.device``.

    ``None`` selects the current CUDA device, or else the CPU. Raises UsageError for an unknown or absent device.
    """
    spec = find(("cuda" if torch.cuda.is_available() else "cpu") if requested is None else requested)
    try:
        runtime = DeviceRuntime(spec)
        held = torch.zeros(1, device=spec.name)  # before pinned memory, whose errors do not name what is missing
        held.copy_(torch.zeros(1, pin_memory=spec.pinned)).tolist()  # raises for a type without memory, such as meta
        device, processor = held.device, runtime.processor(held.device)  # the current one, with its index
    except Exception as error:
        message = f"`device` {spec.name} is requested, but torch {torch.__version__} cannot open it: "
        reason = f"{describe_error(error).splitlines()[0]}; use another `device`"
        raise UsageError(message + reason) from error
    _OPENED[spec.name] = runtime
    runtime_of.cache_clear()
    return device, processor


def to_device(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """Copy integers, such as ``[n]``, to a tensor on ``device``, without synchronising. Never aliases ``numbers``."""
    tensor = on_host(numbers, device, dtype)
    return tensor if device == _CPU else tensor.to(device, non_blocking=True)


def on_host(
    numbers: Sequence[Any] | NDArray[Any], device: torch.device, dtype: type[np.integer[Any]] = np.int64
) -> Tensor:
    """Copy integers, such as ``[n]``, to a host tensor, pinned if possible, for an asynchronous copy to ``device``.

    torch's allocator keeps the pinned memory until that copy has finished.
    """
    tensor = torch.from_numpy(np.array(numbers, dtype))  # a third of the time of torch.tensor
    return tensor.pin_memory() if device != _CPU and runtime_of(device).pinned else tensor
