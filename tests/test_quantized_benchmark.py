"""``--smoke`` of the benchmarks of quantized weights: every part runs without a GPU, and fp8 halves the limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import decode_models
import quantized_products_h200
import split_products_h200
from quantized_h200 import limit_us, main

from attnplug_engine.kernels.gemm_tiles import choose_few_codes
from attnplug_engine.kernels.quantized_configs import CONFIGS


@pytest.mark.long
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    main(["--smoke", "--models", "llama", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["llama"]["1 × 512"]["speedup"].keys() == {"bfloat16"}, found["llama"]


def test_fp8_halves_the_limit_of_weights() -> None:
    config = decode_models.MODELS["llama"]
    assert 0.5 < limit_us(config, 1, 512) / decode_models.limit_us(config, 1, 512) < 0.56


@pytest.mark.long
def test_products_of_every_format_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    quantized_products_h200.main(["--smoke", "--out", str(out)])
    found = json.loads(out.read_text())
    assert all(found[form]["error"] < 1e-3 and found[form]["configs"] for form in ("fp8", "int4", "mxfp4"))


@pytest.mark.long
def test_split_products_of_every_configuration_run(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    split_products_h200.main(["--smoke", "--out", str(out)])
    found = json.loads(out.read_text())["smoke"]
    assert len(found) > 15
    assert all(one["same"] and one["error"] < 0.01 for one in found.values())


def test_the_sweep_has_the_configurations_that_are_used() -> None:
    """For 1 and 16 rows: those of a measured default would otherwise not be compared with it."""
    for shape, (outputs, width) in quantized_products_h200.SHAPES.items():
        parts = 2 if shape in quantized_products_h200.GATED else 1
        assert choose_few_codes(outputs // parts, width, parts) in quantized_products_h200.FEW_ROWS[shape], shape
    for form, named in (("fp8", "scaled"), ("int4", "int4"), ("mxfp4", "mxfp4")):
        used = {config for most, _, config in CONFIGS[named] if most == 16}
        assert used and used <= set(quantized_products_h200.CANDIDATES[form][16])
