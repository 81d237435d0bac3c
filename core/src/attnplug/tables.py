"""Names for plugins that ship measured tables, or direct library calls for ``attnplug bench``."""

from attnplug._exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__)
