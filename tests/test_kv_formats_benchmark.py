"""``benchmarks/kv_formats_h200.py --smoke``: errors of every format against float64, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from kv_formats_h200 import main


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.sample(1)
def test_finer_scales_have_smaller_errors_with_outliers(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    main(["--smoke", "--kind", kind, "--out", str(out)])
    found = {name: error["relative"] for name, error in json.loads(out.read_text())["errors"]["outliers"].items()}
    assert found["bfloat16"] < found["fp8_per_token_head"] < found["float8_e4m3fn"] < found["nvfp4"] < 0.2
