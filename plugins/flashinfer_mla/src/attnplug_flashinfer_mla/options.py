"""What a user can set, as ``flashinfer_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa2", "fa3", "cutlass"]


@dataclass(frozen=True, slots=True)
class FlashInferMLAOptions:
    workspace_mib: int = 128
    """Scratch memory of the kernels, shared with every backend that asks for the same kind."""
    disable_ragged: bool = False
    """Never prefill as MHA: every extend runs absorbed, over the paged cache."""
    kernel: KernelName = "auto"
    """``auto`` is fa3 on SM 90 and fa2 elsewhere. ``cutlass`` decodes on SM 100 to 110 and leaves the rest to fa2."""

    def __post_init__(self) -> None:
        if self.workspace_mib < 1:
            raise ValueError(f"workspace_mib={self.workspace_mib} holds nothing; give 1 or more")
