"""What the bridge refuses."""

from __future__ import annotations

from attnplug.host import AttnplugError


class BridgeError(AttnplugError):
    """transformers asked for something that no backend can be given, or that the bridge cannot tell apart from it."""
