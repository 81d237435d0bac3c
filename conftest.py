"""For all tests: nothing of this machine's user decides what a test sees, and garbage collection leaves alone what is
imported and collected. On some CPUs torch multiplies small matrices by another library."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest
import torch

# Until the process ends, not until this module is collected: tests of the kit's own plugin load it once more.
_nowhere = tempfile.mkdtemp(prefix="attnplug-cache-")
atexit.register(shutil.rmtree, _nowhere, ignore_errors=True)
os.environ["ATTNPLUG_CACHE_DIR"] = _nowhere  # measured tables
os.environ.pop("ATTNPLUG_TABLES", None)


def _onednn_only_slows() -> bool:
    """On Arm without bfloat16: 16 rows by a small matrix take oneDNN 15 times as long as OpenBLAS."""
    here = torch.backends.mkldnn.is_available() and not torch.backends.mkl.is_available()
    return here and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


if _onednn_only_slows():
    torch.backends.mkldnn.enabled = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what Triton has made is counted when the process ends
