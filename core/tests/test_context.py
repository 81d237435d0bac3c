"""The forward context carries the active backend (B6)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from attnplug import BackendError
from attnplug.host import active_backend, forward_context
from attnplug.layers.forward_context import active_linear, active_mla


def stand_in(name: str) -> Any:
    """The context only carries a backend; it asks nothing of it."""
    return name


def test_the_active_backend_is_the_contexts():
    """B6"""
    with forward_context(stand_in("a")) as backend:
        assert active_backend() is backend


def test_contexts_nest():
    """B6: a draft model runs inside its target's step."""
    with forward_context(stand_in("target")):
        with forward_context(stand_in("draft")):
            assert active_backend() == "draft"
        assert active_backend() == "target"


@pytest.mark.parametrize("active", [active_mla, active_linear])
def test_a_nested_context_inherits_nothing(active):
    """B6: a draft without MLA or linear layers must not run them on its target's cache."""
    target = stand_in("target")
    with forward_context(target, mla=target, linear=target):
        with forward_context(stand_in("draft")), pytest.raises(BackendError, match="its context has none"):
            active()
        assert active() is target


def test_without_a_context_there_is_an_error_that_says_what_to_do():
    """B6"""
    with pytest.raises(BackendError, match=r"with forward_context\(backend\)"):
        active_backend()


def test_the_context_ends_with_an_error_inside_it():
    """B6"""
    with pytest.raises(RuntimeError, match="inside"), forward_context(stand_in("a")):
        raise RuntimeError("inside")
    with pytest.raises(BackendError):
        active_backend()


def test_threads_have_contexts_of_their_own():
    """B6: two-batch overlap runs two at a time."""
    seen: dict[str, object] = {}
    entered = threading.Barrier(2)

    def run(name: str) -> None:
        with forward_context(stand_in(name)):
            entered.wait(timeout=60)
            seen[name] = active_backend()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": "a", "b": "b"}
