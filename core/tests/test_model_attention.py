"""The facade that a model's layers find, and the context that carries it (B6)."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from attnplug import BackendError, DType, ForwardExtras, ForwardMode, GraphLevel, PlanError
from attnplug.host import KVPools, ModelAttention, active_attention
from attnplug.linear import LinearStatePool
from attnplug_testing.errors import raises_naming
from support.pools import linear_layer, mha_layer, mla_layer
from support.recorder import Hookless, Recorder, batch_in


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
    with raises_naming(BackendError, "layer 0", "MLA"):
        draft.attend_mla(None, None, mla_layer(), None, None)
    for run in (draft.attend_linear, lambda *a: draft.convolve(None, None, *a)):
        with raises_naming(BackendError, "layer 0", "linear"):
            run(None, linear_layer(), None)


def test_a_batch_that_is_marked_is_not_planned_again():
    """B1, B3: nor one that the old flag marks."""
    facade, batch = attention("a"), batch_in(ForwardMode.EXTEND)
    mine = facade.plan(batch)
    batch.mark_forward_metadata_ready()
    assert facade.plan(batch) is mine and len(facade.backend.calls) == 1
    flagged = batch_in(ForwardMode.EXTEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert facade.plan(flagged, skip_attn_backend_init=True) is None
    assert len(facade.backend.calls) == 1


@pytest.mark.parametrize("in_capture", [True, False], ids=["capture", "replay"])
def test_a_batch_planned_for_a_graph_is_marked(in_capture):
    """B2: capture and replay are pre-planners, so the forward path plans neither again."""
    facade, batch = attention("a"), batch_in(ForwardMode.DECODE)
    mine = facade.capture(batch, in_capture=in_capture)
    assert not batch.needs_forward_metadata_init() and not batch.plan_record.replan_equivalent
    facade.refill(batch)
    assert facade.plan(batch) is mine is batch.plan
    assert [member for member, _ in facade.backend.calls] == [
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
    ]
    assert facade.backend.given("init_forward_metadata_out_graph") == [
        {"forward_batch": batch, "in_capture": in_capture}
    ]


def test_every_replay_has_the_plan_that_the_backend_made_for_it():
    facade, batch = attention("a"), batch_in(ForwardMode.DECODE)
    first = facade.capture(batch, in_capture=True)
    second = facade.capture(batch)
    assert batch.plan is second is not first and second.attention is not first.attention


def test_memory_and_padding_of_graphs_are_the_backends_affair():
    facade = ModelAttention(Recorder("a", fill=3), KVPools())
    facade.reserve(4, 8)
    assert facade.backend.given("init_cuda_graph_state") == [{"max_bs": 4, "max_num_tokens": 8}]
    assert facade.padding_length() == 3 and facade.graph_level is GraphLevel.ALWAYS


@pytest.mark.parametrize(
    ("hook", "use"),
    [
        ("init_cuda_graph_state", lambda facade: facade.reserve(4, 4)),
        ("get_cuda_graph_seq_len_fill_value", lambda facade: facade.padding_length()),
        ("init_forward_metadata_out_graph", lambda facade: facade.capture(batch_in(ForwardMode.DECODE))),
        ("init_forward_metadata_in_graph", lambda facade: facade.refill(batch_in(ForwardMode.DECODE))),
    ],
)
def test_a_backend_without_graph_hooks_captures_nothing(hook, use):
    facade = ModelAttention(Hookless(), KVPools())
    with raises_naming(BackendError, "hookless", "cuda_graph", "NEVER", hook):
        use(facade)


def test_a_plan_for_a_graph_that_is_not_one_names_the_hook():
    class Mute(Recorder):
        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            return None

    with raises_naming(PlanError, "mute", "init_forward_metadata_out_graph", None):
        ModelAttention(Mute("mute"), KVPools()).capture(batch_in(ForwardMode.DECODE))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_a_layer_gives_the_backend_all_that_it_was_given(mode):
    facade, layer, batch, extras = attention("a"), mha_layer(), batch_in(mode), ForwardExtras()
    q, facade.backend.result = torch.zeros(2, 2, 8), torch.zeros(2, 2, layer.v_head_dim)
    given = {"q": q, "k": "k", "v": "v", "layer": layer, "batch": batch, "save_kv_cache": False, "extras": extras}
    for _ in range(3):  # the first result is checked, and the method called directly from the third call on
        assert facade.attend(q, "k", "v", layer, batch, save_kv_cache=False, extras=extras) is facade.backend.result
        assert facade.backend.calls.pop() == (f"forward_{mode}", given)


def test_a_convolution_gives_the_backend_all_that_it_was_given():
    pool = LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    facade = ModelAttention(Recorder("a"), KVPools(linear=pool))
    x = facade.backend.result = torch.zeros(2, 8)
    facade.convolve(x, "weight", "bias", linear_layer(), "batch", silu=False)
    (given,) = facade.backend.given("forward_conv")
    assert list(given.values()) == [x, "weight", "bias", linear_layer(), "batch", False]


def test_a_whole_delta_layer_gives_the_backend_all_that_it_was_given():
    pool = LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    facade = ModelAttention(Recorder("a"), KVPools(linear=pool))
    facade.backend.result = None
    facade.attend_delta("inputs", linear_layer(), "batch")
    (given,) = facade.backend.given("forward_delta")
    assert list(given.values()) == ["inputs", linear_layer(), "batch"]


def test_a_backend_without_whole_delta_layers_leaves_them_to_the_parts():
    """A8"""
    pool = LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    backend = Recorder("a")
    backend.forward_delta = None
    assert ModelAttention(backend, KVPools(linear=pool)).attend_delta("inputs", linear_layer(), "batch") is None


def test_accepted_rows_are_committed_where_there_are_states():
    pool = LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    facade = ModelAttention(Recorder("a"), KVPools(linear=pool))
    facade.commit_states("batch", "accepted")
    assert facade.backend.given("commit_states") == [{"forward_batch": "batch", "accepted": "accepted"}]
    without = attention("b")
    without.commit_states("batch", "accepted")
    assert not without.backend.calls


def test_a_backend_that_cannot_commit_states_is_refused_by_name():
    pool = LinearStatePool([linear_layer()], num_slots=1, dtype=DType.FLOAT32, device="cpu")
    backend = Recorder("a")
    backend.commit_states = None
    with raises_naming(BackendError, "a", "commit_states"):
        ModelAttention(backend, KVPools(linear=pool)).commit_states("batch", "accepted")


def test_outside_of_a_run_there_is_an_error_that_says_what_to_do():
    """B6"""
    with raises_naming(BackendError, "attention.running()"):
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
