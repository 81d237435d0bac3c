"""Factories of the specs.

Importing this module imports FlashMLA, so an import error occurs before anything is built.
"""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_flashmla.backend import FlashMLABackend
from attnplug_flashmla.kernels import load_library
from attnplug_flashmla.plugin import LIBRARY
from attnplug_flashmla.sparse_backend import SparseFlashMLABackend

__all__ = ["FlashMLABackend", "SparseFlashMLABackend"]

import_library(load_library, LIBRARY)
