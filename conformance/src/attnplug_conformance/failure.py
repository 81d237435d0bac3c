"""Failure of a check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckFailure(Exception):
    """A backend does not meet a requirement. The message is the diagnosis."""

    case = ""
    """Description of the failing case, if it is not the check's own."""
    repeat = ""
    """Further arguments of the command that repeats it."""


@contextmanager
def failure_prefix(condition: str) -> Iterator[None]:
    """Prefix failures raised inside with the condition under which they occurred."""
    try:
        yield
    except CheckFailure as failure:
        raise CheckFailure(f"{condition}: {failure}") from None
