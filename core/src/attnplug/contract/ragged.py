"""Attention over rows that are at hand instead of in the cache: the calls of MLA prefill as MHA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug.declare.errors import PlanError
from attnplug.machine.transfer import to_device


@dataclass(frozen=True, slots=True, eq=False)
class RaggedCall:
    """The lengths of one call, prepared once per batch and the same for every layer.

    Sequence i has ``query_lens[i]`` query rows and ``kv_lens[i]`` key rows, none of them empty; rows of all sequences
    follow each other. With ``causal`` the last query sees the last key and each one before it one key less. ``index``
    tells the calls of one batch apart, so that a backend that plans finds its plan. ``query_indptr`` and ``kv_indptr``
    ``[sequences + 1]`` int32 are on the device. ``lane`` is the batch's: a backend that plans nothing finds its scratch
    memory by it.
    """

    index: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    query_indptr: Tensor
    kv_indptr: Tensor
    lane: int = 0

    @classmethod
    def of(
        cls,
        index: int,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        *,
        causal: bool,
        device: torch.device,
        lane: int = 0,
    ) -> RaggedCall:
        if len(query_lens) != len(kv_lens):
            raise PlanError(f"a call has {len(query_lens)} lengths of queries and {len(kv_lens)} of keys; give as many")
        query_indptr, kv_indptr = (
            to_device(list(accumulate(lens, initial=0)), device, np.int32) for lens in (query_lens, kv_lens)
        )
        return cls(index, tuple(query_lens), tuple(kv_lens), causal, query_indptr, kv_indptr, lane)

    @property
    def query_rows(self) -> int:
        return sum(self.query_lens)

    @property
    def kv_rows(self) -> int:
        return sum(self.kv_lens)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Refuse rows that are not those of this call: kernels trust its lengths."""
        rows = (q.shape[0], k.shape[0], v.shape[0])
        if rows != (self.query_rows, self.kv_rows, self.kv_rows):
            raise PlanError(
                f"call {self.index} is of {self.query_rows} query rows and {self.kv_rows} of keys and values, but q, k "
                f"and v have {rows[0]}, {rows[1]} and {rows[2]}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One ragged call of an MLA extend.

    ``slots`` ``[rows]`` are the cache rows to read and up-project; ``None`` means the new rows, which are at hand.
    ``rows`` ``[queries]`` are the query rows that take part; ``None`` means all of them.
    """

    call: RaggedCall
    slots: Tensor | None
    rows: Tensor | None
