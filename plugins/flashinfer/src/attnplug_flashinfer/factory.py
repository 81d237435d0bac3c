"""Factory of the spec. Importing this module imports FlashInfer, so an import error occurs before anything is built."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_flashinfer.backend import FlashInferBackend
from attnplug_flashinfer.kernels import load_library
from attnplug_flashinfer.plugin import LIBRARY

__all__ = ["FlashInferBackend"]

import_library(load_library, LIBRARY)
