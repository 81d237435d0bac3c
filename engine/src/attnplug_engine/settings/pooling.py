"""Pooling of hidden states to an embedding."""

from __future__ import annotations

from enum import StrEnum

from attnplug import UsageError


class Pooling(StrEnum):
    """Pooling of a prompt's final hidden states (after the last norm) to one vector."""

    LAST = "last"
    """The last token's state, which is the only one that attends to all tokens."""
    MEAN = "mean"
    """The mean over all tokens."""
    FIRST = "first"
    """The first token's state (CLS)."""

    @classmethod
    def parse(cls, text: str, option: str) -> Pooling:
        """Parse a user's spelling; ``option`` names its origin in the error."""
        if text not in list(cls):
            raise UsageError(f"{option} {text!r} is unknown; use one of {', '.join(cls)}")
        return cls(text)
