"""What a user can set, as ``flashmla_sparse.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IndexKernel = Literal["own", "deep_gemm"]


@dataclass(frozen=True, slots=True)
class SparseOptions:
    index_kernel: IndexKernel = "own"
    """Kernel that scores index keys: attnplug-sparse's, or DeepGEMM's, which takes queries and keys in fp8."""
