"""Backends made of backends, all on one forwarding base."""

from attnplug.wrappers.forwarding import ForwardingBackend, who_forced
from attnplug.wrappers.hybrid import HybridLinearBackend
from attnplug.wrappers.split import SplitBackend

__all__ = ["ForwardingBackend", "HybridLinearBackend", "SplitBackend", "who_forced"]
