"""Steps: planned when the first layer runs, split between two backends, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnplug import Claims, ForwardMode, PlanError
from attnplug.host import KVPools, ModelAttention
from attnplug.wrappers.forwarding import SplitBackend
from attnplug_testing.errors import naming
from attnplug_vllm.geometry import GeometryBuilder
from attnplug_vllm.mha_step import CapturedMHAStep, EagerMHAStep, LayerCall, capture_key
from attnplug_vllm.planner import GroupPlanner
from attnplug_vllm.specs import mha_layer
from vllm_recorders import MHARecorder
from vllm_stage import Metadata, metadata

LAYER = mha_layer(0, heads=4, kv_heads=2, head_dim=16, scale=0.25)
GEOMETRIES = GeometryBuilder(page_size=16, pages=16)


def call(rows: int) -> LayerCall:
    q, kv = torch.zeros(rows, 4, 16), torch.zeros(rows, 2, 16)
    return LayerCall(LAYER, q, kv, kv, torch.zeros_like(q), True)


class Group:
    """The attention of a KV group over caches that a test can move."""

    def __init__(self, backend: Any) -> None:
        self.attention = ModelAttention(backend, KVPools())

    def ready(self) -> ModelAttention:
        return self.attention


def planner_of(backend: Any) -> GroupPlanner:
    return GroupPlanner(Group(backend), 8, 16)


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch, inside: bool) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: inside)
        yield


def test_a_step_is_planned_once_and_only_if_a_layer_runs():
    backend = MHARecorder()
    step = EagerMHAStep(planner_of(backend), GEOMETRIES, metadata([(20, 1), (3, 1)]))
    assert not backend.calls
    for _ in range(3):
        step.attend(call(2))
    assert [what for what, _ in backend.calls] == ["plan", "run", "run", "run"]


def test_rows_past_those_of_requests_are_not_given_to_the_backend():
    backend = MHARecorder()
    given = call(8)
    EagerMHAStep(planner_of(backend), GEOMETRIES, metadata([(20, 1), (3, 1)], padding=(0, 6))).attend(given)
    assert backend.calls[-1] == ("run", 2) and not given.out[2:].any()


def test_a_backend_without_out_has_its_result_copied():
    backend = MHARecorder(claims=Claims(needs_cpu_seq_lens=False))
    given = call(2)
    EagerMHAStep(planner_of(backend), GEOMETRIES, metadata([(20, 1), (3, 1)])).attend(given)
    assert (given.out == 2.0).all()


def test_two_backends_each_get_their_part_of_a_mixed_batch():
    prefill, decode = MHARecorder("prefill"), MHARecorder("decode")
    step = EagerMHAStep(
        planner_of(SplitBackend(prefill, decode)), GEOMETRIES, metadata([(20, 1), (9, 1), (0, 5), (2, 7)]), 1
    )
    given = call(14)
    step.attend(given)
    assert decode.calls == [("plan", ForwardMode.DECODE), ("run", 2)]
    assert prefill.calls == [("plan", ForwardMode.MIXED), ("run", 12)]
    assert (given.out == 2.0).all()


def test_a_batch_without_decodes_is_one_part():
    prefill, decode = MHARecorder("prefill"), MHARecorder("decode")
    EagerMHAStep(planner_of(SplitBackend(prefill, decode)), GEOMETRIES, metadata([(0, 5), (2, 7)]), 1).attend(call(12))
    assert not decode.calls and prefill.calls[-1] == ("run", 12)


def test_verifies_go_with_the_decodes():
    prefill, decode = MHARecorder("prefill"), MHARecorder("decode")
    geometries = GeometryBuilder(page_size=16, pages=16, verify=3)
    EagerMHAStep(planner_of(SplitBackend(prefill, decode)), geometries, metadata([(20, 3), (9, 3), (0, 8)]), 3).attend(
        call(14)
    )
    assert decode.calls == [("plan", ForwardMode.TARGET_VERIFY), ("run", 6)]
    assert prefill.calls == [("plan", ForwardMode.EXTEND), ("run", 8)]


@pytest.mark.parametrize("extras", [frozenset({"sinks"}), frozenset({"sinks", "out"})])
def test_sinks_go_with_every_part_of_a_batch(extras):
    backend, asked = MHARecorder(claims=Claims(needs_cpu_seq_lens=False, extras=extras)), []
    planner = planner_of(backend)
    planner.group.attention.attend = lambda q, *_, extras=None, **__: (asked.append(extras), q)[1]
    given = call(6)
    given.sinks = torch.ones(4)
    EagerMHAStep(planner, GEOMETRIES, metadata([(20, 1), (0, 5)]), 1).attend(given)
    assert [extra.sinks is given.sinks for extra in asked] == [True, True]
    assert all((extra.out is not None) is ("out" in extras) for extra in asked)


def capture(planner: GroupPlanner, batch: Metadata) -> CapturedMHAStep:
    return CapturedMHAStep(planner.capture(capture_key(batch), GEOMETRIES.captured(batch)))


def replay(planner: GroupPlanner, batch: Metadata) -> None:
    planner.replay(capture_key(batch), batch.seq_lens, batch.block_table_tensor, batch.slot_mapping)


def captured(backend: MHARecorder, batch: Metadata) -> tuple[GroupPlanner, CapturedMHAStep]:
    planner = planner_of(backend)
    return planner, capture(planner, batch)


def test_what_lengths_decide_is_made_first_inside_the_graph(monkeypatch):
    """The same metadata may serve runs that warm up, and the capture after them."""
    backend = MHARecorder()
    _, step = captured(backend, metadata([(0, 1)] * 4))
    with capturing(monkeypatch, inside=False):
        step.attend(call(4))
        step.attend(call(4))
    with capturing(monkeypatch, inside=True):
        step.attend(call(4))
        step.attend(call(4))
    names = [what for what, _ in backend.calls]
    assert names == ["reserve", "capture", "refill", "run", "run", "refill", "run", "run"]


def test_memory_for_graphs_is_reserved_once():
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    planner, _ = captured(backend, batch)
    capture(planner, metadata([(0, 1)] * 2))
    assert [what for what, _ in backend.calls] == ["reserve", "capture", "capture"]
    assert backend.calls[0] == ("reserve", (8, 16))


def test_a_replay_is_planned_for_the_shape_that_was_captured_and_no_other():
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    planner, _ = captured(backend, batch)
    replay(planner, batch)
    assert backend.calls[-1] == ("replay", ForwardMode.DECODE)
    replay(planner, metadata([(0, 1)] * 3))
    replay(planner, metadata([(0, 2), (0, 2)]))
    assert [what for what, _ in backend.calls].count("replay") == 1


def test_tensors_at_other_addresses_are_brought_to_where_the_graph_reads():
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    planner, step = captured(backend, batch)
    replay(planner, metadata([(33, 1), (2, 1), (5, 1)], padding=(1, 1)))
    geometry = step.planned.batch.geometry
    assert geometry.seq_lens.tolist() == [34, 3, 6, 0] and geometry.slots.tolist()[-1] == -1
    assert geometry.page_table[0, :3].tolist() == [1, 2, 3]


def test_what_was_captured_over_caches_that_are_gone_is_not_replayed():
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    planner, _ = captured(backend, batch)
    planner.group.attention = ModelAttention(backend, KVPools())
    replay(planner, batch)
    assert "replay" not in [what for what, _ in backend.calls]


def test_graphs_over_caches_that_are_gone_are_forgotten_when_others_are_captured():
    backend, batch = MHARecorder(), metadata([(0, 1)] * 4)
    planner, _ = captured(backend, batch)
    planner.group.attention = other = ModelAttention(MHARecorder(), KVPools())
    capture(planner, metadata([(0, 1)] * 2))
    replay(planner, batch)
    assert "replay" not in [what for what, _ in (*backend.calls, *other.backend.calls)]


def test_batches_of_equal_size_are_distinguished_by_their_tokens():
    """vLLM pads all requests that it takes to more tokens than they have, in graphs of several sizes."""
    planner, first = captured(MHARecorder(), metadata([(0, 1)] * 5, padding=(0, 3)))
    second = capture(planner, metadata([(0, 1)] * 5, padding=(0, 11)))
    replay(planner, metadata([(6, 1)] * 5, padding=(0, 3)))
    assert first.planned.batch.geometry.seq_lens.tolist() == [7] * 5
    assert second.planned.batch.geometry.seq_lens.tolist() == [1] * 5


def test_a_backend_that_wants_padded_requests_with_a_length_is_refused():
    with pytest.raises(PlanError, check=naming("recorder", 1, 0, "PIECEWISE")):
        captured(MHARecorder(fill=1), metadata([(0, 1)] * 4))
