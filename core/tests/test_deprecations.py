"""Deprecated names warn for two minors, are an error in the third, and are removed in the fourth (D4)."""

from __future__ import annotations

import warnings

import pytest

from attnplug import UsageError
from attnplug.declare.version import CONTRACT_VERSION, DEPRECATIONS, parse_contract, removal, use_deprecated
from attnplug_testing.errors import raises_naming


@pytest.fixture(autouse=True)
def one_deprecation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name ``old``, deprecated since 1.9."""
    monkeypatch.setattr("attnplug.declare.version.DEPRECATIONS", {"old": ("1.9", "new(batch)")})
    monkeypatch.setattr("attnplug.declare.version._warned", set())


@pytest.mark.parametrize("core", ["1.9", "1.10"])
def test_it_warns_for_two_minors_once_per_process(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: at the caller, with replacement and version."""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", core)
    with pytest.warns(DeprecationWarning, match="old") as caught:
        use_deprecated("old", stacklevel=1)
    assert caught[0].filename == __file__
    assert all(part in str(caught[0].message) for part in ("old", "new(batch)", "1.12"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_deprecated("old", stacklevel=1)


def test_it_is_an_error_in_the_third_minor(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: every time."""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "1.11")
    for _ in range(2):
        with raises_naming(UsageError, "old", "new(batch)", "1.12"):
            use_deprecated("old", stacklevel=1)


def test_what_is_due_has_been_removed() -> None:
    """D4: this fails in the version that removes a name, until its entry and its code are removed."""
    for name, (since, replacement) in DEPRECATIONS.items():
        assert replacement and parse_contract(since) is not None
        assert parse_contract(CONTRACT_VERSION) < parse_contract(removal(since)[1]), name
