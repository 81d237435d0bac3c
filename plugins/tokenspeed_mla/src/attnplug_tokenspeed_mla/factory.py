"""The factory of the spec. Its libraries are imported with this module: if one fails, nothing has been built yet."""

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
