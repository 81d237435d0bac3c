"""Checks for ``pytest.raises(..., check=…)``: attributes of an exception, and values that its message contains.

They survive a rewording of the message::

    with pytest.raises(UsageError, check=having(settings=("max_batch",))): ...
    with raises_naming(PoolError, 17, 16): ...
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from attnplug.host import SelectionError

Check = Callable[[BaseException], bool]


def missing_values(text: str, *values: object) -> list[object]:
    """Return the values that ``text`` does not contain as whole words. The order of values is not checked."""
    return [value for value in values if not _contains(text, str(value))]


def _contains(text: str, value: str) -> bool:
    """Return True if ``value`` occurs in ``text`` and is not part of a longer word or number."""
    before = r"(?<!\w)" if value[:1].isalnum() else ""
    after = r"(?!\w)" if value[-1:].isalnum() else ""
    return re.search(before + re.escape(value) + after, text) is not None


def naming(*values: object) -> Check:
    """Check that the message contains every value (a number, a name, an option) as a whole word, in any order."""

    def check(error: BaseException) -> bool:
        missing = missing_values(str(error), *values)
        assert not missing, f"the message does not contain {missing}: {error}"
        return True

    return check


def raises_naming(
    error: type[BaseException] | tuple[type[BaseException], ...], *values: object
) -> pytest.RaisesExc[BaseException]:
    """Expect ``error`` with a message that contains each of ``values``, as :func:`naming` checks it."""
    return pytest.raises(error, check=naming(*values))


def having(*values: object, **attributes: object) -> Check:
    """Check attributes of the exception for equality, and ``values`` like :func:`naming`."""

    def check(error: BaseException) -> bool:
        found = {name: getattr(error, name, None) for name in attributes}
        assert found == attributes, f"{type(error).__name__} has {found}, not {attributes}: {error}"
        return naming(*values)(error)

    return check


def refusing(backend: str, code: str) -> Check:
    """Check that a failed selection has a refusal of ``backend`` with this code."""

    def check(error: BaseException) -> bool:
        assert isinstance(error, SelectionError)
        candidates = [candidate for choice in error.selection.choices.values() for candidate in choice.candidates]
        codes = {reason.code for one in candidates if one.backend.spec.name == backend for reason in one.refusals}
        assert code in codes, f"{backend} is refused for {sorted(codes)}, not for {code}: {error}"
        return True

    return check
