"""What a user can set, as ``flashinfer.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["auto", "fa2", "fa3"]


@dataclass(frozen=True, slots=True)
class FlashInferOptions:
    kernel: KernelName = "auto"
    """What prefills. ``auto`` is fa3 on SM 90 for a cache of 16 bits, and otherwise fa2, which decodes and verifies in
    every case."""
