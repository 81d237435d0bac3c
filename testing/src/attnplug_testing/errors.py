"""Assertions on the values that an error names, independent of its wording."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_naming(
    error: type[BaseException] | tuple[type[BaseException], ...], *values: object
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect ``error`` with a message that contains each of ``values`` as a whole word, in any order. Example::

    with raises_naming(PlanError, "lane 1", 257, 256):
        backend.init_forward_metadata(batch)
    """
    __tracebackhide__ = True
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    missing = [value for value in values if not _names(message, str(value))]
    if missing:
        pytest.fail(f"the message does not name {', '.join(map(repr, missing))}: {message}")


def _names(message: str, value: str) -> bool:
    """Return True if ``value`` occurs in ``message`` and is not part of a longer word or number."""
    before = r"(?<!\w)" if value[:1].isalnum() else ""
    after = r"(?!\w)" if value[-1:].isalnum() else ""
    return re.search(before + re.escape(value) + after, message) is not None
