"""Names for engines and bridges: selecting and building backends, KV pools, and the facade that a model calls."""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
