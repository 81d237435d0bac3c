"""Interrupts that come at a bad time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from attnplug.machine import interrupt
from attnplug_engine.execution.signals import deferred


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Set Python's default SIGINT handler, even if this process ignores interrupts. Restore all handlers after the
    test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def held(*signals: signal.Signals, done: list[str]) -> None:
    with deferred():
        for number in signals:
            signal.raise_signal(number)
            done.append(number.name)


def test_what_is_held_comes_when_the_block_is_left() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT, done=done)
    assert done == ["SIGINT"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_block_inside_another_holds_for_both() -> None:
    done: list[str] = []

    def twice() -> None:
        with deferred():
            held(signal.SIGINT, done=done)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert done == ["SIGINT", "whole"]


def test_a_second_interrupt_comes_at_once() -> None:
    """This ends a block that would otherwise run forever."""
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        held(signal.SIGINT, signal.SIGINT, done=done)
    assert done == ["SIGINT"]


def test_a_termination_is_held_where_it_raises() -> None:
    done: list[str] = []
    with interrupt.raise_on_sigterm(), pytest.raises(SystemExit):
        held(signal.SIGTERM, done=done)
    assert done == ["SIGTERM"]
    with deferred():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_may_hold_too() -> None:
    """Signals reach the main thread only, and other threads must not install handlers."""
    done = []

    def run() -> None:
        with deferred():
            done.append("whole")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done == ["whole"]
