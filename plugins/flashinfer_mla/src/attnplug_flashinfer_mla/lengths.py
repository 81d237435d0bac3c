"""The lengths of one call, as FlashInfer takes them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The requests of one call: ``qo_indptr`` and ``kv_indptr`` ``[requests + 1]``, ``kv_lens`` ``[requests]``, int32.

    ``kv_indptr`` counts pages: where the indices of a request's pages begin.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> Lengths:
        """From the three, one after the other."""
        requests = (numbers.shape[0] - 2) // 3
        return cls(numbers[: requests + 1], numbers[requests + 1 : 2 * requests + 2], numbers[2 * requests + 2 :])
