"""Variable-length batches: lengths and state slots → row offsets for kernels.

Eager batches are planned from host lengths. Captured extends are planned on the device, within fixed memory.
"""

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
    a sequence. ``rows`` is the total number of rows, ``longest`` the maximum length; of a captured extend, both are the
    captured rows. ``captured``: the device refills the tensors, and sequences may be empty.
    """

    starts: Tensor
    lens: Tensor
    slots: Tensor
    rows: int
    longest: int
    numbers: Tensor | None = None
    captured: bool = False

    def first(self, tokens: Tensor) -> VarlenBatch:
        """Return the batch truncated to the first ``tokens`` ``[requests]`` rows of each request."""
        tokens = tokens if self.numbers is None else tokens[self.numbers]
        return replace(self, lens=torch.minimum(self.lens, tokens))

    def divide(self, sequences: int, rows: int) -> tuple[VarlenBatch, VarlenBatch]:
        """Return the first ``sequences``, which have ``rows`` rows, and the others. ``starts`` stay those of the batch.

        Neither has ``numbers``: use the whole batch for tensors by request.
        """
        ends = slice(sequences), slice(sequences, None)
        first, others = (
            replace(self, starts=self.starts[part], lens=self.lens[part], slots=self.slots[part], numbers=None)
            for part in ends
        )
        return replace(first, rows=rows), replace(others, rows=self.rows - rows)


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


class CapturedVarlen:
    """Fixed memory of a captured extend: ``rows`` rows of up to ``requests`` requests, refilled on the device.

    The last sequence has the padding rows and slot -1, so kernels write zeros there, as for a padded request. There are
    as many ``blocks`` as any lengths need; surplus blocks lie behind the last sequence's end, and kernels mask them.
    ``cu_seqlens`` ``[requests + 2]`` are the row offsets, ``indices`` ``[blocks, 2]`` the blocks as pairs, all int64.
    """

    def __init__(self, requests: int, rows: int, size: int, device: torch.device) -> None:
        sequences = requests + 1
        count = (rows + (size - 1) * min(sequences, rows)) // size
        self.cu_seqlens = torch.zeros(sequences + 1, dtype=torch.int64, device=device)
        self.indices = torch.zeros(count, 2, dtype=torch.int64, device=device)
        lens, slots = torch.zeros(2, sequences, dtype=torch.int64, device=device).unbind()
        slots.fill_(-1)
        self.batch = VarlenBatch(self.cu_seqlens[:-1], lens, slots, rows, rows, captured=True)
        sequence, place = torch.zeros(2, count, dtype=torch.int64, device=device).unbind()
        self.blocks = VarlenBlocks(sequence, place, size)
        self._numbers = torch.arange(count, device=device)

    def refill(self, new_lens: Tensor, state_slots: Tensor) -> None:
        """Update all tensors from ``new_lens`` and ``state_slots`` ``[requests]`` on the device."""
        lens, blocks = self.batch.lens, self.blocks
        lens[:-1] = new_lens
        lens[-1] = self.batch.rows - new_lens.sum()
        self.batch.slots[:-1] = state_slots
        torch.cumsum(lens, 0, out=self.cu_seqlens[1:])
        ends = ((lens + (blocks.size - 1)) // blocks.size).cumsum(0)
        sequence = torch.searchsorted(ends, self._numbers, right=True).clamp_(max=lens.shape[0] - 1)
        first = torch.nn.functional.pad(ends, (1, -1))
        blocks.sequence.copy_(sequence)
        torch.sub(self._numbers, first[sequence], out=blocks.place)
        torch.stack([blocks.sequence, blocks.place], 1, out=self.indices)


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its last stride is not 1. Kernels take any other strides."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
