"""Lengths and state slots → spans of rows: all that a kernel needs to know of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from attnplug.kernels import spread, to_device


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The rows of requests that have any, one span per request. All tensors are on the device, ``[spans]`` int64.

    A span's rows advance the state at its slot, one after the other. A negative slot marks a padded request, whose rows
    give zero. ``numbers`` says which request of the batch each span is; it is ``None`` if every request has a span.
    ``rows`` and ``longest`` are over all spans.
    """

    starts: Tensor
    lens: Tensor
    slots: Tensor
    rows: int
    longest: int
    numbers: Tensor | None = None

    def first(self, tokens: Tensor) -> Spans:
        """The same, with at most ``tokens`` ``[requests]`` of each request's rows."""
        tokens = tokens if self.numbers is None else tokens[self.numbers]
        return replace(self, lens=torch.minimum(self.lens, tokens))


def plan_spans(query_lens: Sequence[int], state_slots: Tensor) -> Spans:
    """Spans from each request's new tokens, on the host; ``state_slots`` ``[requests]`` is on the device."""
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
    """Spans cut into blocks of up to ``size`` rows: for each of ``[blocks]``, its span and its place in the span."""

    span: Tensor
    place: Tensor
    size: int


def cut(query_lens: Sequence[int], size: int, device: torch.device) -> Blocks:
    """The blocks of all spans, in order. Empty requests have no span."""
    counts = [-(-tokens // size) for tokens in query_lens if tokens]
    return Blocks(*spread([0] * len(counts), counts, device), size)


def with_plain_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with contiguous rows: kernels take any stride between rows and heads, but none within a
    row."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
