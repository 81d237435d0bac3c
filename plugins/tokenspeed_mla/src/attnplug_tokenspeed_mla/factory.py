"""Factory of the spec. Importing this module imports its libraries: an import error occurs before anything is built."""

from __future__ import annotations

from attnplug.kernels import import_library
from attnplug_tokenspeed_mla.build import tokenspeed_mla
from attnplug_tokenspeed_mla.kernels import load_library
from attnplug_tokenspeed_mla.plugin import LIBRARY
from attnplug_trtllm_mla import blackwell
from attnplug_trtllm_mla.kernels import load_library as load_flashinfer

__all__ = ["tokenspeed_mla"]

import_library(load_library, LIBRARY)
import_library(load_flashinfer, blackwell.LIBRARY)  # the fallback's
