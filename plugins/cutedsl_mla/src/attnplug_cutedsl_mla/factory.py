"""Factory of the spec. Importing this module imports FlashInfer, so an import error occurs before anything is built."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_cutedsl_mla.build import cutedsl_mla
from attnplug_trtllm_mla.blackwell import LIBRARY
from attnplug_trtllm_mla.kernels import load_library

__all__ = ["cutedsl_mla"]

import_library(load_library, LIBRARY)
