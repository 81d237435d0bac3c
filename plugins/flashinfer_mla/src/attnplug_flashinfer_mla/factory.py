"""Factory of the spec. Importing this module imports FlashInfer, so an import error occurs before anything is built."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.kernels import load_library
from attnplug_flashinfer_mla.plugin import LIBRARY

__all__ = ["FlashInferMLABackend"]

import_library(load_library, LIBRARY)
