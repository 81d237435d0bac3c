"""Fixtures that several files of core's tests use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for core/tests/support

from attnplug_testing.plugins import core_alone, install, install_source, only_fault
from support.board import board

__all__ = ["board", "core_alone", "install", "install_source", "only_fault"]
