"""Products of one or two rows from weights in shared memory, against float64: interpreted, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from attnplug.hf.model_config import model_from_config
from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.kernels import gemm_tiles, preloaded_gemm, skinny_fp8_gemm, skinny_gemm
from attnplug_engine.kernels.gemm_tiles import (
    LONG_WAIT_CONFIGS,
    LONG_WAIT_FP8_CONFIGS,
    ONE_ROW_CONFIGS,
    ONE_ROW_FP8_CONFIGS,
    GemmConfig,
    choose_codes,
    choose_few_codes,
)
from attnplug_engine.models.architectures import build_model
from attnplug_engine.models.layers import MLP, QuantizedLinear, silu_and_mul
from attnplug_engine.quantization.fp8 import Fp8Blocks, Fp8Channels
from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme, dequantized
from attnplug_testing.devices import DEVICES
from attnplug_testing.gluon_interpreter import interpreted, mutant
from attnplug_testing.gluon_scheduler import GluonError

BOUNDS = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Allowed error relative to the largest number: a last bit or two of float32, half a step of the short types."""
SHAPES = {
    # rows, inputs, outputs, configuration, gated, norm, onto, bias
    "one block per program": (1, 256, 70, GemmConfig(4, 256, 4, stages=1, along=2), True, True, False, False),
    "several blocks per program": (1, 512, 99, GemmConfig(2, 256, 4, stages=3, programs=2), True, True, False, True),
    "long rows": (1, 2048, 45, GemmConfig(4, 2048, 4, stages=3, along=2, programs=1), True, True, False, False),
    "fewer blocks than parts": (1, 256, 5, GemmConfig(2, 256, 2, stages=3, programs=1), False, True, False, False),
    "a residual": (2, 768, 33, GemmConfig(4, 256, 4, stages=2, programs=3), False, False, True, True),
    "two rows": (2, 512, 40, GemmConfig(4, 512, 4, stages=1, along=2), True, True, False, False),
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SCHEMES = {
    "16-bit": None,
    "fp8 blocks": Fp8Blocks(),
    "small fp8 blocks": Fp8Blocks(16, 32),
    "odd fp8 blocks": Fp8Blocks(20, 128),  # rows of a block of the product are in two blocks of the scheme
    "fp8 channels": Fp8Channels(),
}
"""Schemes of weights; None: in the dtype of the input."""


class Product:
    """A product with NaN around its input, its residual and its weights."""

    def __init__(self, name: str, device: str, dtype: torch.dtype, scheme: Scheme | None = None) -> None:
        self.rows, self.inputs, self.outputs, self.config, self.gated, norm, onto, bias = SHAPES[name]
        self._random, self._to = torch.Generator().manual_seed(len(name)), {"device": device, "dtype": dtype}
        lines = self.outputs * (2 if self.gated else 1)
        self.x = self._inside(self.rows, self.inputs)
        self.scheme, self.scales = scheme, None
        weight = self._normal(lines, self.inputs) / self.inputs**0.5
        if scheme is not None:
            tensors = scheme.quantize(weight.float())
            (scales,) = (tensor for key, tensor in tensors.items() if "scale" in key)
            self.scales, weight = scales.to(device), tensors["weight"]
        memory = torch.full((lines + 8, self.inputs), torch.nan, device=device, dtype=weight.dtype)
        self.weight = memory[:lines].copy_(weight)
        self.norm = (self._normal(self.inputs), 1e-3) if norm else None
        self.onto = self._inside(self.rows, self.outputs) if onto else None
        self.bias = self._normal(lines) if bias else None

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(**self._to)

    def _inside(self, rows: int, width: int) -> Tensor:
        memory = torch.full((rows + 1, width + 16), torch.nan, **self._to)
        memory[:rows, 8 : 8 + width] = self._normal(rows, width)
        return memory[:rows, 8 : 8 + width]

    def found(self) -> Tensor:
        options = {"bias": self.bias, "norm": self.norm, "gated": self.gated, "onto": self.onto}
        if self.scheme is None:
            return skinny_gemm.skinny_gemm(self.x, self.weight, self.config, **options)
        options |= {"group": self.scheme.group, "rows_per_scale": self.scheme.rows_per_scale}
        return skinny_fp8_gemm.skinny_fp8_gemm(self.x, self.weight, self.scales, self.config, **options)

    def wanted(self) -> Tensor:
        x = self.x.double()
        if self.norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + self.norm[1]).rsqrt() * self.norm[0].double()
        weight = self.weight
        if self.scheme is not None:
            weight = dequantized(self.scheme, weight, self.scales, self.scheme.rows_per_scale)
        found = x @ weight.double().T
        if self.bias is not None:
            found = found + self.bias.double()
        if self.gated:
            gate, up = found.chunk(2, dim=-1)
            found = F.silu(gate) * up
        return found if self.onto is None else found + self.onto.double()

    def error(self) -> float:
        """Largest difference, as a share of the largest number."""
        wanted = self.wanted()
        return float((self.found().double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("scheme", "seed"), [("16-bit", 0), ("16-bit", 1), *((name, 2) for name in SCHEMES if "fp8" in name)]
)
def test_products_are_float64s(name: str, scheme: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies complete in any order."""
    monkeypatch.setattr(preloaded_gemm, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(preloaded_gemm, "_preloaded_gemm", interpreted(preloaded_gemm._preloaded_gemm, seed))
    assert Product(name, "cpu", torch.float32, SCHEMES[scheme]).error() <= BOUNDS[torch.float32]


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", SHAPES)
def test_products_are_float64s_on_a_gpu(name: str, scheme: str, dtype: torch.dtype, device: str) -> None:
    assert Product(name, device, dtype, SCHEMES[scheme]).error() <= BOUNDS[dtype]


def test_a_block_that_is_not_waited_for_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(preloaded_gemm, "wait_group(STAGES - 1)", "wait_group(STAGES)", tmp_path)
    monkeypatch.setattr(wrong, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(skinny_gemm, "preloaded_gemm", wrong.preloaded_gemm)
    monkeypatch.setattr(wrong, "_preloaded_gemm", interpreted(wrong._preloaded_gemm, 0))
    with pytest.raises(GluonError, match="copy"):
        Product("several blocks per program", "cpu", torch.float32).found()


def test_they_are_chosen_for_one_row_where_kernels_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(2, 2048, dtype=torch.bfloat16), torch.zeros(16384, 2048, dtype=torch.bfloat16)
    assert not gemm_tiles.choose(x[:1], weight, gated=True).stages
    monkeypatch.setattr(gemm_tiles, "starts_early", lambda device: True)
    assert gemm_tiles.choose(x[:1], weight, gated=True) is ONE_ROW_CONFIGS[16384, 2048]
    assert gemm_tiles.choose(x[:1], weight, gated=True, long_wait=True) is LONG_WAIT_CONFIGS[16384, 2048]
    assert gemm_tiles.choose(x[:1], weight[:3072], long_wait=True) is ONE_ROW_CONFIGS[3072, 2048]
    assert not gemm_tiles.choose(x, weight, gated=True).stages


def test_they_are_chosen_for_one_row_of_codes_where_kernels_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, shape = torch.device("cpu"), (16384, 2048)
    assert choose_codes(1, *shape, cpu, gated=True) is choose_few_codes(8192, 2048, 2)
    monkeypatch.setattr(gemm_tiles, "starts_early", lambda device: True)
    assert choose_codes(1, *shape, cpu, gated=True) is ONE_ROW_FP8_CONFIGS[shape]
    assert choose_codes(1, *shape, cpu, gated=True, long_wait=True) is LONG_WAIT_FP8_CONFIGS[shape]
    assert choose_codes(1, 3072, 2048, cpu, long_wait=True) is ONE_ROW_FP8_CONFIGS[3072, 2048]
    assert choose_codes(2, *shape, cpu, gated=True) is choose_few_codes(8192, 2048, 2)


def test_quantized_products_are_chosen_by_their_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration reaches the kernel."""
    pytest.importorskip("triton")
    from attnplug_engine.kernels import quantized_gemm

    chosen = []
    monkeypatch.setattr(gemm_tiles, "starts_early", lambda device: True)
    monkeypatch.setattr(quantized_gemm, "skinny_fp8_gemm", lambda x, codes, scales, config, **_: chosen.append(config))
    codes = torch.zeros(16384, 2048, dtype=torch.float8_e4m3fn)
    layer = QuantizedLinear(QuantizedWeight(Fp8Blocks(), codes, torch.ones(128, 16), 128))
    layer.weight.on_gpu = True
    for long in (False, True):
        layer.long_wait = long
        layer(torch.zeros(1, 2048, dtype=torch.bfloat16), activate=silu_and_mul)
    assert chosen == [ONE_ROW_FP8_CONFIGS[16384, 2048], LONG_WAIT_FP8_CONFIGS[16384, 2048]]


@pytest.mark.parametrize("quantization", [{}, {"quantization_config": FP8}], ids=["", "fp8"])
@pytest.mark.parametrize(("model_type", "long"), [("deepseek_v3", True), ("llama", False)])
def test_the_mlp_behind_latent_attention_has_a_long_wait(model_type: str, long: bool, quantization: dict) -> None:
    keys = {**TINY_CONFIGS[model_type], **quantization}
    config = model_from_config(keys, model_type)
    model = build_model(RandomCheckpoint(keys), config, dtype=torch.float32, device=torch.device("cpu"))
    waits = [module.gate_up.long_wait for module in model.module.modules() if isinstance(module, MLP)]
    assert waits and waits[0] is long
