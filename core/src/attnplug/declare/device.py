"""Declaration of a device type by a plugin, and comparison of architectures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from attnplug.declare.errors import PluginError

DEVICE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Architecture(Protocol):
    """Architecture of a device. Its plugin defines the class, and so the comparison. ``str()`` is shown to users."""

    def unmet(self, requirement: Any) -> str | None:
        """Return a backend's requirement as text, such as "SM 90 or newer", or None if this architecture meets it."""


class SM(int):
    """Compute capability of a CUDA device as one number: 90 for 9.0. Requirements are pairs ``(min_sm, max_sm)``."""

    def unmet(self, requirement: tuple[int | None, int | None]) -> str | None:
        low, high = requirement
        if (low or self) <= self <= (high or self):
            return None
        if low is None or high is None:
            return f"SM {high} or older" if low is None else f"SM {low} or newer"
        return f"SM {low}" if low == high else f"SM {low} to {high}"

    def __str__(self) -> str:
        return f"SM {int(self)}"


@dataclass(frozen=True, slots=True)
class Processor:
    """A device of this machine, after which measured tables are named: ``Processor("NVIDIA H200", sm=90)``.

    ``sm`` is a CUDA device's compute capability as one number (90 for 9.0), 0 for others, which may have an
    ``architecture``. ``driver`` is the driver's version.
    """

    name: str
    sm: int = 0
    driver: str = ""
    architecture: Architecture | None = None

    def __str__(self) -> str:
        architecture = SM(self.sm) if self.sm else self.architecture
        return self.name if architecture is None else f"{self.name} ({architecture})"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Declaration of a torch device type, returned by a plugin's ``attnplug_devices`` hook.

    - ``name``: the torch device type, as in ``torch.device("acme")``.
    - ``detect``: returns the devices of this machine, the current one first, without torch and without leaving state.
    - ``module``: imported when the device is opened. It registers the type, unless torch has it.
    - ``streams``: ``module`` has streams, events and memory info with the interface of ``torch.cuda``. Otherwise
      operations have finished when their call returns, as on a CPU.
    - ``graphs``: class of captured graphs in ``module``, with the interface of ``torch.cuda.CUDAGraph``.
    - ``pinned``: copies between pinned host memory and the device are asynchronous.
    """

    name: str
    detect: Callable[[], Iterable[Processor]] = tuple
    module: str | None = None
    streams: bool = False
    graphs: str | None = None
    pinned: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not DEVICE_NAME.fullmatch(self.name):
            raise PluginError(f"device {self.name!r} must be a torch device type, such as 'xpu', without an index")
        if not callable(self.detect) or ((self.streams or self.graphs) and not self.module):
            raise PluginError(f"device {self.name}: detect must be a function; streams and graphs need a module")
