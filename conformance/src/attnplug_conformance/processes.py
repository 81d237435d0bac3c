"""Checks of an installed backend in several processes: its kernels are compiled at the same time, which is most of what
a run on a GPU does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import get_context
from typing import Any

from attnplug.host import load_registry
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.check import Check
from attnplug_conformance.chosen import options_of
from attnplug_conformance.runner import Result, Runner, Status, run_check
from attnplug_conformance.subject import Subject

_subject: Subject
_checks: dict[str, Check]


@contextmanager
def in_processes(jobs: int, subject: Subject, settings: Sequence[str] = ()) -> Iterator[Runner]:
    """What runs checks for ``run_checks``. ``settings`` are the options of ``subject`` as they were given."""
    given = (subject.name, subject.device.type, tuple(settings))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _prepare, given) as pool:
        try:
            yield lambda checks, seed: results(pool, checks, seed)
        finally:
            pool.shutdown(cancel_futures=True)


def results(pool: Executor, checks: Sequence[Check], seed: int) -> Iterator[Result]:
    """Results in the order of the checks. After a process has died there is one more, which says so."""
    waiting = [pool.submit(_run, check.name, seed) for check in checks]
    for check, one in zip(checks, waiting, strict=True):
        try:
            yield Result(check, **one.result())
        except BrokenProcessPool:
            words = "the process died that ran this check, or one that ran another; run it alone to see"
            yield Result(check, Status.FAILED, words, lost=f"a process died, at {check.name} or soon after it")


def _prepare(name: str, device: str, settings: tuple[str, ...]) -> None:
    global _subject, _checks
    registry = load_registry()
    _subject = Subject.installed(registry.backends[name], device, options_of(registry, settings).get(name))
    _checks = {check.name: check for check in all_checks()}


def _run(name: str, seed: int) -> dict[str, Any]:
    """A result without its check, which holds functions and cannot travel."""
    result = run_check(_checks[name], _subject, seed)
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name != "check"}
