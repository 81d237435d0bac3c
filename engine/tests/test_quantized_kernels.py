"""Products with quantized weights as kernels: interpreted on a CPU, compiled on a GPU. References are float64."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.kernels.gemm_tiles import FEW, GemmConfig
from attnplug_engine.kernels.quantized_configs import QuantizedConfig
from attnplug_engine.kernels.tiled_fp8_gemm import MOST
from attnplug_engine.models.layers import QuantizedLinear, RMSNorm, silu_and_mul
from attnplug_engine.models.weights import Weights
from attnplug_engine.parallel.collectives import SINGLE
from attnplug_engine.quantization.fp8 import Fp8Blocks, Fp8Channels
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.libraries import works
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme
from attnplug_testing.devices import DEVICES

SCHEMES = {
    "fp8 blocks": Fp8Blocks(),
    "small fp8 blocks": Fp8Blocks(16, 32),
    "fp8 channels": Fp8Channels(),
    "int4": Int4Groups(32),
    "int4, wide": Int4Groups(128),
    "MXFP4": Mxfp4(),
}
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}
"""The interpreter multiplies the bits of bfloat16."""
on_every_device = pytest.mark.parametrize("device", DEVICES)


def kernels(name: str = "quantized_gemm") -> ModuleType:
    """A module of kernels, interpreted without a GPU."""
    pytest.importorskip("triton")
    return import_module(f"attnplug_engine.kernels.{name}")


def drawn(scheme: Scheme, rows: int, width: int, device: str, seed: int = 0) -> QuantizedWeight:
    torch.manual_seed(seed)
    tensors = dict(scheme.quantize(torch.randn(rows, width) * width**-0.5))
    (scales,) = (tensor for name, tensor in tensors.items() if "scale" in name)
    return QuantizedWeight(scheme, tensors[scheme.code_name].to(device), scales.to(device), scheme.rows_per_scale)


def activations(rows: int, width: int, device: str) -> Tensor:
    """Random rows. The interpreter does not carry when it rounds to fp8, so there they are numbers of fp8, with a power
    of two as their scale."""
    x = torch.randn(rows, width)
    if device == "cpu":
        x = (x * 100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        x[:, ::128] = 448
        x *= torch.exp2(-torch.arange(rows) % 5 - 7.0)[:, None]
    return x.to(device, HALF[device])


def rounded(x: Tensor, group: int) -> Tensor:
    """``x [rows, K]`` as the product sees it: each row's groups of columns in fp8."""
    parts = []
    for part in x.double().split(group, 1):
        scale = part.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        parts.append((part / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return torch.cat(parts, 1)


def close(found: Tensor, wanted: Tensor, rel: float) -> bool:
    return bool((found.double() - wanted).norm() <= rel * wanted.norm())


def run(x: Tensor, weight: QuantizedWeight, **options):
    scheme = weight.scheme
    return kernels().quantized_gemm(
        x,
        weight.codes,
        weight.scales,
        form=scheme.kernel,
        group=scheme.group,
        rows_per_scale=weight.rows_per_scale,
        **options,
    )


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "width"), [(1, 384), (3, 384), (17, 224)])
@on_every_device
def test_a_product_equals_that_of_the_decoded_weight(name, rows, width, device, monkeypatch):
    scheme = SCHEMES[name]
    width = 384 if scheme.group == 128 and name.startswith("int4") else width
    weight = drawn(scheme, 72, width, device)
    x = activations(rows, width, device)
    exact = weight.dequantized(torch.float64)
    found = run(x, weight)
    if rows <= MOST or not kernels("scaled_rows").scales_rows(scheme.kernel, scheme.group, x.device):
        assert close(found, x.double() @ exact.T, 6e-3)
        return
    assert close(found, rounded(x, 128) @ exact.T, 6e-3)
    assert device == "cpu" or not close(found, x.double() @ exact.T, 6e-3)  # activations are scaled to fp8
    monkeypatch.setattr(kernels(), "scales_rows", lambda *_: False)  # as before SM 89
    assert close(run(x, weight), x.double() @ exact.T, 6e-3)


@pytest.mark.parametrize("name", ["fp8 blocks", "MXFP4"])
@on_every_device
def test_bias_gate_and_residual(name, device):
    weight = drawn(SCHEMES[name], 256, 128, device)
    x = activations(3, 128, device)
    bias = torch.randn(256, device=device, dtype=HALF[device])
    onto = torch.randn(3, 256, device=device, dtype=HALF[device])
    exact = weight.dequantized(torch.float64).T
    assert close(run(x, weight, bias=bias, onto=onto), x.double() @ exact + bias.double() + onto.double(), 6e-3)
    wide = rounded(x, 128) if SCHEMES[name].kernel == "fp8" else x.double()
    gate, up = (wide @ exact + bias.double()).chunk(2, 1)
    assert close(run(x, weight, bias=bias, gated=True), F.silu(gate) * up, 8e-3)


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 channels", "int4", "MXFP4"])
@on_every_device
@pytest.mark.sample(2)
def test_more_rows_than_a_tile_has(name, device):
    """Rows and matrix rows that fill neither the last tile nor the last band of tiles."""
    weight = drawn(SCHEMES[name], 200, 128, device)
    x = activations(1100 if name == "fp8 blocks" else 150, 128, device)
    wide = rounded(x, 128) if SCHEMES[name].kernel == "fp8" else x.double()
    assert close(run(x, weight), wide @ weight.dequantized(torch.float64).T, 6e-3)
    assert run(x[:0], weight).shape == (0, 200)


@on_every_device
def test_every_configuration_gives_the_same_product(device):
    configs = kernels("quantized_configs")
    for name in ("fp8 blocks", "int4", "MXFP4"):
        scheme = SCHEMES[name]
        weight, x = drawn(scheme, 96, 256, device), activations(9, 256, device)
        wide = rounded(x, 128) if scheme.kernel == "fp8" else x.double()
        wanted = wide @ weight.dequantized(torch.float64).T
        form = "scaled" if scheme.kernel == "fp8" else scheme.kernel
        for *_, config in (*configs.CONFIGS[form], *configs.EXPERTS[form]):
            fitted = configs.fitting(config, form, x.device)
            assert close(run(x, weight, config=fitted), wanted, 6e-3), config


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 channels"])
@pytest.mark.parametrize("width", [224, 384])
@on_every_device
def test_only_existing_rows_and_columns_are_read(name, width, device):
    """Behind both is NaN. Columns do not fill the last group, rows not the last tile."""
    weight = drawn(SCHEMES[name], 72, width, device)
    buffer = torch.full((16, 512), float("nan"), device=device, dtype=HALF[device])
    x = buffer[:9, :width]
    x.copy_(activations(9, width, device))
    found = run(x, weight, config=QuantizedConfig(8, 32, 2, 3))
    assert close(found, rounded(x, 128) @ weight.dequantized(torch.float64).T, 6e-3)


@pytest.mark.parametrize("rows", [3, 40])
@on_every_device
def test_rows_are_normed_before_they_are_scaled(rows, device):
    weight = drawn(Fp8Blocks(), 64, 384, device)
    x, gain = torch.randn(rows, 384).to(device, HALF[device]), (torch.rand(384) + 0.5).to(device)
    normed = F.rms_norm(x.double(), (384,), gain.double(), 1e-5)
    found = run(x, weight, norm=(gain, 1e-5))
    assert close(found, normed @ weight.dequantized(torch.float64).T, 0.1 if device == "cpu" else 5e-2)
    codes, scales = kernels("scaled_rows").scale_rows(x, (gain, 1e-5))
    # The interpreter does not carry when it rounds.
    assert close(codes.double() * scales.double().repeat_interleave(128, 1), normed, 0.1 if device == "cpu" else 5e-2)
    assert close(scales * 448, normed.unflatten(1, (-1, 128)).abs().amax(2), 1e-5)


@on_every_device
def test_rows_are_scaled_by_their_largest_value(device):
    x = activations(5, 1300, device)
    codes, scales = kernels("scaled_rows").scale_rows(x)
    assert scales.shape == (5, 11)
    assert close(codes.double() * scales.double().repeat_interleave(128, 1)[:, :1300], rounded(x, 128), 1e-3)


FP8 = {
    "blocks": Fp8Blocks(),
    "odd blocks": Fp8Blocks(20, 128),  # rows of a program are in two blocks
    "small blocks": Fp8Blocks(16, 32),
    "channels": Fp8Channels(),
}


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(("width", "config"), [(400, GemmConfig(8, 128, 4)), (384, GemmConfig(4, 512, 1))])
@on_every_device
@pytest.mark.sample(6)
def test_few_rows_are_multiplied_without_quantization(name, rows, normed, width, config, device):
    """With bias, gate and residual. Rows and columns of the matrix do not fill their last blocks. Memory past them, and
    past the last row of the input, is NaN."""
    weight, dtype = drawn(FP8[name], 172, width, device), HALF[device]
    buffer = torch.full((4, 512), float("nan"), device=device, dtype=dtype)
    x = buffer[:rows, :width]
    x.copy_(torch.randn(rows, width))
    gain, bias, onto = (torch.randn(*size).to(device, dtype) for size in ((width,), (172,), (rows, 172)))
    norm = {"norm": (gain, 1e-2)} if normed else {}
    wide = F.rms_norm(x.double(), (width,), gain.double(), 1e-2) if normed else x.double()
    plain = wide @ weight.dequantized(torch.float64).T
    assert close(run(x, weight, config=config, **norm), plain, 1e-3 if dtype is torch.float16 else 4e-3)
    plain += bias.double()
    assert close(run(x, weight, config=config, bias=bias, onto=onto, **norm), plain + onto.double(), 4e-3)
    gate, up = plain.chunk(2, 1)
    assert close(run(x, weight, config=config, bias=bias, gated=True, **norm), F.silu(gate) * up, 5e-3)


@on_every_device
def test_every_code_is_exact(device):
    """Subnormal numbers, zeros, the largest and NaN, in each place of a word."""
    scale, x = torch.full((2, 1), 2.0**-4, device=device), torch.zeros(1, 128, device=device, dtype=HALF[device])
    every = torch.arange(256).to(device, torch.uint8)
    for column in (0, 5, 18, 127):
        codes = torch.full((256, 128), 0x7E, device=device, dtype=torch.uint8)  # times 0
        codes[:, column] = every
        x.zero_()[0, column] = 2
        found = kernels().quantized_gemm(
            x, codes.view(torch.float8_e4m3fn), scale, form="fp8", group=128, rows_per_scale=128
        )
        wanted = every.view(torch.float8_e4m3fn).to(HALF[device])[None] / 8
        assert torch.equal(found.nan_to_num(7e3), wanted.nan_to_num(7e3)) and found.isnan().sum() == 2


@on_every_device
def test_codes_of_one_and_two_rows_are_decoded_in_registers(device, monkeypatch):
    """A norm's weight of another dtype is applied before."""
    weight = drawn(Fp8Blocks(), 128, 256, device)
    x, gain = torch.randn(2, 256).to(device, HALF[device]), torch.rand(256, device=device)
    normed = F.rms_norm(x.double(), (256,), gain.double(), 1e-5)
    assert close(run(x, weight, norm=(gain, 1e-5)), normed @ weight.dequantized(torch.float64).T, 5e-3)
    monkeypatch.delattr(kernels(), "skinny_fp8_gemm")
    for rows in (1, FEW):
        with pytest.raises(NameError, match="skinny_fp8_gemm"):
            run(x[:rows], weight)
    run(activations(FEW + 1, 256, device), weight)


@pytest.mark.parametrize("product", [lambda *_: torch.zeros(256, 256), lambda *_: 1 / 0, lambda x, *_: x.new_empty(1)])
def test_a_library_that_is_wrong_or_fails_is_not_used(product):
    assert not works(product, torch.device("cpu"))


def test_a_library_that_is_right_is_used():
    def exact(x, x_scales, codes, scales):
        left, right = (
            values.double() * factors.repeat_interleave(128, 1)
            for values, factors in ((x, x_scales), (codes, scales.repeat_interleave(128, 0)))
        )
        return (left @ right.T).bfloat16()

    assert works(exact, torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("scheme", [Fp8Blocks(), Fp8Channels()], ids=["blocks", "channels"])
def test_many_rows_are_multiplied_on_a_gpu(scheme, device):
    """With a library for fp8 blocks, if available, and with the kernel."""
    weight = drawn(scheme, 512, 1024, device)
    x = activations(300, 1024, device)
    wanted = rounded(x, 128) @ weight.dequantized(torch.float64).T
    assert close(scheme.multiply(x, weight), wanted, 6e-3)
    weight.library = None
    assert close(scheme.multiply(x, weight), wanted, 6e-3)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
    ("tokens", "gated", "clip"), [(1, True, None), (3, True, (0.5, 1.702, 1.0)), (40, False, None)]
)
@on_every_device
@pytest.mark.parametrize("scaled", [True, False], ids=["", "before SM 89"])
@pytest.mark.sample(5)
def test_experts_equal_their_sum_in_float64(name, tokens, gated, clip, device, scaled, monkeypatch):
    """A clip comes with biases, as in gpt-oss."""
    scheme, experts, hidden, width = SCHEMES[name], 5, 256, 128
    if kernels("scaled_rows").scales_rows(scheme.kernel, scheme.group, torch.device(device)) != scaled:
        if scaled:
            pytest.skip("activations of this scheme are not scaled")
        monkeypatch.setattr(kernels("quantized_experts"), "scales_rows", lambda *_: False)
    parts = 2 if gated else 1

    def stacked(rows: int, inputs: int) -> QuantizedWeight:
        each = [drawn(scheme, rows, inputs, device, seed=expert) for expert in range(experts)]
        codes = torch.stack([weight.codes.view(torch.uint8) for weight in each]).view(scheme.code_dtype)
        return QuantizedWeight(scheme, codes, torch.stack([weight.scales for weight in each]), scheme.rows_per_scale)

    gate_up, down = stacked(parts * width, hidden), stacked(hidden, width)
    x, onto = activations(tokens, hidden, device), torch.randn(tokens, hidden).to(device, HALF[device])
    topk_ids = torch.rand(tokens, experts).topk(2).indices.int().to(device)
    topk_weights = torch.rand(tokens, 2).to(device)
    up_bias, down_bias = (torch.randn(experts, size).to(device, HALF[device]) for size in (parts * width, hidden))
    biases = None if clip is None else (up_bias, down_bias)
    found = kernels("quantized_experts").quantized_experts(
        x,
        topk_ids,
        topk_weights,
        gate_up,
        down,
        form=scheme.kernel,
        group=scheme.group,
        gated=gated,
        clip=clip,
        biases=biases,
        onto=onto,
    )
    wanted = onto.double()
    for token in range(tokens):
        for place in range(2):
            expert = int(topk_ids[token, place])
            seen = rounded(x[token : token + 1], 128)[0] if scaled else x[token].double()
            inner = gate_up.expert(expert).dequantized(torch.float64) @ seen
            outer = torch.zeros(hidden, dtype=torch.float64, device=device)
            if clip is not None:
                limit, alpha, offset = clip
                gate, up = (inner + up_bias[expert].double()).split(width)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner, outer = gate * torch.sigmoid(alpha * gate) * (up + offset), down_bias[expert].double()
            else:
                inner = F.silu(inner[:width]) * inner[width:] if gated else F.relu(inner).square()
            if scaled:
                inner = rounded(inner[None], 128)[0]
            outer = outer + down.expert(expert).dequantized(torch.float64) @ inner
            wanted[token] += topk_weights[token, place] * outer
    # Inner rows of 16 bits may round to the neighbouring fp8 value, and the interpreter does not carry when it rounds.
    assert close(found, wanted, (8e-2 if device == "cpu" else 3e-2) if scaled else 1e-2)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["fp8 blocks", "int4"])
def test_a_layer_takes_the_kernel_for_its_rows(name, rows, kernel_device, monkeypatch):
    """With its norm, gate and residual: the same as by torch."""
    monkeypatch.setattr("attnplug_engine.quantization.scheme.usable", lambda _device: kernel_device != "torch")
    device = torch.device(kernel_device if kernel_device == "cuda" else "cpu")
    weight = drawn(SCHEMES[name], 256, 128, str(device))
    scaled = name == "fp8 blocks" and rows > FEW
    if scaled and device.type == "cpu":
        pytest.skip("the interpreter does not carry when it rounds activations to fp8")
    gain = torch.rand(128) + 0.5
    source = RandomCheckpoint(TINY_CONFIGS["llama"])
    monkeypatch.setattr(source, "_whole", lambda *_: gain)
    norm = RMSNorm(Weights(source, dtype=HALF[device.type], device=device, parallel=SINGLE), 128, 1e-5)
    x = torch.randn(rows, 128).to(device, HALF[device.type])
    wanted = F.rms_norm(x.double(), (128,), gain.to(device, HALF[device.type]).double(), 1e-5)
    gate, up = (wanted @ weight.dequantized(torch.float64).T).chunk(2, 1)
    found = QuantizedLinear(weight)(x, norm=norm, activate=silu_and_mul)
    assert close(found, F.silu(gate) * up, 5e-2 if device.type == "cuda" and scaled else 8e-3)


@pytest.mark.parametrize("rows", [3, 9, 16])
@pytest.mark.parametrize("name", ["fp8 blocks", "small fp8 blocks", "fp8 channels"])
@pytest.mark.parametrize("width", [224, 384, 1024])
@on_every_device
@pytest.mark.sample(6)
def test_few_rows_are_multiplied_without_rounding_them(name, rows, width, device):
    """With a matrix of few rows, norm, bias and residual. Memory behind the input's rows and columns is NaN."""
    weight, eps = drawn(SCHEMES[name], 72, width, device), 1e-2
    buffer = torch.full((16 + 1, width + 32), float("nan"), device=device, dtype=HALF[device])
    x = buffer[:rows, :width]
    x.copy_(torch.randn(rows, width))
    gain, bias = (torch.randn(size).to(device, HALF[device]) for size in (width, 72))
    onto = torch.randn(rows, 72).to(device, HALF[device])
    exact = weight.dequantized(torch.float64).T
    for config in (None, *(GemmConfig(16, columns, 4, tiles=True) for columns in (512, 1024))):
        assert close(run(x, weight, config=config), x.double() @ exact, 3e-3)
        found = run(x, weight, norm=(gain, eps), bias=bias, onto=onto, config=config)
        normed = F.rms_norm(x.double(), (width,), gain.double(), eps)
        assert close(found, normed @ exact + bias.double() + onto.double(), 3e-3)


@on_every_device
def test_few_rows_are_multiplied_by_every_code(device):
    """Each matrix row has one code, including subnormals, the maximum and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None].repeat(1, 128)
    weight = QuantizedWeight(Fp8Blocks(), codes.to(device), torch.ones(2, 1, device=device), 128)
    x = torch.zeros(4, 128, dtype=HALF[device], device=device)
    x[torch.arange(4), 64 + torch.arange(4)] = 1.0  # each place of a word
    found, wanted = run(x, weight).double(), codes.to(device).double()[:, :4].T
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().sum() == 2 * 4
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
