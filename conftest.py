"""Process settings for all tests, in any environment: the user's files stay out of them, torch runs on one thread and
with the fastest library for small matrices, and garbage collection skips imported modules and collected tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator

import pytest
import torch

# Until the process ends, not until this module is collected: tests of the kit's own plugin load it once more.
_nowhere = tempfile.mkdtemp(prefix="attnplug-cache-")
atexit.register(shutil.rmtree, _nowhere, ignore_errors=True)
os.environ["ATTNPLUG_CACHE_DIR"] = _nowhere  # measured tables
os.environ.pop("ATTNPLUG_TABLES", None)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: a third of their CPU time


def _onednn_only_slows() -> bool:
    """On Arm without bfloat16: 16 rows by a small matrix take oneDNN 15 times as long as OpenBLAS."""
    here = torch.backends.mkldnn.is_available() and not torch.backends.mkl.is_available()
    return here and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


torch.set_num_threads(1)  # two test processes on two cores: one thread each is fastest
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


@pytest.fixture(autouse=True)
def _kernels_are_compiled_when_launched(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """Start no recording process for each of the many small engines of a GPU's tests."""
    on_gpu = "attnplug_engine.engine" in sys.modules and torch.cuda.is_available()
    if not on_gpu or request.path.stem == "test_compile_ahead":
        yield
        return
    from attnplug_engine.execution.compile_ahead import AheadReport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnplug_engine.engine.compile_ahead", lambda *_: AheadReport())
        yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what Triton has made is counted when the process ends
