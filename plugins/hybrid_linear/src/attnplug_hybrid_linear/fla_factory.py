"""The factory of ``fla``. The library is imported with this module: if that fails, nothing has been built yet."""

from __future__ import annotations

from attnplug import import_library
from attnplug_hybrid_linear.fla_backend import FlaLinearBackend
from attnplug_hybrid_linear.fla_kernels import FlaKernels
from attnplug_hybrid_linear.plugin import LIBRARY

__all__ = ["FlaLinearBackend"]

import_library(FlaKernels, LIBRARY)
