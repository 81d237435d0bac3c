"""Errors of the bridge."""

from __future__ import annotations

from attnplug.host import AttnplugError


class BridgeError(AttnplugError):
    """A call from transformers that the bridge or the selected backends do not support."""


class UnknownNameError(BridgeError, ValueError):
    """A misspelled ``attn_implementation="attnplug:NAME"``. A ValueError, as transformers raises for other names."""
