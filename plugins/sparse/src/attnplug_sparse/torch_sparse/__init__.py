"""Reference backend for sparse and compressed MLA in plain torch, on CPU and CUDA."""

from __future__ import annotations

from attnplug_sparse.torch_sparse.backend import TorchSparseBackend

__all__ = ["TorchSparseBackend"]
