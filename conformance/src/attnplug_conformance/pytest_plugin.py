"""The pytest plugin: ``pytest --attention-backend NAME --pyargs attnplug_conformance``."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnplug", "conformance of an attention backend")
    group.addoption("--attention-backend", metavar="NAME", help="the backend to check")
    group.addoption("--attention-device", metavar="DEVICE", help="where to run (default: cuda if there is a GPU)")
    group.addoption("--attention-quick", action="store_true", help="only the quick checks")
    group.addoption("--attention-contract", metavar="VERSION", help="require this contract's checks; newer ones advise")
    group.addoption("--attention-seed", type=int, default=0, metavar="N", help="seed of the inputs and random cases")
    group.addoption("--attention-budget", type=float, metavar="S", help="CPU seconds for random cases; 0 for none")
    group.addoption("--attention-case", metavar="JSON", help="run this random case, as a failure prints it")
    group.addoption("--expected-failures", metavar="FILE", help="known failures, one line each: CHECK: REASON")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "attention_check" not in metafunc.fixturenames:
        return
    config = metafunc.config
    if config.getoption("--attention-backend") is None:
        raise pytest.UsageError("give --attention-backend NAME: the backend to check")
    from attnplug import UsageError
    from attnplug_conformance.runner import required_contract
    from attnplug_conformance.testing import claimed_checks, subject_of

    _expected(config)  # reports a mistake in the file once, before anything runs
    subject = _subject(config, subject_of)
    try:
        required_contract(config.getoption("--attention-contract"), subject.registered.spec, "--attention-contract")
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    found = claimed_checks(subject, quick=config.getoption("--attention-quick"))
    metafunc.parametrize("attention_check", found, ids=lambda check: check.name)


def _subject(config: pytest.Config, make: Any) -> Any:
    from attnplug import UsageError
    from attnplug.declare.errors import PluginError

    try:
        return make(config.getoption("--attention-backend"), config.getoption("--attention-device"))
    except (PluginError, UsageError) as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session")
def attention_subject(pytestconfig: pytest.Config) -> Any:
    """The backend under test."""
    from attnplug_conformance.testing import subject_of, with_options

    return with_options(_subject(pytestconfig, subject_of), pytestconfig)


@pytest.fixture(scope="session")
def expected_failures(pytestconfig: pytest.Config) -> dict[str, str]:
    """Known failures with their reasons."""
    return _expected(pytestconfig)


def _expected(config: pytest.Config) -> dict[str, str]:
    path = config.getoption("--expected-failures")
    if path is None:
        return {}
    from pathlib import Path

    from attnplug_conformance.runner import read_expected

    try:
        return read_expected(Path(path).read_text(), path)
    except OSError as error:
        raise pytest.UsageError(f"--expected-failures {path} cannot be read: {error.strerror}; give a file") from None
    except ValueError as error:
        raise pytest.UsageError(f"--expected-failures: {error}") from None
