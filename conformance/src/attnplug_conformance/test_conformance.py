"""All checks of the kit as tests of the backend named by ``--attention-backend``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnplug_conformance.check import Check
from attnplug_conformance.subject import Subject
from attnplug_conformance.testing import assert_check, assert_floors


def test_holds(
    attention_check: Check,
    attention_subject: Subject,
    expected_failures: Mapping[str, str],
    pytestconfig: pytest.Config,
) -> None:
    seed, contract = (pytestconfig.getoption(f"--attention-{name}") for name in ("seed", "contract"))
    assert_check(attention_subject, attention_check, expected_failures, seed, contract)


def test_enough_is_claimed(
    attention_subject: Subject, expected_failures: Mapping[str, str], pytestconfig: pytest.Config
) -> None:
    assert_floors(attention_subject, expected_failures, quick=pytestconfig.getoption("--attention-quick"))
