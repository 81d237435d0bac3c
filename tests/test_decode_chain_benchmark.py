"""``benchmarks/decode_chain_h200.py`` on a CPU, its kernels against float64, and their compilation for SM 90."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from attnplug_engine.kernels.gemm_tiles import GemmConfig
from attnplug_testing.triton_mode import compiled_by

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import decode_chain_h200
from decode_chain_kernels import PIECE, Fetched, early_skinny_gemm, early_streamed_gemm, fetch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled on a GPU, not interpreted")
ROUNDING = 2**-11  # of float16


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("model", "requests"), [("llama", "1"), ("llama", "16"), ("mla", "1"), ("mla", "16")])
@pytest.mark.sample(1)
def test_every_kind_of_variant_agrees_with_the_base(tmp_path: Path, model: str, requests: str) -> None:
    """The base agrees with float64, too."""
    out = tmp_path / "found.json"
    decode_chain_h200.main(["--smoke", "--models", model, "--requests", requests, "--out", str(out)])
    (found,) = (value for value in json.loads(out.read_text()).values() if isinstance(value, dict))
    assert not found["errors"] and not found["left_out"]
    assert found["base_error"] < 4 * ROUNDING
    assert {name[0] for name in found["difference"]} == set("abc")
    assert max(found["difference"].values()) < 4 * ROUNDING


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_with_weights_held_early_is_float64s(gated: bool) -> None:
    x, weight, onto = (torch.randn(*sizes).half() for sizes in ((3, 96), (80, 96), (3, 80)))
    config = GemmConfig(32, 32, 4, tiles=True, stages=2)
    found = early_streamed_gemm(x, weight, config, onto=None if gated else onto, gated=gated, held=32)
    wanted = x.double() @ weight.double().t()
    gate, up = wanted.chunk(2, -1)
    assert error(found, F.silu(gate) * up if gated else wanted + onto.double()) < ROUNDING


def test_a_product_that_fetches_is_float64s() -> None:
    x, weight, onto = (torch.randn(*sizes).half() for sizes in ((1, 64), (24, 64), (1, 24)))
    then = torch.randn(64, 64).half()
    found = early_skinny_gemm(x, weight, GemmConfig(8, 64, 4), onto, Fetched(then, then.nbytes))
    assert error(found, onto.double() + x.double() @ weight.double().t()) < ROUNDING


@pytest.mark.parametrize(("first", "nbytes"), [(3, 2), (3, 9), (0, 6), (3, 100)])
def test_the_next_weights_are_fetched_once(first: int, nbytes: int) -> None:
    """Weights of the first matrix, then equally many of the gate and of ``up``, and nothing behind them."""
    words = PIECE // 4
    before, then = (torch.randint(1, 1000, (pieces, words), dtype=torch.int32) for pieces in (3, 12))
    sums = torch.zeros(5, dtype=torch.int32)
    fetch(Fetched(then, nbytes * PIECE, before if first else None), sums, 5, "load")
    rest = max(nbytes - first, 0) // 2
    gate, up = then.chunk(2)
    assert int(sums.sum()) == int(before[: min(first, nbytes)].sum() + gate[:rest].sum() + up[:rest].sum())


@pytest.mark.cross_compile
def test_kernels_compile_for_a_gpu_and_load_before_they_wait() -> None:
    """Nothing is stored before the wait, and nothing is spilled."""
    pytest.importorskip("triton")
    found = {one["kernel"]: one for one in compiled_by(Path(__file__).with_name("compile_decode_chain.py"))}
    assert not any(one["stores"] or one["spilled"] for one in found.values())
    assert max(one["shared"] for one in found.values()) <= 227 << 10
    for name, one in found.items():
        assert one["loads"] > 0 or ("held" not in name and name != "skinny")
        assert one["prefetches"] > 0 or "held" in name or name == "fetch, load"
