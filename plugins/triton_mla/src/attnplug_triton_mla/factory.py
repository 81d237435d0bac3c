"""Factory of the spec. Importing this module imports Triton, so an import error occurs before anything is built."""

from __future__ import annotations

from importlib import import_module

from attnplug import AttentionBackend, BackendContext
from attnplug.kernels import import_library
from attnplug_triton_mha.plugin import LIBRARY

import_library(lambda: import_module("triton.language"), LIBRARY)


def triton_mla(context: BackendContext) -> AttentionBackend:
    """Build the backend; the spec's factory."""
    from attnplug_triton_mla.backend import TritonMLABackend  # not at the top: its module requires Triton

    return TritonMLABackend(context)
