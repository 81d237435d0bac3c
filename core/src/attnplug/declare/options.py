"""Typed options of a backend: users write ``NAME.KEY=VALUE``, the backend gets a frozen dataclass."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attnplug.declare.errors import Setting, UsageError, describe_error

_BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def options_problems(options: object) -> Iterator[str]:
    """Yield every reason why a class cannot be a backend's options."""
    if not isinstance(options, type) or not dataclasses.is_dataclass(options):
        yield f"options {options!r} must be a frozen dataclass"
        return
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined] # typeshed leaves it out
        yield f"options class {options.__name__} must be frozen: @dataclass(frozen=True)"
    try:
        hints = get_type_hints(options)
    except Exception as error:
        yield f"options class {options.__name__} has annotations that cannot be read: {error}"
        return
    complete = True
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield f"option {field.name} has no default"
            complete = False
        arms, plain = _arms(hints[field.name]), (bool, int, float, str, type(None))
        if not all(arm in plain or _choices(arm) is not None for arm in arms):
            yield (
                f"option {field.name} has type {_type_name(hints[field.name])}; "
                "use bool, int, float, str, Literal, an Enum, or one of them with None"
            )
            complete = False
    if complete:
        try:
            options()
        except Exception as error:  # its own __post_init__ may raise anything
            yield f"options class {options.__name__} refuses its own defaults: {describe_error(error)}"


def parse_options(name: str, options: type[Any] | None, settings: Mapping[str, str]) -> Any:
    """Build the options of backend ``name`` from its ``KEY=VALUE`` settings; ``None`` if it takes none."""
    if options is None:
        if settings:
            given = f"{name}.{next(iter(settings))}"
            raise UsageError(f"backend {name} takes no options, but `{given}` is given", settings=[given])
        return None
    hints = get_type_hints(options)
    known = {field.name: field for field in dataclasses.fields(options) if field.init}
    values: dict[str, Any] = {}
    for key, text in settings.items():
        if key not in known:
            raise UsageError(f"backend {name} has no option {key!r}; it has:\n{describe_options(options)}")
        try:
            values[key] = _read(hints[key], text)
        except ValueError:
            raise UsageError(
                f"option {name}.{key} must be {_type_name(hints[key])}, not {text!r}; "
                f"backend {name} has:\n{describe_options(options)}"
            ) from None
    try:
        return options(**values)
    except Exception as error:  # the class's own __post_init__ refuses a value, by whatever exception
        given = ", ".join(f"{name}.{key}={text}" for key, text in settings.items())
        raise UsageError(f"backend {name} refuses its options ({given}): {describe_error(error)}") from error


def split_settings(settings: Iterable[str]) -> dict[str, dict[str, str]]:
    """Read ``["acme.speed=2"]`` into ``{"acme": {"speed": "2"}}``; the same key twice is an error."""
    by_backend: dict[str, dict[str, str]] = {}
    for setting in settings:
        target, equals, value = setting.partition("=")
        name, dot, key = target.partition(".")
        if not (equals and dot and name and key):
            raise UsageError(f"`{Setting.BACKEND_OPTION}` {setting!r} cannot be read; write NAME.KEY=VALUE")
        if key in by_backend.setdefault(name, {}):
            message = f"`{name}.{key}` is given twice: {by_backend[name][key]!r} and {value!r}"
            raise UsageError(message, settings=[f"{name}.{key}"])
        by_backend[name][key] = value
    return by_backend


def describe_options(options: type[Any]) -> str:
    """Return one line per option: name, type and default."""
    hints, defaults, lines = get_type_hints(options), options(), []
    for field in dataclasses.fields(options):
        value = getattr(defaults, field.name)
        typed = str(value).lower() if value is None or isinstance(value, bool) else repr(value)  # as a user types it
        shown = str(value.value) if isinstance(value, Enum) else typed
        lines += [f"  {field.name}: {_type_name(hints[field.name])} = {shown}"] if field.init else []
    return "\n".join(lines)


def _arms(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the only type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> dict[str, Any] | None:
    """Return the values of a Literal or an Enum by the text that a user types; ``None`` for other types."""
    if get_origin(hint) is Literal:
        return {str(choice): choice for choice in get_args(hint)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {str(member.value): member for member in hint}
    return None


def _read(hint: Any, text: str) -> Any:
    """Convert a user's text to the type of an option; ValueError if it has another type."""
    for arm in sorted(_arms(hint), key=lambda arm: arm is not type(None)):  # "none" is not text
        with suppress(ValueError, KeyError):
            if arm is type(None):
                return {"none": None, "": None}[text.lower()]
            if arm is bool:
                return _BOOLEANS[text.lower()]
            if (choices := _choices(arm)) is None:
                return arm(text)
            return (choices | getattr(arm, "__members__", {}))[text]  # an Enum's names, too
    raise ValueError(text)


def _type_name(hint: Any) -> str:
    """Return the values of a type as a user types them: ``true or false or none``, ``one of fast, slow``, ``int``."""
    words: dict[Any, str] = {type(None): "none", bool: "true or false"}
    choices = [(arm, _choices(arm)) for arm in _arms(hint)]
    return " or ".join(
        words.get(arm) or str(getattr(arm, "__name__", arm)) if values is None else f"one of {', '.join(values)}"
        for arm, values in choices
    )
