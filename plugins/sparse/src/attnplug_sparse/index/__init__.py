"""Index of sparse layers: scores of all visible cache rows and their top-k, for any backend (A10)."""

from __future__ import annotations

from attnplug_sparse.index.index_plan import IndexPlan
from attnplug_sparse.index.sparse_index import ScoreInputs, ScoreKernel, SparseIndex

__all__ = ["IndexPlan", "ScoreInputs", "ScoreKernel", "SparseIndex"]
