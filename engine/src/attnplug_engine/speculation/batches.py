"""The batches of a round: equally many rows of every request, with lengths that only the device knows."""

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
from attnplug_engine.speculation.state import Members


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch as far as it is known before it is made: ``rows`` of each request, the last of which ends ``more`` rows
    after those that are committed."""

    mode: ForwardMode
    rows: int
    more: int
    trees: bool = False
    step: int = 0


class Shapes:
    """Shapes of batches that are planned together."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        self.shapes = shapes
        self._more = to_device([[shape.more] for shape in shapes], device)

    def seq_lens(self, lengths: Tensor) -> list[Tensor]:
        """Of each shape ``[requests]`` int32, where ``lengths [requests]`` rows are committed. Kernels like memory of
        their own, which is aligned, better than parts of one tensor."""
        return [each.int() for each in (lengths + self._more).unbind()]


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A batch that was planned ahead, and where."""

    batch: ForwardBatch
    section: Section


class Batches(Protocol):
    """Makes the batches that one model runs for one set of members; eager ones, or ones that a graph holds."""

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
        """A batch with ``positions [requests, rows]`` and ``seq_lens [requests]``, planned and marked so (B2).

        Several may be made before the first one runs. Its input ids may come later.
        """
        ...

    def begin(self, batch: ForwardBatch) -> None:
        """To be called right before a batch runs."""
        ...


class EagerBatches:
    """Batches that are planned as they are made, or ahead of that on a plan stream, if there is one.

    ``exact``: the backend needs lengths on the host, and waits. Nothing is planned ahead then.
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
        self._ahead: dict[tuple[ForwardMode, int, int], Ahead] = {}

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
            batch = self._planned(Shape(mode, rows, 0, step=step), seq_lens.int(), tree, self.members.longest)
        else:
            assert self._stream is not None
            self._stream.wait(ahead.section)
            batch = ahead.batch
            if tree is not None and batch.geometry.tree is not None:
                batch.geometry.tree.copy_(tree)
        batch.positions = positions.flatten()
        return batch

    def plan_ahead(self, shapes: Shapes, lengths: Tensor, longest: int | None = None) -> Sequence[Ahead]:
        """Batches of these shapes, planned on the side stream after what the main stream was asked for so far.

        ``lengths [requests]`` are rows that are committed. ``longest`` is a bound of all rows, where it is not that of
        the members. Positions and trees are filled in when the batches are made. Without a plan stream there are none.
        """
        if self._stream is None or not shapes.shapes:
            return ()
        most = self.members.longest if longest is None else longest
        with self._stream.section(lengths, self.members) as section:
            return [
                Ahead(self._planned(shape, seq_lens, None, most), section)
                for shape, seq_lens in zip(shapes.shapes, shapes.seq_lens(lengths), strict=True)
            ]

    def adopt(self, planned: Sequence[Ahead]) -> None:
        """Give these when batches of their shapes are made, each once. Their lengths and pages are the members'."""
        for ahead in planned:
            geometry = ahead.batch.geometry
            self._ahead[geometry.mode, geometry.max_new, geometry.step] = ahead

    def _planned(self, shape: Shape, seq_lens: Tensor, tree: Tensor | None, longest: int) -> ForwardBatch:
        """A batch of this shape with ``seq_lens [requests]`` int32, planned and marked, still without positions; and
        with memory for the tree if the shape has one and none is given."""
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
        batch = ForwardBatch(geometry.measured() if self._exact else geometry)
        self._attention.plan(batch)
        # A verify depends on nothing but its geometry: one that is padded may be planned again.
        batch.mark_forward_metadata_ready(replan_equivalent=shape.mode is ForwardMode.TARGET_VERIFY)
        return batch

    def begin(self, batch: ForwardBatch) -> None:
        pass
