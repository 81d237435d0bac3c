"""transformers bridge. Import it, then load a model with ``attn_implementation="attnplug:NAME"``."""

from __future__ import annotations

from attnplug_transformers.cache import PagedCache
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.registration import (
    check_version,
    continuous_batching,
    list_names_in_errors,
    register,
    register_installed,
)

check_version()
register_installed()
list_names_in_errors()

__all__ = ["BridgeError", "PagedCache", "continuous_batching", "register"]
