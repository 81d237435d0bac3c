"""The kit in pytest: by the option ``--attention-backend``, or in a package's own tests over a seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from attnplug import UsageError
from attnplug.host import load_registry
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.check import Check
from attnplug_conformance.runner import Result, Status, floor_problems, run_check
from attnplug_conformance.subject import Refused, Subject


def subject_of(name: str, device: str | None = None) -> Subject:
    """An installed backend on a device: cuda where there is a GPU, unless one is named."""
    backends = load_registry().backends
    if name not in backends:
        raise UsageError(f"there is no backend {name!r}; there are {', '.join(backends)}")
    return Subject.installed(backends[name], device)


def cases(subject: Subject, *, quick: bool = False) -> list[Check]:
    """The checks of the kinds that a backend claims."""
    kinds = {str(kind) for kind in subject.can.kinds} | {"declared"}
    return [check for check in all_checks() if check.kind in kinds and (check.quick or not quick)]


def assert_holds(subject: Subject, check: Check, expected: Mapping[str, str]) -> None:
    """Run one check as a test: what the backend refuses is skipped by its reasons, and a known failure must fail."""
    __tracebackhide__ = True
    result = run_check(check, subject)
    if check.name in expected:
        if result.status is Status.FAILED:
            pytest.xfail(f"{expected[check.name]} ({result.words})")
        pytest.fail(f"{check.name} is an expected failure, and it {result.status}; remove the entry", pytrace=False)
    if result.status is Status.REFUSED:
        pytest.skip(result.words)
    if result.status is Status.FAILED:
        pytest.fail(
            f"{result.words}\n  must hold: {check.says}\n  case:      {result.case}\n"
            f"  repeat:    {result.reproduce(subject)}",
            pytrace=False,
        )


def assert_enough(subject: Subject, expected: Mapping[str, str], *, quick: bool = False) -> None:
    """Fail for claims of which too little runs, and for expected failures that name no check."""
    __tracebackhide__ = True
    results = [Result(check, _would(check, subject)) for check in cases(subject, quick=quick)]
    names = {check.name for check in all_checks()}
    problems = floor_problems(subject, results, quick)
    problems += [f"the expected failure {name} names no check" for name in expected if name not in names]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def _would(check: Check, subject: Subject) -> Status:
    """Return True if a check would run; runs nothing."""
    if check.applies(subject) is not None:
        return Status.REFUSED
    if check.case is None:
        return Status.PASSED
    try:
        subject.fit(check.case(subject.page_size, subject.longest))
    except Refused:
        return Status.REFUSED
    return Status.PASSED


def conformance_tests(
    subject: Subject, *, expected: Mapping[str, str] | None = None, quick: bool = False
) -> tuple[Callable[[Check], None], Callable[[], None]]:
    """Two tests for a package's own suite: one of every check, and one that enough of them run.

    ``test_conforms, test_enough_is_claimed = conformance_tests(subject)``. Nothing can be left out, except by
    ``expected``, with a reason each. ``quick`` runs the quick checks alone.
    """
    known = dict(expected or {})

    @pytest.mark.parametrize("check", cases(subject, quick=quick), ids=lambda check: check.name)
    def test_conforms(check: Check) -> None:
        assert_holds(subject, check, known)

    def test_enough_is_claimed() -> None:
        assert_enough(subject, known, quick=quick)

    return test_conforms, test_enough_is_claimed
