"""Sparse layers over rows that HiSparse brings in."""

from __future__ import annotations

import pytest

from interpreted_mla import build
from support.hot_scene import HotScene
from support.stage import error
from test_sparse import CASES, judge, tolerance


@pytest.mark.parametrize("name", ["decode", "extend", "verify of trees"])
def test_rows_from_the_host_are_attended_to_as_float64_does(name):
    """A10: the coordinator came with the context."""
    stage = HotScene(CASES[name], "cpu", build)
    batch = stage.planned()
    selected = stage.backend.select(stage.index(), stage.layer, batch)
    wanted, wanted_lse = stage.wanted(judge(stage, selected))
    for layer in (stage.layer, stage.shared):
        out, lse = stage.attend(batch, selected, layer)
        assert error(out[: len(wanted)], wanted) < tolerance(stage)
        assert error(lse[: len(wanted)], wanted_lse) < tolerance(stage)
