"""The factory of ``fla``. The library is imported with this module: if that fails, nothing has been built yet."""

from __future__ import annotations

from attnplug import BackendContext, PlannedBackend
from attnplug.kernels import import_library
from attnplug_hybrid_linear.fla_kernels import FlaKernels
from attnplug_hybrid_linear.plugin import LIBRARY

import_library(FlaKernels, LIBRARY)


def fla(context: BackendContext) -> PlannedBackend:
    from attnplug_hybrid_linear.fla_backend import FlaLinearBackend  # here: its kernels need Triton to be defined

    return FlaLinearBackend(context)
