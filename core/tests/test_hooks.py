"""bind_hook: an optional hook is called by its own signature, looked up once (A8)."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from attnplug.contract.backend import bind_hook
from attnplug.host import HookError
from attnplug_testing.errors import raises_naming

OFFERED = ("forward_batch", "disable_flashinfer_ragged")
OFFER = (OFFERED, ("disable_flashinfer_ragged",))
"""Arguments that are offered, and those of them that a hook may ignore."""


def call(hook: Any) -> Any:
    """Bind a hook and call it with a batch called "batch" and the flag set."""
    bound = bind_hook(SimpleNamespace(hook=hook), "hook", *OFFER)
    assert bound is not None
    return bound("batch", True)


def test_two_parameter_hook_gets_the_flag():
    """A8: with disable_flashinfer_ragged if the hook accepts it."""
    assert call(lambda forward_batch, disable_flashinfer_ragged=False: (forward_batch, disable_flashinfer_ragged)) == (
        "batch",
        True,
    )


def test_one_parameter_hook_gets_no_flag():
    """A8: without it if not. Passing it always is the original's TypeError."""
    assert call(lambda forward_batch: forward_batch) == "batch"


def test_absent_hook_is_none():
    """A8: not at all if there is no hook."""
    assert bind_hook(SimpleNamespace(), "hook", OFFERED) is None


def test_hook_that_is_none_is_absent():
    assert bind_hook(SimpleNamespace(hook=None), "hook", OFFERED) is None


@pytest.mark.parametrize(
    ("hook", "result"),
    [
        (lambda batch: batch, "batch"),
        (lambda fb, /: fb, "batch"),
        (lambda fb=None: fb, "batch"),
        (lambda disable_flashinfer_ragged, forward_batch: (forward_batch, disable_flashinfer_ragged), ("batch", True)),
        (lambda disable_flashinfer_ragged, batch: (batch, disable_flashinfer_ragged), ("batch", True)),
        (lambda forward_batch, *, disable_flashinfer_ragged: disable_flashinfer_ragged, True),
        (lambda *, forward_batch: forward_batch, "batch"),
        (
            lambda forward_batch, stream=7, disable_flashinfer_ragged=False: (stream, disable_flashinfer_ragged),
            (7, True),
        ),
        (lambda forward_batch, **rest: rest, {"disable_flashinfer_ragged": True}),
        (lambda **rest: rest, {"forward_batch": "batch", "disable_flashinfer_ragged": True}),
        (lambda *args: args, ("batch", True)),
        (lambda *args, **rest: (args, rest), (("batch",), {"disable_flashinfer_ragged": True})),
        (lambda first, *args: (first, args), ("batch", (True,))),
    ],
)
def test_every_shape_of_signature(hook, result):
    assert call(hook) == result


def test_partial_hides_what_it_filled():
    def hook(stream, forward_batch, disable_flashinfer_ragged):
        return stream, forward_batch, disable_flashinfer_ragged

    assert call(functools.partial(hook, "stream")) == ("stream", "batch", True)
    assert call(functools.partial(lambda batch, stream: (batch, stream), stream="stream")) == ("batch", "stream")


def test_bound_method_classmethod_and_staticmethod():
    class Backend:
        def method(self, forward_batch):
            return self, forward_batch

        @classmethod
        def of_class(cls, forward_batch, disable_flashinfer_ragged=False):
            return cls, disable_flashinfer_ragged

        @staticmethod
        def static(forward_batch):
            return forward_batch

    backend = Backend()
    assert bind_hook(backend, "method", *OFFER)("batch", True) == (backend, "batch")
    assert bind_hook(backend, "of_class", *OFFER)("batch", True) == (Backend, True)
    assert bind_hook(backend, "static", *OFFER)("batch", True) == "batch"


def test_decorator_that_takes_anything_is_seen_through():
    def traced(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return "traced", function(*args, **kwargs)

        return wrapper

    class Backend:
        @traced
        def one(self, forward_batch):
            return forward_batch

        @traced
        @traced
        def two(self, forward_batch, *, disable_flashinfer_ragged=False):
            return forward_batch, disable_flashinfer_ragged

    assert bind_hook(Backend(), "one", *OFFER)("batch", True) == ("traced", "batch")
    assert bind_hook(Backend(), "two", *OFFER)("batch", True) == ("traced", ("traced", ("batch", True)))


def test_decorator_with_parameters_of_its_own_is_called_by_those():
    """``__wrapped__`` leads to the decorated function, but a call reaches the wrapper, so its signature counts."""

    def narrow(function):
        @functools.wraps(function)
        def wrapper(self, forward_batch):
            return function(self, forward_batch, disable_flashinfer_ragged="chosen by the wrapper")

        return wrapper

    class Backend:
        @narrow
        def hook(self, forward_batch, disable_flashinfer_ragged):
            return disable_flashinfer_ragged

    assert bind_hook(Backend(), "hook", *OFFER)("batch", True) == "chosen by the wrapper"


def test_callable_object_and_callable_without_a_signature():
    class Callable:
        def __call__(self, forward_batch):
            return forward_batch

    assert call(Callable()) == "batch"
    assert bind_hook(SimpleNamespace(hook=max), "hook", ("a", "b"))(3, 5) == 5


def test_required_parameter_that_nobody_offers_is_refused_by_name_when_bound():
    """A8: refused there, by name, not in the middle of a prefill."""

    class ThirdParty:
        def init_mha_chunk_metadata(self, forward_batch, stream):
            raise AssertionError("never called")

    with raises_naming(HookError, "ThirdParty", "init_mha_chunk_metadata", "'stream'", *OFFERED):
        bind_hook(ThirdParty(), "init_mha_chunk_metadata", OFFERED)


def test_keyword_only_required_parameter_that_nobody_offers_is_refused():
    with raises_naming(HookError, "'stream'"):
        call(lambda forward_batch, *, stream: None)


@pytest.mark.parametrize("hook", [lambda q, call: q, lambda: None, lambda q, stream=None, lse=None, /: q])
def test_what_the_caller_needs_honoured_is_never_dropped(hook):
    """A8: only arguments that a hook may ignore are dropped. Without ``lse``, a merge would read uninitialized
    memory."""
    with pytest.raises(HookError, match=r"SimpleNamespace.hook\(.*\) does not accept .*'lse'.*Add the parameter"):
        bind_hook(SimpleNamespace(hook=hook), "hook", ("q", "call", "lse"), ("call",))


def test_what_cannot_be_called_is_refused():
    with raises_naming(HookError, 42):
        bind_hook(SimpleNamespace(hook=42), "hook", OFFERED)


def test_property_that_fails_is_not_taken_for_an_absent_hook():
    class Backend:
        @property
        def hook(self):
            raise AttributeError("mha_chunk_kv_cache")

    with raises_naming(AttributeError, "mha_chunk_kv_cache"):
        bind_hook(Backend(), "hook", OFFERED)


def test_hook_that_takes_the_whole_offer_is_returned_as_it_is():
    class Backend:
        def hook(self, forward_batch, disable_flashinfer_ragged=False):
            return None

    backend = Backend()
    assert bind_hook(backend, "hook", OFFERED) == backend.hook


def test_introspection_happens_once(monkeypatch):
    """A8: introspection happens once, when the wrapper is built."""
    import inspect

    bound = bind_hook(SimpleNamespace(hook=lambda forward_batch: forward_batch), "hook", *OFFER)
    monkeypatch.setattr(inspect, "signature", lambda *a, **k: pytest.fail("inspected again"))
    assert bound is not None and bound("batch", True) == "batch"


def test_an_error_inside_the_hook_is_the_hooks_own():
    def hook(forward_batch):
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        call(hook)
