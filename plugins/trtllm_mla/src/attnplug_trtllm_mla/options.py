"""User options, set as ``trtllm_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TRTLLMMLAOptions:
    """Options of the ``trtllm_mla`` backend."""

    workspace_mib: int = 128
    """Scratch memory of the kernels and the fallback in MiB, shared with all backends that request the same kind."""

    def __post_init__(self) -> None:
        if self.workspace_mib < 1:
            raise ValueError(f"workspace_mib={self.workspace_mib} is too small; set 1 or more")
