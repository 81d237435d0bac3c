"""Factory of ``fla``. Importing this module imports the library, so an import error occurs before anything is built."""

from __future__ import annotations

from attnplug import BackendContext
from attnplug.kernels import import_library
from attnplug.linear import PlannedBackend
from attnplug_hybrid_linear.fla_kernels import FlaKernels
from attnplug_hybrid_linear.plugin import LIBRARY

import_library(FlaKernels, LIBRARY)


def fla(context: BackendContext) -> PlannedBackend:
    """Build the backend; the spec's factory."""
    from attnplug_hybrid_linear.fla_backend import FlaLinearBackend  # not at the top: its module requires Triton

    return FlaLinearBackend(context)
