"""The facade that a model's layers find, and the context that carries it (B6)."""

from __future__ import annotations

import threading

import pytest

from attnplug import BackendError
from attnplug.host import KVPools, ModelAttention, active_attention
from support.pools import linear_layer, mla_layer
from support.recorder import Recorder


def attention(name: str) -> ModelAttention:
    return ModelAttention(Recorder(name), KVPools())


def test_layers_find_the_attention_that_runs():
    """B6"""
    with attention("a").running() as running:
        assert active_attention() is running


def test_contexts_nest():
    """B6: a draft model runs inside its target's step."""
    with attention("target").running() as target:
        with attention("draft").running() as draft:
            assert active_attention() is draft
        assert active_attention() is target


def test_a_model_without_such_layers_runs_none_on_anybodys_cache():
    """B6: a draft without MLA or linear layers must not run them on its target's."""
    draft = attention("draft")
    with pytest.raises(BackendError, match="layer 0 is MLA, but the model was built without an MLA pool"):
        draft.attend_mla(None, None, mla_layer(), None, None)
    for run in (draft.attend_linear, lambda *a: draft.convolve(None, None, *a)):
        with pytest.raises(BackendError, match="layer 0 is linear, but the model was built without a pool of states"):
            run(None, linear_layer(), None)


def test_outside_of_a_run_there_is_an_error_that_says_what_to_do():
    """B6"""
    with pytest.raises(BackendError, match=r"with attention.running\(\)"):
        active_attention()


def test_the_context_ends_with_an_error_inside_it():
    """B6"""
    with pytest.raises(RuntimeError, match="inside"), attention("a").running():
        raise RuntimeError("inside")
    with pytest.raises(BackendError):
        active_attention()


def test_threads_have_contexts_of_their_own():
    """B6: two-batch overlap runs two at a time."""
    seen: dict[str, str] = {}
    entered = threading.Barrier(2)

    def run(name: str) -> None:
        with attention(name).running():
            entered.wait(timeout=60)
            seen[name] = active_attention().backend.backend_id.name

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": "a", "b": "b"}
