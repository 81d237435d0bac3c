"""``benchmarks/mixed_h200.py`` on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import mixed_h200


def test_both_ways_are_measured_and_named_by_their_backends(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_h200, "ROUNDS", 1)
    monkeypatch.setattr("sys.argv", ["mixed_h200.py", "--smoke", "--out", str(tmp_path / "out.json")])
    mixed_h200.main()
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(len(row["whole_backends"]), len(row["apart_backends"])) for row in rows] == [(1, 2), (1, 1)]
    assert all(row["whole_ms"] > 0 < row["apart_ms"] and row["by_default"] == "whole" for row in rows)
