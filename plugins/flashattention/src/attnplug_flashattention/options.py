"""User options, set as ``flashattention.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa4", "fa2", "torch"]


@dataclass(frozen=True, slots=True)
class FlashAttentionOptions:
    """Options of the ``flashattention`` backend."""

    kernel: KernelName = "auto"
    """``auto`` is fa4 (flash-attn-4) if it is installed and supports the GPU.

    Otherwise it is torch's kernel, or ``fa2`` (flash-attn 2) for capped logits, which torch's kernel does not support.
    """
    most_parts: int = 0
    """Maximum KV splits of a decoded request with fa4: 0 chooses by a cost model, 1 disables split-KV."""

    def __post_init__(self) -> None:
        if self.most_parts < 0:
            raise ValueError(
                f"most_parts={self.most_parts} is negative; set 1 to disable split-KV, or 0 for the cost model"
            )
