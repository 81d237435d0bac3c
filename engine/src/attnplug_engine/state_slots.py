"""Slots for linear states: one for each running request, and in the rest snapshots, which the prefix cache keeps."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug.host import UsageError
from attnplug.linear import LinearStatePool
from attnplug_engine.prefix_cache import PrefixCache
from attnplug_engine.request import Request, StepEntry

_NEVER = 1 << 62


class StateSlots:
    """Who has which slot of ``states``, and where prefills stop so that a state can be kept.

    A hit in the prefix cache goes as far as a snapshot. So states are worth keeping at checkpoints, at whole pages:
    every ``checkpoint`` tokens, and at the last whole page of prompts with more than that.

    A snapshot is made in three parts. ``reserve`` gives it a slot when its step is scheduled. The step itself copies
    the state. ``keep`` gives it to the cache when the step is finished. Until then nobody else can have its slot.
    """

    def __init__(
        self, states: LinearStatePool, cache: PrefixCache | None, *, page_size: int, max_batch: int, checkpoint: int
    ) -> None:
        needed = max_batch + (cache is not None)  # a snapshot is kept while it is copied
        if states.num_slots < needed:
            raise UsageError(
                f"{states.num_slots} slots for linear-attention states are too few for {max_batch} requests at a time: "
                f"give `state_slots` of {needed} or more, or lower `max_batch`",
                settings=["state_slots", "max_batch"],
            )
        self._states, self._cache = states, cache
        self._page_size = page_size
        self._checkpoint = -(-checkpoint // page_size) * page_size

    def take(self, snapshot: int | None) -> int | None:
        """A slot for a new request, with the state of ``snapshot`` or a zero state.

        ``None`` if snapshots of steps in flight have the last slots: without them there are more than requests can run.
        """
        states = self._states
        if not states.free_slots and (self._cache is None or not self._cache.evict_snapshot(keeping=snapshot)):
            return None
        slot = states.allocate()
        if snapshot is not None:
            states.copy(snapshot, slot)
        return slot

    def release(self, slot: int) -> None:
        self._states.release(slot)

    def next_checkpoint(self, request: Request, computed: int) -> int:
        """Where, after ``computed`` tokens, a state is next worth keeping; beyond the request if nowhere."""
        if self._cache is None:
            return _NEVER
        multiple = (computed // self._checkpoint + 1) * self._checkpoint
        last = (len(request.prompt) - 1) // self._page_size * self._page_size
        # A short prompt is not worth a step of its own after its last page: nobody is admitted beside a prefill.
        return min(multiple, last) if self._checkpoint < last and computed < last else multiple

    def reserve(self, entries: Sequence[StepEntry]) -> tuple[tuple[int, int], ...]:
        """Slots for snapshots of the entries that end at a checkpoint, as far as there are any: ``Step.snapshots``."""
        states, cache = self._states, self._cache
        if cache is None:
            return ()
        pairs = []
        for request, position, token_ids, _ in entries:
            end = position + len(token_ids)
            if end % self._page_size or end != self.next_checkpoint(request, position):
                continue
            if not states.free_slots and not cache.evict_snapshot():
                break
            assert request.slot is not None
            pairs.append((request.slot, states.allocate()))
        return tuple(pairs)

    def keep(self, tokens: Sequence[int], slot: int) -> None:
        """Give the cache the snapshot after ``tokens``, or free its slot if it is not wanted."""
        if self._cache is not None and self._cache.wants_snapshot(tokens):
            self._cache.add_snapshot(tokens, slot)
        else:
            self._states.release(slot)
