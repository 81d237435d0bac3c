"""The factory of the spec. FlashInfer is imported with this module: if that fails, nothing has been built yet."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_trtllm_mla.blackwell import LIBRARY
from attnplug_trtllm_mla.build import trtllm_mla
from attnplug_trtllm_mla.kernels import load_library

__all__ = ["trtllm_mla"]

import_library(load_library, LIBRARY)
