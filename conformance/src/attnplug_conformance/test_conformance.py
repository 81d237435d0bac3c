"""Every check of the kit as a test of the backend that ``--attention-backend`` names."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from attnplug_conformance.check import Check
from attnplug_conformance.subject import Subject
from attnplug_conformance.testing import assert_enough, assert_holds


def test_holds(attention_check: Check, attention_subject: Subject, expected_failures: Mapping[str, str]) -> None:
    assert_holds(attention_subject, attention_check, expected_failures)


def test_enough_is_claimed(
    attention_subject: Subject, expected_failures: Mapping[str, str], pytestconfig: pytest.Config
) -> None:
    assert_enough(attention_subject, expected_failures, quick=pytestconfig.getoption("--attention-quick"))
