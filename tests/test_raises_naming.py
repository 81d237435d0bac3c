"""The assertion on the values that an error names fails if a value is missing or part of a longer word."""

from __future__ import annotations

import pytest

from attnplug_testing.errors import raises_naming


@pytest.mark.parametrize("values", [(), (17, 16), (16, "lane 1"), ((2, 3),), ("'fast'", -1)])
def test_values_in_any_order_are_found(values: tuple[object, ...]) -> None:
    with raises_naming(ValueError, *values) as caught:
        raise ValueError("'fast' has 17 rows of (2, 3) in lane 1, not 16; -1 is padding")
    assert caught.type is ValueError


@pytest.mark.parametrize("value", [7, 1, "lane 2", "fas", "row"])
def test_a_part_of_a_word_or_number_is_not_found(value: object) -> None:
    with pytest.raises(AssertionError), raises_naming(ValueError, value):
        raise ValueError("'fast' has 17 rows in lane 12")


def test_another_error_is_not_caught() -> None:
    with pytest.raises(KeyError), raises_naming(ValueError):
        raise KeyError
