"""What a user can set, as ``flashattention.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa4", "fa2", "torch"]


@dataclass(frozen=True, slots=True)
class FlashAttentionOptions:
    kernel: KernelName = "auto"
    """``auto`` is fa4 (flash-attn-4) where it is installed and made for the GPU, else torch's own kernel, or ``fa2``
    (flash-attn 2) for capped logits, which torch's has not."""
    most_parts: int = 0
    """The most parts into which fa4 divides a decoded request's cache; 0 leaves it to a rule, 1 never divides."""

    def __post_init__(self) -> None:
        if self.most_parts < 0:
            raise ValueError(f"most_parts={self.most_parts} is negative; give 1 to never divide, or 0 for the rule")
