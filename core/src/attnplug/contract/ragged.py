"""Ragged calls of an MLA prefill as MHA: attention over rows passed as arguments instead of cache rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug.declare.errors import PlanError
from attnplug.machine.runtime import to_device


@dataclass(frozen=True, slots=True, eq=False)
class RaggedCall:
    """Lengths of one call, prepared once per batch and equal in every layer.

    Sequence i has ``query_lens[i]`` query rows and ``kv_lens[i]`` key rows, neither zero; rows of all sequences are
    concatenated. With ``causal``, the last query attends to all keys of its sequence, and each query to one key less
    than the next. ``index`` is the number of the call within its batch, by which a backend finds its plan.
    ``query_indptr`` and ``kv_indptr`` ``[sequences + 1]`` int32 are on the device. ``lane`` is the batch's. A backend
    without a plan finds its scratch memory by it.

    ``padded_rows`` are the rows of q, k and v in a captured call. Only the device knows its lengths: those on the host
    are empty. Sequences may have no rows, and rows behind the last sequence are padding, whose output is zero.
    """

    index: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    causal: bool
    query_indptr: Tensor
    kv_indptr: Tensor
    lane: int = 0
    padded_rows: int | None = None

    @classmethod
    def captured(cls, requests: int, rows: int, *, device: torch.device, lane: int = 0) -> RaggedCall:
        """A captured call over the new rows of an extend without prefixes. ``refill`` gives it their lengths."""
        indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        return cls(0, (), (), True, indptr, indptr, lane, rows)

    def refill(self, new_lens: Tensor) -> None:
        """Update a captured call by ``new_lens`` ``[requests]`` on the device."""
        torch.cumsum(new_lens, 0, dtype=torch.int32, out=self.query_indptr[1:])

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
            raise PlanError(
                f"a call has {len(query_lens)} query lengths and {len(kv_lens)} key lengths; give equally many"
            )
        query_indptr, kv_indptr = (
            to_device(list(accumulate(lens, initial=0)), device, np.int32) for lens in (query_lens, kv_lens)
        )
        return cls(index, tuple(query_lens), tuple(kv_lens), causal, query_indptr, kv_indptr, lane)

    @property
    def query_rows(self) -> int:
        return sum(self.query_lens) if self.padded_rows is None else self.padded_rows

    @property
    def kv_rows(self) -> int:
        return sum(self.kv_lens) if self.padded_rows is None else self.padded_rows

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise PlanError unless q, k and v have the rows of this call. Kernels do not check lengths."""
        rows = (q.shape[0], k.shape[0], v.shape[0])
        if rows != (self.query_rows, self.kv_rows, self.kv_rows):
            raise PlanError(
                f"call {self.index} has {self.query_rows} query rows and {self.kv_rows} key and value rows, but q, k "
                f"and v have {rows[0]}, {rows[1]} and {rows[2]}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One ragged call of an MLA extend.

    ``slots`` ``[rows]`` are the slots of the cache rows to read and up-project; ``None`` means the new rows, which are
    passed as arguments. ``rows`` ``[queries]`` are the participating query rows; ``None`` means all of them.
    """

    call: RaggedCall
    slots: Tensor | None
    rows: Tensor | None
