"""Two-batch overlap: a batch runs as two halves, layer by layer, each with a plan and a lane of its own.

While one half waits for a collective or for the last blocks of a kernel, the other one computes. Without such waits
nothing is gained, because each half reads all weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from attnplug import ExtendPath, ForwardBatch, ForwardMode, Geometry, PlanError
from attnplug.contract.geometry import divide
from attnplug.host import HostLengths, ModelAttention
from attnplug.kernels import to_device
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
_INDIVISIBLE = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Modes in which no request is divided: one row cannot be, and a verify leaves no state for the rows that follow."""


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


def split_batch(
    batch: ForwardBatch, at: BatchSplit, lanes: tuple[int, int] = (0, 1)
) -> tuple[ForwardBatch, ForwardBatch]:
    """Divide a batch for two-batch overlap (B4). Both halves start unplanned; padding rows go to the second one.

    With ``at.rows``, the next request is in both halves: its first ``at.rows`` new rows in the first, the remaining
    ones in the second, where the former belong to the prefix. In each layer the second half then reads cache rows and
    states that the first one wrote, so it runs after it. A length that a subclass of the batch adds is left out then.
    """
    if not at.rows:
        return batch.split(at.requests, lanes)
    first, second = split_request(batch.geometry, at, lanes)
    lengths = dict.fromkeys(field.name for field in fields(batch) if field.metadata.get("split") == "length")
    earlier, _ = divide(batch, at.requests + 1, first.rows)
    _, later = divide(batch, at.requests, first.rows)
    kind = type(batch)
    return kind(**earlier | lengths | {"geometry": first}), kind(**later | lengths | {"geometry": second})


def split_request(geometry: Geometry, at: BatchSplit, lanes: tuple[int, int]) -> tuple[Geometry, Geometry]:
    """Divide a geometry behind ``at.rows`` new rows of request ``at.requests``; see :func:`split_batch`."""
    request, cut = at.requests, at.rows
    if geometry.new_lens is not None and geometry.host is None:
        raise PlanError("a ragged batch is split by exact lengths on the host; call with_host_lengths() first")
    lens = [geometry.max_new] * geometry.requests if geometry.new_lens is None else list(geometry.query_lens)
    new = lens[request] if 0 <= request < geometry.requests else 0
    if not 0 < cut < new:
        raise PlanError(f"request {request} has {new} new rows and cannot be cut after {cut} of them")
    if geometry.captured or geometry.mode in _INDIVISIBLE:
        what = "captured batch" if geometry.captured else f"batch in mode {geometry.mode}"
        raise PlanError(f"a {what} is split between requests, and not after {cut} rows of request {request}")
    later = new - cut
    counts = [*lens[:request], cut], [later, *lens[request + 1 :]]
    earlier = geometry.seq_lens[: request + 1].clone()
    earlier[request:] = (earlier[request:] - later).clamp(min=0)  # a padded request keeps length 0
    hosts: tuple[HostLengths | None, HostLengths | None] = (None, None)
    if geometry.host is not None:
        totals = list(geometry.host.kv_lens)
        hosts = (
            HostLengths(counts[0], [*totals[:request], totals[request] - later]),
            HostLengths(counts[1], totals[request:]),
        )
    rows = sum(counts[0])
    parts = divide(geometry, request + 1, rows)[0], divide(geometry, request, rows)[1]
    seq_lens = earlier, geometry.seq_lens[request:]
    for part, own, lens_here, host, lane in zip(parts, counts, seq_lens, hosts, lanes, strict=True):
        part.update(rows=sum(own), calls=(), lane=lane, max_new=max(own), seq_lens=lens_here, host=host)
        uniform = min(own) == max(own)
        part["new_lens"] = None if uniform else to_device(own, geometry.device, np.int32)
    return Geometry(**parts[0]), Geometry(**parts[1])


def plan_halves(attention: ModelAttention, batch: ForwardBatch, halves: tuple[ForwardBatch, ForwardBatch]) -> None:
    """Plan both halves of a batch before either runs, and mark them as planned (B2).

    MLA layers use the extend path of the whole batch: the second half of a cut request has a prefix, so by itself it
    could take another path. A mixed batch runs on one path then. With chunked prefixes disabled, a batch without a
    prefix may still run chunked; its halves then follow the policy.
    """
    mla = attention.mla
    path = None if mla is None else mla.path(batch.geometry)
    if mla is not None and path is ExtendPath.CHUNKED and mla.policy.disable_chunked_prefix_cache:
        path = None
    for half in halves:
        attention.plan(half, path)
        half.mark_forward_metadata_ready()


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
        halves = split_batch(batch, split)
        plan_halves(self._attention, batch, halves)
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
