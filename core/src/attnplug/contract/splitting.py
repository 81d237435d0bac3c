"""Splitting and padding of dataclasses, field by field, as each field declares (B4)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import Tensor

from attnplug.declare.errors import PlanError

SplitBy = Literal["token", "request", "length", "shared", "reset"]


def split_by(by: SplitBy, *, pad: int = 0, **arguments: Any) -> Any:
    """Declare a dataclass field with the way it is split: by ``token`` or ``request``, ``shared`` by both halves, or
    ``reset`` in both.

    A ``length`` is split by request. If a request itself is cut, its length differs in both halves, and the caller of
    ``divide`` sets it. ``pad`` is the field's value for padded tokens or requests.
    """
    return dataclasses.field(metadata={"split": by, "pad": pad}, **arguments)


def divide(value: Any, requests: int, tokens: int, *, cut: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of both halves of a dataclass: its first ``requests`` and ``tokens``, and the others.

    With ``cut``, the next request is in both halves, and lengths are left for the caller to add. Raises PlanError with
    the name of a field that has a value and does not declare how to split it: dropping it would give a wrong batch that
    runs.
    """
    halves: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        by = _declared(value, field, found, "split")
        if by == "length" and cut:
            continue
        if by == "reset" or found is None:
            parts = (None, None)
        elif by == "shared":
            parts = (found, found)
        elif by == "token":
            parts = (found[:tokens], found[tokens:])
        else:
            parts = (found[: requests + cut], found[requests:])
        for half, part in zip(halves, parts, strict=True):
            half[field.name] = part
    return halves


def pad(value: Any, requests: int, tokens: int) -> dict[str, Any]:
    """Return the tensors of a dataclass by field name, with padded requests and tokens appended.

    Raises PlanError for an undeclared field, like ``divide``.
    """
    made: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        by = _declared(value, field, found, "pad")
        count = tokens if by == "token" else requests
        if count and by in ("token", "request", "length") and isinstance(found, Tensor):
            made[field.name] = padded(found, count, field.metadata["pad"])
    return made


def padded(tensor: Tensor, rows: int, filler: int = 0) -> Tensor:
    """Append ``rows`` rows of ``filler`` to a tensor: ``[n, …]`` → ``[n + rows, …]``."""
    longer = tensor.new_full((tensor.shape[0] + rows, *tensor.shape[1:]), filler)
    longer[: tensor.shape[0]] = tensor
    return longer


def _declared(owner: Any, field: dataclasses.Field[Any], value: Any, verb: str) -> SplitBy | None:
    by: SplitBy | None = field.metadata.get("split")
    if by is None and value is not None:
        raise PlanError(
            f"field {field.name!r} of {type(owner).__name__} has a value, but does not declare how to {verb} it"
        )
    return by
