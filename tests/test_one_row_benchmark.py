"""``--smoke`` of ``benchmarks/one_row_h200.py``: every configuration has a step time, and the tables are put back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnplug_engine.kernels import gemm_tiles

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import one_row_h200


@pytest.mark.long
def test_every_configuration_is_timed(tmp_path: Path) -> None:
    kept, out = dict(gemm_tiles.ONE_ROW_CONFIGS), tmp_path / "found.json"
    one_row_h200.main(["--smoke", "--models", "mla", "--out", str(out)])
    steps = json.loads(out.read_text())["mla"]["step_us"]
    assert steps.keys() == one_row_h200.CONFIGURATIONS.keys() and min(steps.values()) > 0
    assert kept == gemm_tiles.ONE_ROW_CONFIGS
