"""``benchmarks/transformers_h200.py`` on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import transformers_h200


@pytest.mark.long
def test_every_implementation_is_measured_at_every_point(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_h200, "ROUNDS", 1)
    monkeypatch.setattr("sys.argv", ["transformers_h200.py", "--smoke", "--out", str(tmp_path / "out.json")])
    transformers_h200.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert sorted((row["implementation"], row["batch"]) for row in rows) == [
        ("attnplug:torch_native", 1),
        ("attnplug:torch_native", 3),
        ("sdpa", 1),
        ("sdpa", 3),
    ]
    assert all(row["step_us"][0] > 0 and row["agree"] == 1 for row in rows)
    assert all(row["speed_up"] == 1 for row in rows if row["implementation"] == "sdpa")


def test_an_installation_without_flash_attention_is_measured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_h200, "find_spec", lambda module: None)
    assert transformers_h200.installed() == ["sdpa", *transformers_h200.OURS]
    monkeypatch.setattr(transformers_h200, "find_spec", lambda module: module == "flash_attn_interface")
    assert transformers_h200.installed()[1] == "flash_attention_3"
