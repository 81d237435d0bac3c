"""The kit in pytest: with ``--attention-backend``, or in a package's own tests, also over reference kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary, WeakSet

import pytest

from attnplug.host import load_registry
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.check import Check
from attnplug_conformance.runner import Result, Status, floor_problems, required_contract, run_check
from attnplug_conformance.subject import Subject, Unclaimed

_unbuilt: WeakKeyDictionary[Subject, str] = WeakKeyDictionary()
"""First check that failed because the backend could not be built."""
_built: WeakSet[Subject] = WeakSet()


def subject_of(name: str, device: str | None = None) -> Subject:
    """Return an installed backend as a subject. The default device is cuda if there is a GPU."""
    return Subject.installed(load_registry().get(name), device)


def with_options(subject: Subject, config: pytest.Config) -> Subject:
    """Return the subject with the budget and the random case of the command line, if given."""
    budget, case = (config.getoption(f"--attention-{name}") for name in ("budget", "case"))
    if budget is None and case is None:
        return subject
    return replace(subject, budget=subject.budget if budget is None else budget, random_case=case)


def claimed_checks(subject: Subject, *, quick: bool = False) -> list[Check]:
    """Return the checks of all kinds that a backend claims."""
    kinds = {str(kind) for kind in subject.capabilities.kinds} | {"declared"}
    return [check for check in all_checks() if check.kind in kinds and (check.quick or not quick)]


def assert_check(
    subject: Subject, check: Check, expected: Mapping[str, str], seed: int = 0, contract: str | None = None
) -> None:
    """Run one check as a test. A refusal is a skip with the backend's reasons; an expected failure must fail.

    A failure of a check that ``contract``, by default the installed one, does not require is an expected one too.

    If the backend could not be built by the first check that tried, the following checks are skipped.
    """
    __tracebackhide__ = True
    if (unbuilt := _unbuilt.get(subject)) is not None and subject not in _built:
        pytest.skip(f"the backend cannot be built; see the failure of {unbuilt}")
    result = run_check(check, subject, seed)
    if result.unbuilt:
        _unbuilt.setdefault(subject, check.name)
    elif check.case is not None and result.status is not Status.REFUSED:
        _built.add(subject)
    if check.name in expected:
        if result.status is Status.FAILED:
            pytest.xfail(f"{expected[check.name]} ({result.message})")
        pytest.fail(f"{check.name} is an expected failure but {result.status}; remove the entry", pytrace=False)
    if result.status is Status.REFUSED:
        pytest.skip(result.message)
    if result.status is Status.FAILED and not check.required_by(required_contract(contract, subject.registered.spec)):
        pytest.xfail(f"advisory, required since contract {check.since} ({result.message})")
    if result.status is Status.FAILED:
        pytest.fail(
            f"{result.message}\n  must hold: {check.requirement}\n  case:      {result.case}\n"
            f"  repeat:    {result.reproduce(subject)}",
            pytrace=False,
        )


def assert_floors(subject: Subject, expected: Mapping[str, str], *, quick: bool = False) -> None:
    """Fail if too few checks of a claim run, or if an expected failure names no check."""
    __tracebackhide__ = True
    results = [Result(check, _status_if_run(check, subject)) for check in claimed_checks(subject, quick=quick)]
    names = {check.name for check in all_checks()}
    problems = floor_problems(subject, results, quick)
    problems += [f"the expected failure {name} names no check" for name in expected if name not in names]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def _status_if_run(check: Check, subject: Subject) -> Status:
    """Return REFUSED if a check would be refused, else PASSED. Runs nothing."""
    if check.applies(subject) is not None:
        return Status.REFUSED
    if check.case is None:
        return Status.PASSED
    try:
        subject.fit(check.case(subject.page_size, subject.longest))
    except Unclaimed:
        return Status.REFUSED
    return Status.PASSED


def conformance_tests(
    subject: Subject, *, expected: Mapping[str, str] | None = None, quick: bool = False
) -> tuple[Callable[..., None], Callable[[], None]]:
    """Return two tests for a package's own suite: every check, and the minimum number of checks per claim.

    ``test_conforms, test_enough_is_claimed = conformance_tests(subject)``. Only ``expected`` can exclude a check, with
    a reason. ``quick`` runs only the quick checks.
    """
    known = dict(expected or {})

    @pytest.mark.parametrize("check", claimed_checks(subject, quick=quick), ids=lambda check: check.name)
    def test_conforms(check: Check, pytestconfig: pytest.Config) -> None:
        seed, contract = (pytestconfig.getoption(f"--attention-{name}") for name in ("seed", "contract"))
        assert_check(with_options(subject, pytestconfig), check, known, seed, contract)

    def test_enough_is_claimed() -> None:
        assert_floors(subject, known, quick=quick)

    return test_conforms, test_enough_is_claimed
