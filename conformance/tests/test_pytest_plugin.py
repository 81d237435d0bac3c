"""``pytest --attention-backend NAME --pyargs attnplug_conformance``."""

from __future__ import annotations

import pytest

import attnplug_conformance.testing  # noqa: F401  here, or each run imports it anew

pytest_plugins = "pytester"
KIT = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--pyargs", "attnplug_conformance")


def test_every_check_is_a_test(pytester: pytest.Pytester):
    pytester.makefile("", known="mha.lse.decode: it is known\n")
    arguments = ("--attention-backend=torch_native", "--attention-device=cpu", "--expected-failures=known")
    done = pytester.runpytest_inprocess(*KIT, *arguments, "-rs", "-k", "mha.lse or mla.extras.q_rope or enough")
    done.assert_outcomes(passed=5, failed=1, skipped=2, deselected=done.parseoutcomes()["deselected"])
    report = done.stdout.str()
    assert "mha.lse.decode is an expected failure" in report
    assert "the extra q_rope" in report


def test_without_a_backend_the_error_names_the_option(pytester: pytest.Pytester):
    done = pytester.runpytest_inprocess(*KIT)
    assert "--attention-backend NAME" in done.stdout.str()
    assert done.ret != 0


def test_unreadable_expected_failures_are_reported_once(pytester: pytest.Pytester):
    done = pytester.runpytest_inprocess(*KIT, "--attention-backend=torch_native", "--expected-failures=nowhere")
    assert "--expected-failures nowhere" in done.stdout.str()
    done.assert_outcomes(errors=1)


def test_a_contract_that_is_not_checked_is_reported_once(pytester: pytest.Pytester):
    """D4"""
    done = pytester.runpytest_inprocess(*KIT, "--attention-backend=torch_native", "--attention-contract=0.1")
    assert "--attention-contract 0.1" in done.stdout.str()
    done.assert_outcomes(errors=1)
