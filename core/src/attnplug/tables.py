"""Public names for measuring: measured tables, and direct calls of a backend's library (``attnplug.raw``).

A name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.faces import face

if TYPE_CHECKING:
    from attnplug.auto.measurement import MeasuredShape as MeasuredShape
    from attnplug.auto.measurement import MeasuredTable as MeasuredTable
    from attnplug.auto.measurement import Measurement as Measurement
    from attnplug.contract.raw import RawCalls as RawCalls
    from attnplug.contract.raw import RawScene as RawScene

_MODULES = {
    "auto.measurement": ("MeasuredShape", "MeasuredTable", "Measurement"),
    "contract.raw": ("RawCalls", "RawScene"),
}

__getattr__, __dir__, __all__ = face(__name__, globals(), _MODULES, other="attnplug")
