"""What a batch asks of attention."""

from __future__ import annotations

from enum import StrEnum


class ForwardMode(StrEnum):
    """What a batch asks of attention."""

    EXTEND = "extend"
    """New tokens of each request, after a prefix that is in the cache (or none)."""
    DECODE = "decode"
    """One new token per request."""
    MIXED = "mixed"
    """Extending and decoding requests in one batch; a decoding one extends by a single token."""
    IDLE = "idle"
    """No request: this rank only takes part in collectives."""
    TARGET_VERIFY = "target_verify"
    """The target model checks the tokens that a draft proposed."""
    DRAFT_EXTEND = "draft_extend"
    """The draft model catches up with the tokens that the target accepted."""

    @property
    def is_decode(self) -> bool:
        """Whether ``forward_decode`` runs it; every other mode runs by ``forward_extend``."""
        return self is ForwardMode.DECODE
