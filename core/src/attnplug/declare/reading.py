"""Strict readers of declared values. Each takes a field's name and value and returns the normalized value.

A wrong value raises :class:`PluginError`, which names the field, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from attnplug.declare.device import DEVICE_NAME
from attnplug.declare.errors import PluginError
from attnplug.declare.problem import INVARIANCE, GraphLevel

_Member = TypeVar("_Member", bound=Enum)
_Value = TypeVar("_Value")


def several(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PluginError(f"{name}={values!r} must be a set or list, not {type(values).__name__}")
    return tuple(values)


def names(name: str, values: object) -> frozenset[Any]:
    return frozenset(several(name, values))


def names_of(is_valid: Callable[[str], object], remedy: str) -> Callable[[str, object], frozenset[str]]:
    """Return a reader of sets of strings for which ``is_valid`` is true. ``remedy`` ends its error."""

    def read(name: str, values: object) -> frozenset[str]:
        found = names(name, values)
        for value in sorted(found, key=str):
            if not isinstance(value, str) or not is_valid(value):
                raise PluginError(f"{name} holds {value!r}; {remedy}")
        return frozenset(map(str, found))

    return read


def optional(read: Callable[[str, object], _Value]) -> Callable[[str, object], _Value | None]:
    """Return a reader that allows ``None``, too."""

    def read_optional(name: str, value: object) -> _Value | None:
        try:
            return None if value is None else read(name, value)
        except PluginError as error:
            raise PluginError(f"{error.message}, or None") from None

    return read_optional


def members_of(enum: type[_Member]) -> Callable[[str, object], frozenset[_Member]]:
    """Return a reader of sets of members of ``enum``, given as members or as their values."""
    known = {str(member.value): member for member in enum}

    def read(name: str, values: object) -> frozenset[_Member]:
        found = []
        for value in several(name, values):
            text = str(value.value) if isinstance(value, Enum) else str(value)
            if text not in known:
                raise PluginError(f"{name} holds {value!r}; known are {', '.join(known)}")
            found.append(known[text])
        return frozenset(found)

    return read


def of_type(name: str, value: object, wanted: type[_Value], words: str) -> _Value:
    if not isinstance(value, wanted):
        raise PluginError(f"{name}={value!r} must be {words}")
    return value


def integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise PluginError(f"{name}={value!r} must be a whole number")
    return value


def _pairs(name: str, values: object) -> frozenset[tuple[int, int]]:
    found = []
    for pair in several(name, values):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(w) is int and w >= 0 for w in pair):
            raise PluginError(f"{name} holds {pair!r}; give pairs of whole numbers, such as (128, 128)")
        found.append((pair[0], pair[1]))
    return frozenset(found)


boolean = partial(of_type, wanted=bool, words="True or False")
dictionary = partial(of_type, wanted=dict, words="a dict")
graph_level = partial(of_type, wanted=GraphLevel, words="a GraphLevel")
invariance_levels = names_of(INVARIANCE.__contains__, f"known are {', '.join(INVARIANCE)}")
device_names = optional(names_of(DEVICE_NAME.fullmatch, "give torch device types, such as cuda, without an index"))
format_names = optional(names_of(bool, "give names of formats"))  # which other packages may declare
optional_integer = optional(integer)
pairs = optional(_pairs)
