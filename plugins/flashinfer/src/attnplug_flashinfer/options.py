"""User options, set as ``flashinfer.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa2", "fa3"]


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    """Options of the ``flashinfer`` backend."""

    kernel: KernelName = "auto"
    """Prefill kernel. ``auto`` is fa3 on SM 90 with a 16-bit cache, otherwise fa2. Decode and verify always use fa2."""
