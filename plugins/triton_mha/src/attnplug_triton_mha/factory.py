"""The factory of the spec. Triton is imported with this module: if that fails, nothing has been built yet."""

from __future__ import annotations

from importlib import import_module

from attnplug import AttentionBackend, BackendContext
from attnplug.kernels import import_library
from attnplug_triton_mha.plugin import LIBRARY

import_library(lambda: import_module("triton.language"), LIBRARY)


def triton_mha(context: BackendContext) -> AttentionBackend:
    from attnplug_triton_mha.backend import TritonMHABackend  # here: its kernels need Triton to be defined

    return TritonMHABackend(context)
