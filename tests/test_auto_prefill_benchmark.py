"""The benchmark of ``auto`` for prefill: its points, and the shares that it reports."""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import pytest
from attnplug_tune.points import Point, parse_points
from attnplug_tune.results import BenchRow

from attnplug import Role

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import auto_prefill


def row(side: str, us: float, point: Point, planned_by: str = "") -> BenchRow:
    counts = point.requests, point.length, point.tokens, point.ragged
    beside = point.decodes, point.decode_length
    return BenchRow(side, "layer", str(Role.PREFILL), *counts, us, us, us, 0.0, planned_by, *beside)


def test_a_share_is_that_of_the_backend_that_auto_chose() -> None:
    """The share uses the backend's own time, measured in one process with its other points, not auto's time."""
    first, second = parse_points("1x0+100,1x0+2k&32x4k")
    rows = [row("a", 10, first), row("b", 20, first), row("auto", 11, first, "a")]
    rows += [row("a", 40, second), row("b", 30, second), row("auto", 29, second, "a")]
    found = auto_prefill.summary(rows)
    assert [each["share"] for each in found["points"]] == [1.0, 0.75]
    layer = found["layers"]["layer"]
    assert (layer["points"], layer["below_goal"], layer["worst"]) == (2, 1, 0.75)
    assert layer["mean"] == {
        "auto": round(math.sqrt(0.75), 3),
        "a": round(math.sqrt(0.75), 3),
        "b": round(math.sqrt(0.5), 3),
    }


@pytest.mark.parametrize("smoke", [False, True])
def test_random_points_are_of_every_kind_and_off_the_measured_ones(smoke: bool) -> None:
    drawn = parse_points(",".join(auto_prefill.random_points(24, random.Random(1), smoke=smoke)))
    kinds = {(point.requests > 1, point.length > point.tokens, point.decodes > 0) for point in drawn}
    assert {(False, False, False), (True, False, False), (True, True, False), (False, False, True)} <= kinds
    measured = {(requests, new + prefix, new) for requests, new, prefix in auto_prefill.PREFILLS}
    assert not measured & {(point.requests, point.length, point.tokens) for point in drawn}


def test_every_group_can_be_parsed() -> None:
    for group in (*auto_prefill.GROUPS, *auto_prefill.FP8_GROUPS, *auto_prefill.SMOKE_GROUPS):
        points = ",".join(f"{requests}x{prefix}+{new}" for requests, new, prefix in group.points)
        assert len(parse_points(points)) == len(group.points)
