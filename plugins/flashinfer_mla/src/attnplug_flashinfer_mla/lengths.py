"""Sequence lengths of one call in FlashInfer's CSR format."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CallLengths:
    """``qo_indptr`` and ``kv_indptr`` ``[requests + 1]``, ``kv_lens`` ``[requests]``; int32, all on host or device.

    ``qo_indptr`` are row offsets, ``kv_indptr`` offsets into the page indices.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> CallLengths:
        """Return views of ``numbers`` ``[3 * requests + 2]``, the three arrays concatenated."""
        requests = (numbers.shape[0] - 2) // 3
        return cls(numbers[: requests + 1], numbers[requests + 1 : 2 * requests + 2], numbers[2 * requests + 2 :])
