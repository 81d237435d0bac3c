"""The keys of a model's config, read with types and bounds: every wrong key gives the same kind of error."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from attnplug.declare.errors import UsageError

_T = TypeVar("_T")

_MOST = 1 << 30  # for any count or width: real ones are far below, and as floats they cannot overflow
_MOST_NUMBER = 1e12  # the base of a rope for contexts of millions is 1e11
_MOST_LAYERS = 4096


class ModelConfigError(UsageError):
    """A model reference or its config cannot be read. ``source`` is the file or name, ``key`` the key at fault."""

    def __init__(self, message: str, source: str = "", key: str | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key


@dataclass(frozen=True, slots=True)
class Config:
    """A config's keys, read with types and bounds. ``path`` leads to a nested one: ``"text_config."``.

    Exception contract: every method raises ModelConfigError and nothing else, for any values.
    """

    values: Mapping[str, object]
    source: str
    model_type: str
    path: str = ""

    def error(self, problem: str, key: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {self.path + key!r} {problem}", self.source, self.path + key)

    def missing(self, key: str) -> ModelConfigError:
        return self.error(f"is missing; a config of model type {self.model_type!r} needs it", key)

    def wrong(self, key: str, allowed: str) -> ModelConfigError:
        return self.error(f"is {show(self.values.get(key))}; it must be {allowed}", key)

    def lookup(self, key: str) -> object:
        """The raw value; None where the key is absent."""
        return self.values.get(key)

    def integer(self, key: str, least: int = 1, most: int = _MOST) -> int:
        if key not in self.values:
            raise self.missing(key)
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        return None if self.lookup(key) is None else self.integer(key, least)

    def number(self, key: str, least: float = 1e-9) -> float:
        if key not in self.values:
            raise self.missing(key)
        value = self.values[key]
        # NaN is in no range.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MOST_NUMBER:
            raise self.wrong(key, f"a number from {least:g} to {_MOST_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str, least: float = 1e-9) -> float | None:
        return None if self.lookup(key) is None else self.number(key, least)

    def flag(self, key: str) -> bool:
        """Absent and null are false."""
        value = self.lookup(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def optional_text(self, key: str) -> str | None:
        value = self.lookup(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def sequence(self, key: str) -> Sequence[object] | None:
        value = self.lookup(key)
        if value is not None and not isinstance(value, list | tuple):
            raise self.wrong(key, "a list")
        return value

    def section(self, key: str) -> Config | None:
        """The object under ``key`` as a config of its own, of the same model type."""
        value = self.lookup(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Config(value, self.source, self.model_type, f"{self.path}{key}.")

    def choices(self, key: str, known: Mapping[str | int, _T], count: int | None = None) -> list[_T] | None:
        """What each entry of the list under ``key`` stands for. If ``count`` is given, there must be that many."""
        entries = self.sequence(key)
        if entries is None:
            return None
        if len(entries) > _MOST_LAYERS or (count is not None and len(entries) != count):
            allowed = f"at most {_MOST_LAYERS}" if count is None else f"one for each of the {count} layers"
            raise self.error(f"has {len(entries)} entries; it must have {allowed}", key)
        chosen = []
        for index, entry in enumerate(entries):
            # True would match the entry for 1.
            if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in known:
                allowed = f"one of {', '.join(map(repr, known))} for model type {self.model_type!r}"
                raise self.error(f"has {show(entry)} at index {index}; it must be {allowed}", key)
            chosen.append(known[entry])
        return chosen

    def layer_count(self) -> int:
        return self.integer("num_hidden_layers", most=_MOST_LAYERS)


def show(value: object) -> str:
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 120 else text[:120] + "…"
