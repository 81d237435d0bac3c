"""Contract types of sparse and compressed MLA layers, and the coordinator protocol."""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
