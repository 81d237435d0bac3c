"""Names for authors of kernels and pools: checks, host-device transfers, row pools, and torch attention by parts."""

from __future__ import annotations

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
