"""Batches of a speculative round: the same number of rows for every request, with lengths that only the device
knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import ModelAttention
from attnplug.kernels import to_device
from attnplug_engine.speculation.plan_stream import PlanStream, Section
from attnplug_engine.speculation.round_state import Members


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Shape of a batch before it is made: ``rows`` per request. The last row is ``more`` rows behind the
    committed ones."""

    mode: ForwardMode
    rows: int
    more: int
    trees: bool = False
    step: int = 0


class RoundShapes:
    """Shapes of batches that are planned together."""

    def __init__(self, shapes: Sequence[RoundShape], device: torch.device) -> None:
        self.shapes = shapes
        self._more = to_device([[shape.more] for shape in shapes], device)

    def seq_lens(self, lengths: Tensor) -> list[Tensor]:
        """Return ``seq_lens [requests]`` int32 of each shape if ``lengths [requests]`` rows are committed. Each is a
        tensor of its own, because kernels prefer aligned memory."""
        return [each.int() for each in (lengths + self._more).unbind()]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAhead:
    """A batch that was planned ahead, and the section of the plan stream that planned it."""

    batch: ForwardBatch
    section: Section


class Batches(Protocol):
    """Makes the batches that one model runs for one set of members, eager or captured."""

    members: Members

    def make(
        self,
        mode: ForwardMode,
        seq_lens: Tensor,
        positions: Tensor,
        *,
        tree: Tensor | None = None,
        step: int = 0,
    ) -> ForwardBatch:
        """Return a batch with ``positions [requests, rows]`` and ``seq_lens [requests]``, planned and marked (B2).

        Several may be made before the first one runs. Its input ids may be set later.
        """
        ...

    def begin(self, batch: ForwardBatch) -> None:
        """Call right before a batch runs."""
        ...


class EagerBatches:
    """Batches that are planned when they are made, or earlier on a plan stream.

    ``exact``: the backend needs lengths on the host, which synchronizes. Nothing is planned ahead then.
    """

    def __init__(
        self,
        attention: ModelAttention,
        members: Members,
        page_size: int,
        *,
        exact: bool,
        stream: PlanStream | None = None,
    ) -> None:
        self._attention, self.members, self._page_size = attention, members, page_size
        self._exact, self._stream = exact, stream
        self._ahead: dict[tuple[ForwardMode, int, int], PlannedAhead] = {}

    def make(
        self,
        mode: ForwardMode,
        seq_lens: Tensor,
        positions: Tensor,
        *,
        tree: Tensor | None = None,
        step: int = 0,
    ) -> ForwardBatch:
        rows = positions.shape[1]
        ahead = self._ahead.pop((mode, rows, step), None)
        if ahead is None:
            batch = self._planned(RoundShape(mode, rows, 0, step=step), seq_lens.int(), tree, self.members.longest)
        else:
            assert self._stream is not None
            self._stream.wait(ahead.section)
            batch = ahead.batch
            if tree is not None and batch.geometry.tree is not None:
                batch.geometry.tree.copy_(tree)
        batch.positions = positions.flatten()
        return batch

    def plan_ahead(self, shapes: RoundShapes, lengths: Tensor, longest: int | None = None) -> Sequence[PlannedAhead]:
        """Plan batches of these shapes on the side stream, behind the work that the main stream was given so far.

        ``lengths [requests]`` are committed rows. ``longest`` bounds all rows; by default the members' bound. Positions
        and trees are filled in when the batches are made. Without a plan stream, nothing is planned.
        """
        if self._stream is None or not shapes.shapes:
            return ()
        most = self.members.longest if longest is None else longest
        with self._stream.section(lengths, self.members) as section:
            return [
                PlannedAhead(self._planned(shape, seq_lens, None, most), section)
                for shape, seq_lens in zip(shapes.shapes, shapes.seq_lens(lengths), strict=True)
            ]

    def adopt(self, planned: Sequence[PlannedAhead]) -> None:
        """Return these batches when batches of their shapes are made, each once. Their lengths and pages must be the
        members'."""
        for ahead in planned:
            geometry = ahead.batch.geometry
            self._ahead[geometry.mode, geometry.max_new, geometry.step] = ahead

    def _planned(self, shape: RoundShape, seq_lens: Tensor, tree: Tensor | None, longest: int) -> ForwardBatch:
        """Return a batch of this shape with ``seq_lens [requests]`` int32, planned and marked, still without positions.
        Allocates memory for the tree if the shape has one and none is given."""
        members, requests = self.members, seq_lens.shape[0]
        if tree is None and shape.trees:
            tree = torch.zeros(requests, shape.rows, dtype=torch.int64, device=seq_lens.device)
        geometry = Geometry(
            shape.mode,
            members.page_table,
            seq_lens,
            self._page_size,
            rows=requests * shape.rows,
            max_seq_len=longest,
            max_new=shape.rows,
            state_slots=members.state_slots,
            table_rows=members.rows,
            tree=tree,
            step=shape.step,
            typical=members.typical,
        )
        batch = ForwardBatch(geometry.with_host_lengths() if self._exact else geometry)
        self._attention.plan(batch)
        # A verify depends on nothing but its geometry, so a padded one may be planned again.
        batch.mark_forward_metadata_ready(replan_equivalent=shape.mode is ForwardMode.TARGET_VERIFY)
        return batch

    def begin(self, batch: ForwardBatch) -> None:
        pass
