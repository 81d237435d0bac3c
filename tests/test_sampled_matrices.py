"""The mark ``sample(n)``: n parameter sets of a test run in make test, the others are long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnplug_testing.pytest_plugin import pytest_collection_modifyitems


class Item:
    """A collected test with a parameter and marks."""

    def __init__(self, name: str, **marks: tuple[int, ...]) -> None:
        self.nodeid, self.marks = name, {mark: SimpleNamespace(args=args) for mark, args in marks.items()}

    def get_closest_marker(self, name: str) -> SimpleNamespace | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = SimpleNamespace(args=())


@pytest.mark.parametrize(
    ("count", "kept"), [(1, [0]), (2, [0, 3]), (4, [0, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_evenly_spaced_sets_stay_and_the_others_are_long(count: int, kept: list[int]) -> None:
    sampled = [Item(f"a.py::test[{number}]", sample=(count,)) for number in range(6)]
    others = [Item("a.py::test[gpu]", sample=(count,), gpu=()), Item("a.py::test_other[0]")]
    pytest_collection_modifyitems([*sampled, *others])  # type: ignore[list-item]
    assert [number for number, item in enumerate(sampled) if "long" not in item.marks] == kept
    assert not any("long" in item.marks for item in others)
