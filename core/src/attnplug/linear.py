"""Names for linear-attention backends: base class, hooks, inputs, layer dimensions and the state pool."""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
