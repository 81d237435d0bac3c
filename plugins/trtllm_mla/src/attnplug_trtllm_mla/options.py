"""What a user can set, as ``trtllm_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TRTLLMMLAOptions:
    workspace_mib: int = 128
    """Scratch memory of the kernels and of the fallback's, shared with every backend that asks for the same kind."""

    def __post_init__(self) -> None:
        if self.workspace_mib < 1:
            raise ValueError(f"workspace_mib={self.workspace_mib} holds nothing; give 1 or more")
