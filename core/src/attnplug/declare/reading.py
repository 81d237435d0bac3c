"""Values of a declaration, read strictly: an error says which field, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, TypeVar

from attnplug.declare.errors import PluginError

_Member = TypeVar("_Member", bound=Enum)


def several(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PluginError(f"{name}={values!r} must be a set or list, not {type(values).__name__}")
    return tuple(values)


def members(name: str, values: object, enum: type[_Member]) -> frozenset[_Member]:
    known = {str(member.value): member for member in enum}
    found = []
    for value in several(name, values):
        text = str(value.value) if isinstance(value, Enum) else str(value)
        if text not in known:
            raise PluginError(f"{name} holds {value!r}; known are {', '.join(known)}")
        found.append(known[text])
    return frozenset(found)


def of_type(name: str, value: object, wanted: type[Any], words: str) -> Any:
    if not isinstance(value, wanted):
        raise PluginError(f"{name}={value!r} must be {words}")
    return value


def integer(name: str, value: object, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise PluginError(f"{name}={value!r} must be a whole number" + (" or None" if optional else ""))
    return value


def pairs(name: str, values: object) -> frozenset[tuple[int, int]] | None:
    if values is None:
        return None
    found = []
    for pair in several(name, values):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(w) is int and w >= 0 for w in pair):
            raise PluginError(f"{name} holds {pair!r}; give pairs of whole numbers, such as (128, 128)")
        found.append((pair[0], pair[1]))
    return frozenset(found)
