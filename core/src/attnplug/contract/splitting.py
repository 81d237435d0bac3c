"""Dividing a value in two, or padding it, field by field, as each field says (B4)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch import Tensor

from attnplug.declare.errors import PlanError

SplitBy = Literal["token", "request", "length", "shared", "reset"]


def split_by(by: SplitBy, *, pad: int = 0, **arguments: Any) -> Any:
    """A dataclass field that says how it is divided: by tokens or requests, to both halves, or to neither.

    A ``length`` is divided by requests too. Where one request is cut it differs in both halves, and whoever cuts says
    what it is there. ``pad`` is what padded tokens or requests have in the field.
    """
    return dataclasses.field(metadata={"split": by, "pad": pad}, **arguments)


def divide(value: Any, requests: int, tokens: int, *, cut: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of both halves of a dataclass, divided after so many requests and tokens.

    With ``cut`` the next request is in both halves, and lengths are left out: they are for the caller to add. A field
    that has a value and does not say how to divide it is refused by name. Dropping it would give a wrong batch that
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
    """The tensors of a dataclass with so many padded requests and tokens more, by the names of their fields.

    A field that does not say what it is divided by is refused by name, as ``divide`` does.
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
    """``[n, …]`` to ``[n + rows, …]``."""
    longer = tensor.new_full((tensor.shape[0] + rows, *tensor.shape[1:]), filler)
    longer[: tensor.shape[0]] = tensor
    return longer


def _declared(owner: Any, field: dataclasses.Field[Any], value: Any, verb: str) -> SplitBy | None:
    by: SplitBy | None = field.metadata.get("split")
    if by is None and value is not None:
        raise PlanError(f"field {field.name!r} of {type(owner).__name__} has a value, but nobody said how to {verb} it")
    return by
