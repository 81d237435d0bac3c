"""Batches built from lengths, and contexts with an installed backend's capabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from attnplug import BackendContext, Capabilities, ForwardBatch, ForwardMode, Geometry, Plan
from attnplug.contract.batch import BatchPlan
from attnplug.host import load_registry


def geometry(
    mode: ForwardMode,
    page_table: torch.Tensor,
    new: Sequence[int],
    totals: Sequence[int],
    page_size: int,
    *,
    exact: bool = True,
    device: torch.device | str = "cpu",
    state_slots: torch.Tensor | None = None,
    lane: int = 0,
) -> Geometry:
    """Return a geometry. Without ``exact`` the host knows only upper bounds of the lengths, as in planning ahead."""
    known = Geometry.of_lengths(
        mode, page_table.to(device), list(new), list(totals), page_size, state_slots=state_slots, lane=lane
    )
    if exact:
        return known
    return replace(known, host=None, max_seq_len=page_table.shape[1] * page_size)


def padded(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """Add ``rows`` padding rows to a batch, in place, and return it."""
    batch.input_ids = torch.zeros(batch.geometry.rows + rows, dtype=torch.int64, device=batch.geometry.device)
    return batch


def captured(
    mode: ForwardMode, requests: int, per_request: int, *, pages: int, page_size: int, device: torch.device, fill: int
) -> ForwardBatch:
    """Return a batch for graph capture: static memory, and all requests are padding."""
    return ForwardBatch(
        Geometry(
            mode,
            torch.full((requests, pages), 1 << 30, dtype=torch.int32, device=device),
            torch.full((requests,), fill, dtype=torch.int32, device=device),
            page_size,
            rows=requests * per_request,
            max_seq_len=pages * page_size,
            max_new=per_request,
            captured=True,
        )
    )


def with_plan(batch: ForwardBatch, plan: Plan) -> ForwardBatch:
    """Attach a backend's plan to a batch, in place, and return it."""
    batch.plan = BatchPlan(plan)
    return batch


@cache
def capabilities(name: str) -> Capabilities:
    """Return the capabilities that an installed backend declares."""
    return load_registry().backends[name].spec.capabilities


def declaring(context: BackendContext, name: str) -> BackendContext:
    """Return the context with the capabilities of an installed backend."""
    return replace(context, declared=capabilities(name))
