"""User options, set as ``flashinfer_mla.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa2", "fa3", "cutlass"]


@dataclass(frozen=True, slots=True)
class FlashInferMLAOptions:
    """Options of the ``flashinfer_mla`` backend."""

    workspace_mib: int = 128
    """Scratch memory of the kernels in MiB, shared with all backends that request the same kind."""
    disable_ragged: bool = False
    """Never prefill as MHA: every extend runs absorbed, over the paged cache."""
    kernel: KernelName = "auto"
    """``auto`` is fa3 on SM 90 and fa2 elsewhere. ``cutlass`` decodes on SM 100–110; fa2 runs other batches."""

    def __post_init__(self) -> None:
        if self.workspace_mib < 1:
            raise ValueError(f"workspace_mib={self.workspace_mib} is too small; set 1 or more")
