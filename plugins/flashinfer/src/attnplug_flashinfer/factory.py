"""The factory of the spec. FlashInfer is imported with this module: if that fails, nothing has been built yet."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.kernels import load_library
from attnplug_flashinfer.plugin import LIBRARY

__all__ = ["FlashInferBackend"]

import_library(load_library, LIBRARY)
