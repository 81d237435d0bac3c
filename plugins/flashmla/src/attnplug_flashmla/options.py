"""User options, set as ``flashmla_sparse.NAME=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

IndexKernel = Literal["own", "deep_gemm"]


@dataclass(frozen=True, slots=True)
class SparseOptions:
    """Options of the ``flashmla_sparse`` backend."""

    index_kernel: IndexKernel = "own"
    """Kernel that scores index keys: ``own`` (attnplug's), or ``deep_gemm``, which takes fp8 queries and keys."""
