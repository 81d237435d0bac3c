"""Parallel checks of an installed backend in several processes.

Most of a run on a GPU is spent compiling kernels, which the processes do in parallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from attnplug.host import load_registry
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.check import Check
from attnplug_conformance.runner import Result, Runner, Status, run_check
from attnplug_conformance.subject import Subject

_MAX_CRASHES = 3
"""Number of crashed checks that ends a run: each crash costs the start of new processes."""
_subject: Subject
_checks: dict[str, Check]


def in_processes(jobs: int, subject: Subject) -> Runner:
    """Return a runner that spreads the checks of ``run_checks`` over ``jobs`` processes."""
    kept = {"budget": subject.budget, "random_case": subject.random_case, "invariant": subject.invariant}
    given = (subject.name, subject.device.type, subject.settings, kept)
    return partial(results, lambda most: ProcessPoolExecutor(most, get_context("spawn"), _prepare, given), jobs)


def results(pool: Callable[[int], Executor], jobs: int, checks: Sequence[Check], seed: int) -> Iterator[Result]:
    """Yield results in the order of the checks, run by ``pool(jobs)``.

    When a process dies, the check that it ran is unknown. The first check without a result is then run alone, and the
    checks following it by new processes.
    """
    deaths, left = 0, list(checks)
    while left:
        for result in _results_until_crash(pool(jobs), left, seed):
            yield result
            left = left[1:]
        if left:
            suspect, left = left[0], left[1:]
            alone = next(_results_until_crash(pool(1), [suspect], seed), None)
            deaths += alone is None
            lost = f"the processes of {deaths} checks died" if deaths == _MAX_CRASHES else ""
            yield alone or Result(suspect, Status.FAILED, "the process that ran it died", lost=lost)


def _results_until_crash(pool: Executor, checks: Sequence[Check], seed: int) -> Iterator[Result]:
    try:
        waiting = [pool.submit(_run, check.name, seed) for check in checks]
        for check, one in zip(checks, waiting, strict=True):
            yield Result(check, **one.result())
    except BrokenProcessPool:
        return
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare(name: str, device: str, settings: tuple[str, ...], kept: dict[str, Any]) -> None:
    global _subject, _checks
    installed = Subject.installed(load_registry().backends[name], device, settings)
    _subject = replace(installed, **kept)
    _checks = {check.name: check for check in all_checks()}


def _run(name: str, seed: int) -> dict[str, Any]:
    """Run a check; returns the result without its check, which holds functions and cannot be pickled."""
    result = run_check(_checks[name], _subject, seed)
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name != "check"}
