"""For all tests: what this machine's user measured must not decide what a test sees."""

from __future__ import annotations

import os
import tempfile

_nowhere = tempfile.TemporaryDirectory(prefix="attnplug-cache-")
os.environ["ATTNPLUG_CACHE_DIR"] = _nowhere.name
os.environ.pop("ATTNPLUG_TABLES", None)
