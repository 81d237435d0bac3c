"""Forward modes."""

from __future__ import annotations

from enum import StrEnum


class ForwardMode(StrEnum):
    """Kind of forward pass that a batch needs."""

    EXTEND = "extend"
    """New tokens of each request, behind a cached prefix (or none)."""
    DECODE = "decode"
    """One new token per request."""
    MIXED = "mixed"
    """Extending and decoding requests in one batch. A decoding request extends by one token."""
    IDLE = "idle"
    """No request: this rank only takes part in collectives."""
    TARGET_VERIFY = "target_verify"
    """The target model verifies the tokens that a draft proposed."""
    DRAFT_EXTEND = "draft_extend"
    """The draft model catches up with the tokens that the target accepted."""

    @property
    def is_decode(self) -> bool:
        """True if ``forward_decode`` runs this mode; ``forward_extend`` runs all others."""
        return self is ForwardMode.DECODE
