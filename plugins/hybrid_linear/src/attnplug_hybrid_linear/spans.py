"""Lengths and state slots → spans of rows: all that a kernel has to know of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from attnplug import to_device
from attnplug.host import spread


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The rows of requests that have any, one span a request. All tensors are on the device, ``[spans]`` int64.

    A span's rows go in turn through the state at its slot; a slot below zero is a padded request's, whose rows give
    zero. ``numbers`` says which request of the batch each span is, or is ``None`` where all are there. ``rows`` and
    ``longest`` are of all spans together.
    """

    starts: Tensor
    lens: Tensor
    slots: Tensor
    rows: int
    longest: int
    numbers: Tensor | None = None

    def first(self, tokens: Tensor) -> Spans:
        """The same with no more of each request's rows than ``tokens`` ``[requests]`` says."""
        tokens = tokens if self.numbers is None else tokens[self.numbers]
        return replace(self, lens=torch.minimum(self.lens, tokens))


def plan_spans(query_lens: Sequence[int], state_slots: Tensor) -> Spans:
    """From the new tokens of each request, on the host; ``state_slots`` ``[requests]`` is on the device."""
    device, rows = state_slots.device, sum(query_lens)
    firsts = list(accumulate(query_lens, initial=0))[:-1]
    numbers = [number for number, tokens in enumerate(query_lens) if tokens]
    if len(numbers) == len(query_lens):
        starts, lens = to_device([firsts, query_lens], device).unbind()
        return Spans(starts, lens, state_slots, rows, max(query_lens, default=0))
    kept = [[firsts[number] for number in numbers], [query_lens[number] for number in numbers], numbers]
    starts, lens, members = to_device(kept, device).unbind()
    return Spans(starts, lens, state_slots[members], rows, max(query_lens, default=0), members)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Spans cut into blocks of ``size`` rows, the last of each shorter: ``[blocks]``, a block's span and its place."""

    span: Tensor
    place: Tensor
    size: int


def cut(query_lens: Sequence[int], size: int, device: torch.device) -> Blocks:
    """The blocks of all spans, in order; those of empty requests are no spans."""
    counts = [-(-tokens // size) for tokens in query_lens if tokens]
    return Blocks(*spread([0] * len(counts), counts, device), size)


def with_plain_rows(tensor: Tensor) -> Tensor:
    """Kernels step over rows and heads by any stride, but walk a row by ones."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
