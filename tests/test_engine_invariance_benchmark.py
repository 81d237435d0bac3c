"""``benchmarks/engine_invariance_h200.py`` on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import engine_invariance_h200


@pytest.mark.long
def test_schedules_and_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: a model that no backend serves is listed with the reason."""
    monkeypatch.setattr(engine_invariance_h200, "ROUNDS", 1)
    given = ["--smoke", "--models", "llama", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["engine_invariance_h200.py", *given])
    engine_invariance_h200.main()
    found = json.loads((tmp_path / "out.json").read_text())["models"]["llama"]
    assert found["schedules"]["schedules"] == 2 and found["schedules"]["differing"] == {}
    assert [point["speed"] > 0 for point in found["costs"]["points"]] == [True, True]
