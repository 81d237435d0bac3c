"""From a model reference to a ``ModelSpec``: finding the config, and reading its keys with types and bounds.

A reference is ``tiny:NAME`` (a built-in model), a ``config.json`` or the folder that holds one. What the keys
mean for attention is in ``model_layers``. Nothing is downloaded, and no weights are looked at.
"""

from __future__ import annotations

import difflib
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from attnplug.errors import UsageError
from attnplug.model import ModelSpec
from attnplug.model_layers import CLASS_DEFAULTS, read_layers
from attnplug.tiny import TINY_CONFIGS

_T = TypeVar("_T")

UNBOUNDED_CONTEXT = 1 << 20
"""Context length of a model whose config sets no limit (Mamba-2 has no positions to run out of)."""

_TINY = "tiny:"
_MOST = 1 << 30  # of any count or width: real ones are far below, and floats made of them cannot overflow
_MOST_LAYERS = 4096
_MOST_BYTES = 16 << 20  # someone will give the file with the weights


class ModelConfigError(UsageError):
    """A model reference or its config cannot be read. ``source`` is the file or name, ``key`` the key at fault."""

    def __init__(self, message: str, source: str = "", key: str | None = None) -> None:
        super().__init__(message)
        self.source = source
        self.key = key


def load_model(reference: str) -> ModelSpec:
    """Read the model that ``reference`` names. Raises ModelConfigError, whatever is wrong."""
    if reference.startswith(_TINY):
        return _model(_tiny_config(reference), reference, reference)
    path = _config_path(reference)
    return _model(_read_json(path), Path(os.path.abspath(path)).parent.name or str(path), str(path))


def model_from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    """Read a config that is already a mapping. Raises ModelConfigError; ``name`` is its ``source``."""
    return _model(config, name, name)


# ---- the reference ----


def _tiny_config(reference: str) -> Mapping[str, object]:
    name = reference.removeprefix(_TINY)
    if name not in TINY_CONFIGS:
        near = difflib.get_close_matches(name, TINY_CONFIGS, n=2)
        meant = f"did you mean {' or '.join(_TINY + match for match in near)}? " if near else ""
        known = ", ".join(_TINY + known for known in TINY_CONFIGS)
        raise ModelConfigError(f"{reference!r} is not a built-in model; {meant}known: {known}", reference)
    return TINY_CONFIGS[name]


def _config_path(reference: str) -> Path:
    path = Path(reference)
    if reference and os.path.isdir(path):
        inside = path / "config.json"
        if os.path.lexists(inside):
            return inside
        close = _close_to_config(path)
        has = f"; it has {', '.join(close)}, which this cannot read" if close else ""
        raise ModelConfigError(
            f"the folder {reference!r} holds no config.json{has}; give the folder of a Hugging Face checkpoint",
            reference,
        )
    if not reference or not os.path.lexists(path):
        raise ModelConfigError(
            f"{reference!r} does not exist; give a config.json, a folder that holds one (nothing is downloaded), "
            f"or a built-in model: {', '.join(_TINY + known for known in TINY_CONFIGS)}",
            reference,
        )
    return path


def _close_to_config(folder: Path) -> list[str]:
    """Names in a folder that its owner may have meant: other JSON files, and a config.json one level down."""
    try:
        entries = sorted(folder.iterdir())
        found = [entry.name for entry in entries if entry.suffix in (".json", ".yaml") and os.path.isfile(entry)]
        found += [f"{entry.name}/config.json" for entry in entries if os.path.isfile(entry / "config.json")]
    except OSError:
        return []
    # Those that resemble it most come first: a sharded checkpoint's folder has many other JSON files.
    likeness = {name: difflib.SequenceMatcher(None, name, "config.json").ratio() for name in found}
    return sorted(found, key=lambda name: (name != "params.json", -likeness[name]))[:4]


def _read_json(path: Path) -> Mapping[str, object]:
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ModelConfigError(f"{source} is larger than {_MOST_BYTES} bytes: this is not a config.json", source)
        config = json.loads(content.decode("utf-8-sig"))
    except OSError as error:
        raise ModelConfigError(f"{source} cannot be read: {error.strerror or error}", source) from error
    except UnicodeDecodeError as error:
        raise ModelConfigError(f"{source} is not UTF-8 text: byte {error.start} cannot be decoded", source) from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ModelConfigError(f"{source} is not JSON: {error.msg} at {where}", source) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise ModelConfigError(f"{source} is not JSON that can be read: {error}", source) from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{source} is JSON, but not an object: it holds {_show(config)}", source)
    return config


# ---- the keys ----


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
        return self.error(f"is {_show(self.values.get(key))}; it must be {allowed}", key)

    def lookup(self, key: str) -> object:
        """The raw value; None where the key is absent."""
        return self.values.get(key)

    def integer(self, key: str, least: int = 1, most: int = _MOST) -> int:
        if key not in self.values:
            raise self.missing(key)
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def optional_integer(self, key: str, least: int = 1) -> int | None:
        return None if self.lookup(key) is None else self.integer(key, least)

    def number(self, key: str, least: float = 1e-9) -> float:
        if key not in self.values:
            raise self.missing(key)
        value = self.values[key]
        # NaN is in no range.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= 1e9:
            raise self.wrong(key, f"a number from {least:g} to 1e9")
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
        """What each entry of the list under ``key`` stands for; ``count`` entries where that is given."""
        entries = self.sequence(key)
        if entries is None:
            return None
        if len(entries) > _MOST_LAYERS or (count is not None and len(entries) != count):
            allowed = f"at most {_MOST_LAYERS}" if count is None else f"one for each of the {count} layers"
            raise self.error(f"has {len(entries)} entries; it must have {allowed}", key)
        chosen = []
        for index, entry in enumerate(entries):
            # True would find the entry for 1.
            if not isinstance(entry, str | int) or isinstance(entry, bool) or entry not in known:
                allowed = f"one of {', '.join(map(repr, known))} for model type {self.model_type!r}"
                raise self.error(f"has {_show(entry)} at index {index}; it must be {allowed}", key)
            chosen.append(known[entry])
        return chosen

    def layer_count(self) -> int:
        return self.integer("num_hidden_layers", most=_MOST_LAYERS)


def _model(values: Mapping[str, object], name: str, source: str) -> ModelSpec:
    outer = Config(values, source, model_type="")
    config = _typed(_language_model(outer), outer.optional_text("model_type"))
    for part in (outer, config):
        if part.flag("is_encoder_decoder"):
            raise part.error(
                "is true: an encoder-decoder model has attention over the encoder's output, which no backend here "
                "serves; give a decoder-only model",
                "is_encoder_decoder",
            )
    dtypes = (part.optional_text(key) for part in (config, outer) for key in ("dtype", "torch_dtype"))
    dtype = next((dtype.removeprefix("torch.") for dtype in dtypes if dtype is not None), None)
    return ModelSpec(
        name=name,
        model_type=config.model_type,
        layers=read_layers(config),
        context_length=config.optional_integer("max_position_embeddings") or UNBOUNDED_CONTEXT,
        dtype=dtype,
    )


def _language_model(outer: Config) -> Config:
    """The config itself, or the part of a multimodal config that describes its decoder."""
    if "num_attention_heads" in outer.values and "num_hidden_layers" in outer.values:
        return outer
    sections = (outer.section(key) for key in ("text_config", "llm_config", "language_config"))
    return next((section for section in sections if section is not None), outer)


def _typed(config: Config, outer_type: str | None) -> Config:
    """The config with its model type, and with what that type's class assumes for keys that are absent."""
    model_type = config.optional_text("model_type") or outer_type
    if not model_type:
        raise config.error("is missing; it says how the other keys are to be read", "model_type")
    return replace(config, values={**CLASS_DEFAULTS.get(model_type, {}), **config.values}, model_type=model_type)


def _show(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "a number of thousands of digits"
