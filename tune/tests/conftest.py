"""Fixtures of attnplug-tune's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test files share

from attnplug_testing.plugins import core_alone, install

__all__ = ["core_alone", "install"]
