"""Slots of linear states: one per running request; the prefix cache keeps snapshots in the remaining ones."""

from __future__ import annotations

from collections.abc import Sequence

from attnplug import UsageError
from attnplug_engine.request import Request
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_engine.scheduling.step import StepEntry

_NEVER = 1 << 62


class StateSlots:
    """Assigns the slots of ``states`` to requests and snapshots, and decides where prefills stop for a snapshot.

    A prefix cache hit reaches only as far as a snapshot. So states are kept at checkpoints on page boundaries: every
    ``checkpoint`` tokens, and at the last whole page of longer prompts.

    A snapshot is made in three parts. ``reserve`` allocates its slot when its step is scheduled. The step itself copies
    the state. ``keep`` gives it to the cache when the step is finished. Until then its slot is not available to others.
    """

    def __init__(
        self, states: StateAllocator, cache: PrefixCache | None, *, page_size: int, max_batch: int, checkpoint: int
    ) -> None:
        needed = max_batch + (cache is not None)  # one snapshot, which is kept while it is copied
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
        """Return a slot for a new request, with the state of ``snapshot`` or a zero state.

        None if snapshots of steps in flight occupy the last slots; without these, there are more slots than running
        requests.
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
        """Return the next position after ``computed`` tokens at which a state is kept; beyond the request if there is
        none."""
        if self._cache is None:
            return _NEVER
        multiple = (computed // self._checkpoint + 1) * self._checkpoint
        last = (len(request.prompt) - 1) // self._page_size * self._page_size
        # For a short prompt, a separate step behind its last page does not pay: a prefill admits no other request.
        return min(multiple, last) if self._checkpoint < last and computed < last else multiple

    def reserve(self, entries: Sequence[StepEntry]) -> tuple[tuple[int, int], ...]:
        """Reserve slots for snapshots of the entries that end at a checkpoint, if there are any: ``Step.snapshots``."""
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
        """Give the cache the snapshot behind ``tokens``, or free its slot if the cache does not want it."""
        if self._cache is not None and self._cache.wants_snapshot(tokens):
            self._cache.add_snapshot(tokens, slot)
        else:
            self._states.release(slot)
