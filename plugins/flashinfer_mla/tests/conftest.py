"""Puts this folder on the path, whose modules the tests share, and names the fixture of several of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from recorded_library import library

__all__ = ["library"]
