"""Errors of the bridge."""

from __future__ import annotations

from attnplug.host import AttnplugError


class BridgeError(AttnplugError):
    """A call from transformers that the bridge or the selected backends do not support."""


class UnknownNameError(BridgeError, ValueError):
    """A misspelled ``attn_implementation="attnplug:NAME"``. A ValueError, as transformers raises for other names."""


class MaskError(BridgeError, AttributeError):
    """A model that reads a mask itself. An AttributeError, as for any attribute that a mask does not have."""

    def __init__(self, read: str) -> None:
        super().__init__(
            f"the model reads its attention mask ({read}), but backends derive the visible tokens from lengths and "
            "there is no mask; use attn_implementation='eager'"
        )


class OwnAttentionError(BridgeError, ValueError):
    """A model that does not call attention through transformers' interface."""
