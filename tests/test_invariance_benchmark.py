"""``--smoke`` of ``benchmarks/invariance_h200.py`` and ``invariance_cpu.py``: results and costs, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import invariance_cpu
import invariance_h200


def test_claimed_levels_give_one_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: with the backend that runs without a GPU; other requests are in front of the request and behind it."""
    monkeypatch.setattr(invariance_h200, "COMPANIONS", (0, 2))
    out = tmp_path / "found.json"
    invariance_h200.main(["--smoke", "--out", str(out)])
    for found in json.loads(out.read_text())["distinct"].values():
        (with_levels,) = (counts for name, counts in found.items() if name.startswith("torch_native, "))
        assert set(with_levels.values()) == {1}
        assert all(1 <= count <= 3 for count in found["torch_native"].values())


@pytest.mark.long
def test_costs_of_levels_are_ratios_of_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of torch_native and the engine's models, decode and extend each."""
    monkeypatch.setattr(invariance_cpu, "ROUNDS", 1)
    out = tmp_path / "found.json"
    invariance_cpu.main(["--smoke", "--out", str(out)])
    found = json.loads(out.read_text())
    points = [*found["torch_native"], *(point for points in found["engine"].values() for point in points)]
    assert len(points) == 8 and {*found["engine"]} == {*invariance_cpu.MODELS}
    assert all(point["ratio"] == point["invariant_ms"] / point["default_ms"] > 0 for point in points)
