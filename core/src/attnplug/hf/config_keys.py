"""Config files: guarded reading of JSON and text, and typed, bounds-checked access to the keys of a model's config.

Every unreadable file and every invalid key raises the same kind of error, which names it.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from attnplug.declare.errors import UsageError

_T = TypeVar("_T")

_MAX_INTEGER = 1 << 30  # for counts and widths; far above real ones, and their products do not overflow floats
_MAX_NUMBER = 1e12  # rope bases for contexts of millions of tokens reach 1e11
_MAX_LAYERS = 4096


class ModelConfigError(UsageError):
    """A model reference or its config cannot be read. ``source`` is the file or name, ``key`` the invalid key."""

    def __init__(self, message: str, source: str = "", key: str | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key


@dataclass(frozen=True, slots=True)
class Config:
    """Typed view of a config. ``path`` is the prefix of a nested section, such as ``"text_config."``.

    Exception contract: whatever the values are, methods raise only ModelConfigError. Methods without ``optional`` in
    their name raise it for an absent key.
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
        """Return the raw value, or None if the key is absent."""
        return self.values.get(key)

    def required(self, key: str) -> object:
        if key not in self.values:
            raise self.missing(key)
        return self.values[key]

    def integer(self, key: str, least: int = 1, most: int = _MAX_INTEGER) -> int:
        value = self.required(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        return None if self.lookup(key) is None else self.integer(key, least)

    def number(self, key: str, least: float = 1e-9) -> float:
        value = self.required(key)
        # NaN fails the range check.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= _MAX_NUMBER:
            raise self.wrong(key, f"a number from {least:g} to {_MAX_NUMBER:g}")
        return float(value)

    def optional_number(self, key: str, least: float = 1e-9) -> float | None:
        return None if self.lookup(key) is None else self.number(key, least)

    def _optional(self, key: str, kinds: type[_T] | tuple[type[_T], ...], allowed: str) -> _T | None:
        value = self.lookup(key)
        if value is not None and not isinstance(value, kinds):
            raise self.wrong(key, allowed)
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean. Absent and null are false."""
        return bool(self._optional(key, bool, "true or false"))

    def optional_text(self, key: str) -> str | None:
        return self._optional(key, str, "a string")

    def sequence(self, key: str) -> Sequence[object] | None:
        return self._optional(key, (list, tuple), "a list")

    def section(self, key: str) -> Config | None:
        """Return the nested object under ``key`` as a config of the same model type, or None if it is absent."""
        value = self._optional(key, Mapping, "an object")
        return None if value is None else Config(value, self.source, self.model_type, f"{self.path}{key}.")

    def choices(
        self, key: str, known: Mapping[str | int, _T], count: int | None = None, *, longer: bool = False
    ) -> list[_T] | None:
        """Map each entry of the list under ``key`` through ``known``. If given, ``count`` is the required length. With
        ``longer``, further entries are validated and left out."""
        entries = self.sequence(key)
        if entries is None:
            return None
        if len(entries) > _MAX_LAYERS or (count is not None and len(entries) != max(count, longer * len(entries))):
            allowed = f"at most {_MAX_LAYERS}" if count is None else f"one for each of the {count} layers"
            raise self.error(f"has {len(entries)} entries; it must have {allowed}", key)
        chosen = []
        for index, entry in enumerate(entries):
            # bool is excluded because True == 1
            if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in known:
                allowed = f"one of {', '.join(map(repr, known))} for model type {self.model_type!r}"
                raise self.error(f"has {show(entry)} at index {index}; it must be {allowed}", key)
            chosen.append(known[entry])
        return chosen[:count]

    def layer_count(self) -> int:
        return self.integer("num_hidden_layers", most=_MAX_LAYERS)


def show(value: object) -> str:
    """Format a value for an error message, abbreviated."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python does not format integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 120 else text[:120] + "…"


def rope_section(config: Config) -> Config:
    """Return the rope section, or an empty one. As in transformers, ``rope_scaling`` has priority if both exist."""
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        if section is not None and section.values:
            nested = next((name for name, value in section.values.items() if isinstance(value, Mapping)), None)
            if nested is not None:
                raise section.error("is an object: rope must be the same in all layers", nested[:80])
            return section
    return Config({}, config.source, config.model_type, config.path)


def rope_type_key(section: Config) -> str:
    """Return the key of the rope type: ``rope_type``, or ``type`` in older configs."""
    return "type" if "rope_type" not in section.values and "type" in section.values else "rope_type"


def rope_type(section: Config) -> str:
    """Return the rope type, known or not, or ``"default"`` if the section has none."""
    key = rope_type_key(section)
    if key not in section.values:
        return "default"
    value = section.optional_text(key)
    if value is None:
        raise section.wrong(key, "the name of a rope type; leave the key out for 'default'")
    return value


MOST_BYTES = 16 << 20
"""Size limit of a config. Users may pass the file with the weights by mistake."""


def read_json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, object]:
    """Read a JSON object. Raises only UsageError, which names the file."""
    text = read_text(path, most_bytes)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{path} is not JSON: {error.msg} at {where}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path} is not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is JSON, but not an object: it holds {show(value)}")
    return value


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a UTF-8 text file. Raises only UsageError, which names the file."""
    regular_size(path)
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UsageError(f"{path} is larger than {most_bytes} bytes, the limit for such a file")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error


def regular_size(path: Path) -> int:
    """Return the size of a file in bytes. Raises UsageError unless it is a regular file: reading a pipe would block."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} cannot be read: Is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} cannot be read: it is not a regular file, but a pipe, a socket or a device")
    return status.st_size


TINY = "tiny:"
"""Prefix of a reference to a tiny model."""
TINY_CONFIGS: Mapping[str, Mapping[str, object]] = json.loads(Path(__file__).with_name("tiny.json").read_text("utf-8"))
"""Core's tiny models, by model type: Hugging Face configs of real architectures, small enough to run on any CPU within
seconds. Core's plugin registers them, as other plugins do. Example: ``TINY_CONFIGS["llama"]``.

Each is the ``config.json`` of a model of that type, so transformers builds the same model and serves as its oracle. The
exception is ``ring_linear``, which transformers does not have. Values that are not obvious:

- ``initializer_range`` is large: with the usual 0.02 random logits are nearly flat, and a wrong attention output would
  barely change them.
- ``index_topk`` selects few of a short prompt's rows. With fewer index heads, scores of exactly zero would be common.
- ``deepseek_v4``: real models have windows of 128 tokens and entries of 4 and 128 tokens.
- ``kimi_linear``: the defaults of its special tokens are outside a vocabulary of 128.
"""
