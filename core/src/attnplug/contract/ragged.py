"""Attention over rows that are at hand instead of in the cache: the calls of MLA prefill as MHA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

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


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One ragged call of an MLA extend.

    ``slots`` ``[rows]`` are the cache rows to read and up-project; ``None`` means the new rows, which are at hand.
    ``rows`` ``[queries]`` are the query rows that take part; ``None`` means all of them.
    """

    call: RaggedCall
    slots: Tensor | None
    rows: Tensor | None
