"""Typed options of a backend: users write ``NAME.KEY=VALUE``, the backend gets a frozen dataclass."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from attnplug.declare.errors import UsageError, describe_error
from attnplug.declare.settings import Setting

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
        if not _readable(hints[field.name]):
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
    hints = get_type_hints(options)
    return "\n".join(
        f"  {field.name}: {_type_name(hints[field.name])} = {_written(_default(field))}"
        for field in dataclasses.fields(options)
        if field.init
    )


def _written(value: object) -> str:
    """Return a value as a user would type it."""
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if value is None or isinstance(value, bool) else repr(value)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _read(hint: Any, text: str) -> Any:
    """Convert a user's text to the type of an option; ValueError if it has another type."""
    if get_origin(hint) in (Union, types.UnionType):
        arms = get_args(hint)
        if type(None) in arms and text.lower() in ("none", ""):
            return None
        for arm in arms:
            if arm is not type(None):
                with suppress(ValueError):
                    return _read(arm, text)
        raise ValueError(text)
    if get_origin(hint) is Literal:
        choices = {str(choice): choice for choice in get_args(hint)}
    elif isinstance(hint, type) and issubclass(hint, Enum):
        choices = {str(member.value): member for member in hint} | dict(hint.__members__)
    elif hint is bool:
        choices, text = _BOOLEANS, text.lower()
    else:
        return hint(text)
    if text not in choices:
        raise ValueError(text)
    return choices[text]


def _readable(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return all(arm is type(None) or _readable(arm) for arm in get_args(hint))
    if get_origin(hint) is Literal:
        return True
    return hint in (bool, int, float, str) or (isinstance(hint, type) and issubclass(hint, Enum))


def _type_name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("none" if arm is type(None) else _type_name(arm) for arm in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    if hint is bool:
        return "true or false"
    return hint.__name__ if isinstance(hint, type) else str(hint)
