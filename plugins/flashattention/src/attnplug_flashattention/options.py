"""What a user can set, as ``flashattention.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa4", "fa2", "torch"]


@dataclass(frozen=True, slots=True)
class FlashAttentionOptions:
    kernel: KernelName = "auto"
    """``auto`` takes fa4 (flash-attn-4) where it is installed and supports the GPU. Otherwise it takes torch's own
    kernel, or ``fa2`` (flash-attn 2) for capped logits, which torch's kernel does not support."""
    most_parts: int = 0
    """The most parts into which fa4 divides a decoded request's cache; 0 lets a rule decide, 1 never divides."""

    def __post_init__(self) -> None:
        if self.most_parts < 0:
            raise ValueError(f"most_parts={self.most_parts} is negative; give 1 to never divide, or 0 for the rule")
