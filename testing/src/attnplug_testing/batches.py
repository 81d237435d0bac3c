"""Batches of tests, from lengths; and contexts that carry what a backend's spec declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from attnplug import BackendContext, Capabilities, ForwardBatch, ForwardMode, Geometry, Plan
from attnplug.host import BatchPlan, load_registry


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
    """Without ``exact`` the host knows upper bounds of the lengths only, as one that plans ahead does."""
    known = Geometry.of_lengths(
        mode, page_table.to(device), list(new), list(totals), page_size, state_slots=state_slots, lane=lane
    )
    if exact:
        return known
    return replace(known, host=None, max_seq_len=page_table.shape[1] * page_size)


def padded(batch: ForwardBatch, rows: int) -> ForwardBatch:
    """The same with padding rows after those of its requests."""
    batch.input_ids = torch.zeros(batch.geometry.rows + rows, dtype=torch.int64, device=batch.geometry.device)
    return batch


def captured(
    mode: ForwardMode, requests: int, per_request: int, *, pages: int, page_size: int, device: torch.device, fill: int
) -> ForwardBatch:
    """A batch of fixed memory, every request of it padded, as a graph is captured with."""
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
    """The batch, with what a backend planned for it."""
    batch.plan = BatchPlan(plan)
    return batch


@cache
def capabilities(name: str) -> Capabilities:
    """What an installed backend declares."""
    return load_registry().backends[name].spec.capabilities


def declaring(context: BackendContext, name: str) -> BackendContext:
    """A scene's context for an installed backend: it declares what that one's spec does."""
    return replace(context, declared=capabilities(name))
