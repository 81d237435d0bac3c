"""Backends that claim CUDA graphs and read what a replay has not filled in, or use padded requests wrongly."""

from __future__ import annotations

from dataclasses import replace

import torch
from refilled_native import Refilled, RefilledDelta, Refilling


class StaleLengths(Refilling):
    """Faulty backend that claims graphs but keeps the lengths of its first batch, as if host lengths were baked into a
    graph."""

    def refill(self, plan, geometry):
        if not plan.metadata.rows:
            super().refill(plan, geometry)


class StaleSlots(RefilledDelta):
    """Claims graphs and keeps the slots that it saw first in a captured batch: all padding."""

    def _rows(self, batch):
        return super()._rows(batch) if batch.geometry.host is not None else iter(())


class StalePages(Refilling):
    """Reads the pages of the capture, which had only padded requests."""

    def refill(self, plan, geometry):
        super().refill(plan, replace(geometry, page_table=torch.zeros_like(geometry.page_table)))


class EarlyPages(Refilling):
    """Reads the pages before the graph has filled them in."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        plan = super().init_forward_metadata_out_graph(forward_batch, in_capture)
        plan.metadata.pages = forward_batch.geometry.page_table.clamp(min=0)
        return plan

    def refill(self, plan, geometry):
        super().refill(plan, replace(geometry, page_table=plan.metadata.pages))


class EarlyLengths(Refilling):
    """Reads the lengths before the graph has filled them in."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        plan = super().init_forward_metadata_out_graph(forward_batch, in_capture)
        plan.metadata.lens = forward_batch.geometry.seq_lens.clone()
        return plan

    def refill(self, plan, geometry):
        super().refill(plan, replace(geometry, seq_lens=plan.metadata.lens))


class EarlySlots(RefilledDelta):
    """Reads the slots of states before the graph has filled them in."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.slots = forward_batch.geometry.state_slots.tolist()
        return super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _rows(self, batch):
        if batch.geometry.host is not None:
            return super()._rows(batch)
        return iter([(slot, row) for row, slot in enumerate(self.slots) if slot >= 0])


class NotANumber(Refilling):
    def attend(self, q, layer, plan, new, extras):
        out = super().attend(q, layer, plan, new, extras)
        return out if new is None or not isinstance(plan.metadata, Refilled) else out * float("nan")


class LoudPadding(Refilling):
    def attend(self, q, layer, plan, new, extras):
        out = super().attend(q, layer, plan, new, extras)
        return out.masked_fill_(out == 0, 1.0)


class WritesPadding(Refilling):
    """Faulty backend: padded requests write to the first row of the pool, which may belong to a request."""

    def refill(self, plan, geometry):
        super().refill(plan, geometry)
        plan.new_slots.clamp_(min=0)
