"""The coordinator's protocol: members that every implementation has (A10)."""

from __future__ import annotations

from attnplug.sparse import Coordinator


class HotRows:
    """Keeps hot rows of each request, by its row of the slot table."""

    name = "hot rows"
    host_nbytes = 1 << 20

    def __init__(self) -> None:
        self.held = {3: [7, 8]}

    @property
    def device_nbytes(self) -> int:
        return sum(map(len, self.held.values()))

    def load_selected(self, layer_id, rows, new_slots, selected, geometry):
        raise NotImplementedError

    def load_entries(self, layer_id, entries, new_slots, selected, geometry):
        raise NotImplementedError

    def release(self, row: int) -> None:
        self.held.pop(row, None)


def test_a_class_with_these_members_is_a_coordinator() -> None:
    """A10"""
    coordinator = HotRows()
    assert isinstance(coordinator, Coordinator)
    coordinator.release(3)
    coordinator.release(3)
    assert coordinator.device_nbytes == 0


def test_anything_else_is_none() -> None:
    assert not isinstance(object(), Coordinator)
