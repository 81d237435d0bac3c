"""Variable-length batches: host lengths and state slots → row offsets for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from attnplug.kernels import spread, to_device


@dataclass(frozen=True, slots=True, eq=False)
class VarlenBatch:
    """Sequences of new rows, one per request that has any. All tensors are on the device, ``[sequences]`` int64.

    A sequence's rows (``lens`` rows from ``starts`` on) advance the state at its slot in order. A negative slot marks a
    padded request, whose output is zero. ``numbers`` are the sequences' request numbers; ``None`` if every request has
    a sequence. ``rows`` is the total number of rows, ``longest`` the maximum length.
    """

    starts: Tensor
    lens: Tensor
    slots: Tensor
    rows: int
    longest: int
    numbers: Tensor | None = None

    def first(self, tokens: Tensor) -> VarlenBatch:
        """Return the batch truncated to the first ``tokens`` ``[requests]`` rows of each request."""
        tokens = tokens if self.numbers is None else tokens[self.numbers]
        return replace(self, lens=torch.minimum(self.lens, tokens))


def plan_varlen(query_lens: Sequence[int], state_slots: Tensor) -> VarlenBatch:
    """Plan from new tokens per request, on the host, and ``state_slots`` ``[requests]``, on the device."""
    device, rows = state_slots.device, sum(query_lens)
    firsts = list(accumulate(query_lens, initial=0))[:-1]
    numbers = [number for number, tokens in enumerate(query_lens) if tokens]
    if len(numbers) == len(query_lens):
        starts, lens = to_device([firsts, query_lens], device).unbind()
        return VarlenBatch(starts, lens, state_slots, rows, max(query_lens, default=0))
    kept = [[firsts[number] for number in numbers], [query_lens[number] for number in numbers], numbers]
    starts, lens, members = to_device(kept, device).unbind()
    return VarlenBatch(starts, lens, state_slots[members], rows, max(query_lens, default=0), members)


@dataclass(frozen=True, slots=True, eq=False)
class VarlenBlocks:
    """Sequences split into blocks of up to ``size`` rows: sequence and index within it of each block, ``[blocks]``."""

    sequence: Tensor
    place: Tensor
    size: int


def split_blocks(query_lens: Sequence[int], size: int, device: torch.device) -> VarlenBlocks:
    """Return the blocks of all sequences, in order. Requests without tokens have none."""
    counts = [-(-tokens // size) for tokens in query_lens if tokens]
    return VarlenBlocks(*spread([0] * len(counts), counts, device), size)


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last stride is not 1. Kernels take any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
