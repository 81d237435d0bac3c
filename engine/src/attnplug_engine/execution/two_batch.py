"""Two-batch overlap: a batch runs as two halves, layer by layer, each with a plan and a lane of its own.

While one half waits for a collective or for the last blocks of a kernel, the other one computes. Without such waits
nothing is gained, because each half reads all weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import ModelAttention
from attnplug.machine.runtime import runtime_of
from attnplug_engine.models.decoder import Decoder
from attnplug_engine.models.rope import Rotation

LANES = 2
"""Lanes of a backend whose batches run as halves."""
LEAST_SHARE = 0.48
"""Smallest share of a batch's rows in a half. If no request boundary allows it, a request is split."""

LEAST_ROWS = 12_288
"""Batches with fewer rows are not split on a GPU. Two halves are twice the launches, and with fewer rows the host needs
longer for these than the GPU for its work (``benchmarks/two_batch_h200.py``)."""

_WHOLE_REQUESTS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Split point of a batch: behind ``requests`` requests and ``rows`` new rows of the next one."""

    requests: int
    rows: int = 0


def split_point(geometry: Geometry) -> BatchSplit | None:
    """Return the split into the most equal halves; None for a batch that is not split.

    Not split are: a batch that is too small, one whose row counts the host does not know, one that a graph reads from
    static memory, and a verify with linear states, which are committed by the plan of the whole batch.
    """
    verifies_states = geometry.mode is ForwardMode.TARGET_VERIFY and geometry.state_slots is not None
    if geometry.captured or verifies_states:
        return None
    if geometry.host is not None:
        counts: Sequence[int] = geometry.host.query_lens
    elif geometry.new_lens is None:
        counts = [geometry.max_new] * geometry.requests
    else:
        return None
    if geometry.mode in _WHOLE_REQUESTS:
        live = sum(count > 0 for count in counts)  # padded requests come last
        return BatchSplit(live // 2) if live > 1 else None
    starts = list(accumulate(counts, initial=0))
    total = starts[-1]
    if total < 2:
        return None
    border = min(range(len(starts)), key=lambda request: abs(2 * starts[request] - total))
    if min(starts[border], total - starts[border]) >= LEAST_SHARE * total:
        return BatchSplit(border)
    middle = total // 2
    request = bisect_right(starts, middle) - 1
    return BatchSplit(request, middle - starts[request])


class TwoBatch:
    """Runs the halves of batches, for one model. On a GPU the second half has its own stream.

    In every layer the second half follows the first. So a split request finds the cache rows and linear states of its
    first rows, and on a GPU the second half's layer runs beside the first half's next layer. Batches of fewer than
    ``least_rows`` rows are not split.
    """

    def __init__(self, model: Decoder, attention: ModelAttention, device: torch.device) -> None:
        self._model, self._attention, self._device = model, attention, device
        self._module = runtime_of(device).module
        self._stream = None if self._module is None else self._module.Stream(device)
        self.least_rows = 0 if self._stream is None else LEAST_ROWS

    def halves(self, batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch] | None:
        """Return both halves, planned and marked; None for a batch that is not split, e.g. one that is planned
        already."""
        if not batch.needs_forward_metadata_init() or batch.geometry.rows < self.least_rows:
            return None
        split = split_point(batch.geometry)
        if split is None:
            return None
        halves = batch.split(split.requests, lanes=(0, 1), cut=split.rows)
        self._attention.plan_halves(batch, halves)
        return halves

    def forward(self, halves: tuple[ForwardBatch, ForwardBatch]) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of the whole batch, in its order."""
        self._follow()  # plans and earlier cache writes
        try:
            with self._attention.running():
                parts = self._run(*halves)
        finally:  # memory that the second half reads must outlive it
            if self._stream is not None:
                self._module.current_stream(self._device).wait_stream(self._stream)
        return torch.cat(parts)

    def _run(self, first: ForwardBatch, second: ForwardBatch) -> tuple[Tensor, Tensor]:
        early, early_rotation = self._begin(first)
        with self._aside():
            late, late_rotation = self._begin(second)
        for layer in self._model.layers:
            early = layer(early, early_rotation, first)
            self._follow()
            with self._aside():
                late = layer(late, late_rotation, second)
        with self._aside():
            late = self._model.end(late)
        return self._model.end(early), late

    def _begin(self, half: ForwardBatch) -> tuple[Tensor, Rotation]:
        assert half.input_ids is not None and half.positions is not None
        return self._model.begin(half.input_ids, half.positions)

    def _follow(self) -> None:
        """Make the second half's stream wait for what the first half's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self._device))

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._module.stream(self._stream)
