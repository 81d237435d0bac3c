"""Dividing a value in two, field by field, as each field says (B4)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from attnplug.declare.errors import PlanError

SplitBy = Literal["token", "request", "shared", "reset"]


def split_by(by: SplitBy, **arguments: Any) -> Any:
    """A dataclass field that says how it is divided: by tokens or requests, to both halves, or to neither."""
    return dataclasses.field(metadata={"split": by}, **arguments)


def divide(value: Any, requests: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of both halves of a dataclass.

    A field that has a value and does not say how to divide it is refused by name. Dropping it would give a wrong batch
    that runs.
    """
    halves: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for field in dataclasses.fields(value):
        parts = _parts(type(value).__name__, field, getattr(value, field.name), requests, tokens)
        for half, part in zip(halves, parts, strict=True):
            half[field.name] = part
    return halves


def _parts(owner: str, field: dataclasses.Field[Any], value: Any, requests: int, tokens: int) -> tuple[Any, Any]:
    by: SplitBy | None = field.metadata.get("split")
    if by == "reset" or value is None:
        return None, None
    if by == "shared":
        return value, value
    if by == "request":
        return value[:requests], value[requests:]
    if by == "token":
        return value[:tokens], value[tokens:]
    raise PlanError(f"field {field.name!r} of {owner} has a value, but nobody said how to split it")
