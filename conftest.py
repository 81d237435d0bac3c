"""For all tests: nothing of this machine's user decides what a test sees, and garbage collection leaves alone what was
collected."""

from __future__ import annotations

import gc
import os
import tempfile

_nowhere = tempfile.TemporaryDirectory(prefix="attnplug-cache-")
os.environ["ATTNPLUG_CACHE_DIR"] = _nowhere.name  # measured tables
os.environ.pop("ATTNPLUG_TABLES", None)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
