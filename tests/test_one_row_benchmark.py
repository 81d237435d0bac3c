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
@pytest.mark.parametrize("model", ["mla", "llama-fp8"])
def test_every_configuration_is_timed(model: str, tmp_path: Path) -> None:
    fp8, out = model.endswith("-fp8"), tmp_path / "found.json"
    kept = one_row_h200.tables(fp8=fp8)
    one_row_h200.main(["--smoke", "--models", model, "--out", str(out)])
    steps = json.loads(out.read_text())[model]["step_us"]
    assert steps.keys() == one_row_h200.CONFIGURATIONS[fp8].keys() and min(steps.values()) > 0
    assert one_row_h200.tables(fp8=fp8) == kept


def test_what_ships_for_codes_is_among_the_configurations() -> None:
    measured = {
        (shape, config)
        for name, (one_row, _) in one_row_h200.CONFIGURATIONS[True].items()
        if name != "as chosen"
        for shape, config in one_row.items()
    }
    for table in (gemm_tiles.ONE_ROW_FP8_CONFIGS, gemm_tiles.LONG_WAIT_FP8_CONFIGS):
        assert measured >= set(table.items())
