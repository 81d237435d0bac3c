"""Functions of wrappers that the capture of graphs uses: the same children for a comparison, and captured extends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from attnplug import Claims, ForwardBatch, ForwardMode, Geometry, GraphLevel, ModelSpec, Plan, Role
from attnplug.auto.fastest import FastestBackend
from attnplug.auto.schedule import BackendSchedule
from attnplug.contract.batch import BackendId
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_engine.graphs.capture_check import plan_alike
from attnplug_engine.graphs.prefill import captures_extends
from attnplug_testing.specs import GDN, MHA


class Planner:
    """A backend that only plans, without metadata."""

    def __init__(self, name: str, level: GraphLevel = GraphLevel.NEVER) -> None:
        self.backend_id, self.claims = BackendId(name), Claims(cuda_graph=level)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        return Plan.of(self.backend_id, batch.geometry)


def planner(name: str, level: GraphLevel = GraphLevel.NEVER) -> Any:
    return Planner(name, level)


def batch(lengths: Sequence[int]) -> ForwardBatch:
    table = torch.zeros(len(lengths), 64, dtype=torch.int32)
    return ForwardBatch(Geometry.of_lengths(ForwardMode.DECODE, table, [1] * len(lengths), lengths, 64))


def test_an_eager_batch_is_planned_by_the_children_of_the_captured_one():
    """The children do not depend on the eager batch's lengths, for which the schedule would choose another child."""
    times = {"short": {(1, 1, 1): 1.0, (1, 1000, 1): 3.0}, "long": {(1, 1, 1): 3.0, (1, 1000, 1): 1.0}}
    short = planner("short")
    both = FastestBackend({"short": short, "long": planner("long")}, {Role.DECODE: BackendSchedule(times)})
    model = ModelSpec("m", "test", (GDN, MHA), 64)
    outer = HybridLinearBackend(SplitBackend(planner("p"), both), planner("linear"), model)
    plan = outer.init_forward_metadata(batch([900]))
    again = plan_alike(outer, plan, batch([2, 3]))
    assert again.planner_names() == plan.planner_names() == ["long", "linear"] and again.query_rows == 2
    assert outer.init_forward_metadata(batch([2, 3])).planner_names() == ["short", "linear"]
    assert plan_alike(short, short.init_forward_metadata(batch([1])), batch([1])).planner_names() == ["short"]


@pytest.mark.parametrize("level", [GraphLevel.DECODE, GraphLevel.UNIFORM])
def test_extends_are_captured_if_all_backends_or_one_child_can(level: GraphLevel):
    children = {"prefill": planner("prefill", level), "decode": planner("decode", GraphLevel.ALWAYS)}
    serving = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    assert captures_extends(FastestBackend(children, serving, captured_extends="decode"))
    assert not captures_extends(FastestBackend(children, serving))
    assert captures_extends(children["decode"]) and not captures_extends(children["prefill"])
