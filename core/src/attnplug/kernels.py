"""Names for authors of kernels, pools and devices: checks, host-device transfers, row pools, torch attention."""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
