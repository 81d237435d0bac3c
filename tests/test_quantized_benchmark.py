"""``benchmarks/quantized_h200.py --smoke``: every part runs without a GPU, and fp8 halves the limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import decode_models
from quantized_h200 import limit_us, main


def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    main(["--smoke", "--models", "llama", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["llama"]["1 × 512"]["speedup"].keys() == {"bfloat16"}, found["llama"]
    assert all(
        entry["error"] < 1e-6 for name in ("fp8", "int4", "mxfp4") for entry in found[f"products, {name}"].values()
    )


def test_fp8_halves_the_limit_of_weights() -> None:
    config = decode_models.MODELS["llama"]
    assert 0.5 < limit_us(config, 1, 512) / decode_models.limit_us(config, 1, 512) < 0.56
