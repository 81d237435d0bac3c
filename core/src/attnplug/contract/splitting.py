"""Splitting of dataclasses, field by field, as each field declares (B4)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from attnplug.declare.errors import PlanError

SplitBy = Literal["token", "request", "length", "shared", "reset"]


def split_by(by: SplitBy, **arguments: Any) -> Any:
    """Declare a dataclass field that is split by ``token`` or ``request``, ``shared`` by both halves, or ``reset``.

    A ``length`` is split by request. A host that divides a request itself computes the lengths of both parts.
    """
    return dataclasses.field(metadata={"split": by}, **arguments)


def divide(value: Any, requests: int, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of both halves of a dataclass: its first ``requests`` and ``tokens``, and the others.

    Raises PlanError for a field with a value that does not declare how to split it: without it, a wrong batch would
    run.
    """
    halves: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        by: SplitBy | None = field.metadata.get("split")
        if by is None and found is not None:
            raise PlanError(
                f"field {field.name!r} of {type(value).__name__} has a value, but does not declare how to split it"
            )
        if by == "reset" or found is None:
            parts = (None, None)
        elif by == "shared":
            parts = (found, found)
        elif by == "token":
            parts = (found[:tokens], found[tokens:])
        else:
            parts = (found[:requests], found[requests:])
        for half, part in zip(halves, parts, strict=True):
            half[field.name] = part
    return halves
