"""Reference-counted slots of a pool of linear-attention states."""

from __future__ import annotations

from attnplug import PoolError
from attnplug.linear import LinearStatePool
from attnplug_engine.scheduling.page_allocator import OutOfPages, PageAllocator


class StateAllocator:
    """Allocates the slots of ``pool`` and counts the references to each.

    A slot with more than one reference is a snapshot: it must not be written to.
    """

    def __init__(self, pool: LinearStatePool) -> None:
        self._pool = pool
        self._slots = PageAllocator(pool.num_slots, unit="slot")

    @property
    def num_slots(self) -> int:
        return self._slots.num_pages

    @property
    def free_slots(self) -> int:
        return self._slots.free_pages

    def allocate(self) -> int:
        """Return a slot with one reference and a zero state in every layer."""
        try:
            (slot,) = self._slots.allocate(1)
        except OutOfPages as error:
            raise PoolError(
                f"all {error.total} linear-state slots are in use; wait for a request to finish, raise `state_slots`, "
                "or lower `max_batch`",
                settings=["state_slots", "max_batch"],
            ) from error
        self._pool.zero(slot)
        return slot

    def references(self, slot: int) -> int:
        return self._slots.references(slot)

    def share(self, slot: int) -> None:
        """Add a reference. The slot is a snapshot until only one reference is left."""
        self._slots.share((slot,))

    def release(self, slot: int) -> None:
        """Drop a reference. The slot is free when the last one is dropped."""
        self._slots.release((slot,))

    def copy(self, source: int, target: int) -> None:
        """Copy the state of ``source`` to ``target``, which must have exactly one reference."""
        source_references, target_references = self._slots.references(source), self._slots.references(target)
        if source_references < 1 or target_references != 1:
            raise PoolError(
                f"slot {source} ({source_references} references) cannot be copied to slot {target} "
                f"({target_references}): the source must be in use and the target held once; allocate a slot to copy to"
            )
        self._pool.copy(source, target)
