"""transformers bridge. Import it, then load a model with ``attn_implementation="attnplug:NAME"``."""

from __future__ import annotations

from attnplug_transformers.cache import PagedCache
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.registration import (
    check_names,
    check_version,
    continuous_batching,
    register,
    register_installed,
)

check_version()
register_installed()
check_names()

__all__ = ["BridgeError", "PagedCache", "continuous_batching", "register"]
