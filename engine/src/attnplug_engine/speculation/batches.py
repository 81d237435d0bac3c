"""The batches of a round: equally many rows of every request, with lengths that only the device knows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from attnplug import ForwardBatch, ForwardMode, Geometry
from attnplug.host import ModelAttention
from attnplug_engine.speculation.state import Members


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
    """Batches that are planned as they are made. ``exact``: the backend needs lengths on the host, and waits."""

    def __init__(self, attention: ModelAttention, members: Members, page_size: int, *, exact: bool) -> None:
        self._attention, self.members, self._page_size, self._exact = attention, members, page_size, exact

    def make(
        self,
        mode: ForwardMode,
        seq_lens: Tensor,
        positions: Tensor,
        *,
        tree: Tensor | None = None,
        step: int = 0,
    ) -> ForwardBatch:
        members, (requests, new) = self.members, positions.shape
        geometry = Geometry(
            mode,
            members.page_table,
            seq_lens.int(),
            self._page_size,
            rows=requests * new,
            max_seq_len=members.longest,
            max_new=new,
            state_slots=members.state_slots,
            tree=tree,
            step=step,
        )
        batch = ForwardBatch(geometry.measured() if self._exact else geometry, positions=positions.flatten())
        self._attention.plan(batch)
        # A verify depends on nothing but its geometry: one that is padded may be planned again.
        batch.mark_forward_metadata_ready(replan_equivalent=mode is ForwardMode.TARGET_VERIFY)
        return batch

    def begin(self, batch: ForwardBatch) -> None:
        pass
