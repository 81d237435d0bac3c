"""Split-K GEMMs, interpreted on a CPU and compiled on a GPU, compared with float64."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug_engine.quantization.fp8 import Fp8Blocks, Fp8Channels
from attnplug_testing.devices import DEVICES, INTERPRETED

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}
"""The interpreter rounds to bfloat16 toward zero."""
on_every_device = pytest.mark.parametrize("device", BY_KERNEL)
BOUND = 4e-3
"""Of the result's norm."""


def kernels() -> ModuleType:
    pytest.importorskip("triton")
    return import_module("attnplug_engine.kernels.split_gemm")


def drawn(
    kind: str, outputs: int, width: int, device: str, scheme: Any = None
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """Return a weight, its scales as arguments, and the decoded weight in float64."""
    weight = torch.randn(outputs, width) * width**-0.5
    if kind == "plain":
        weight = weight.to(device, HALF[device])
        return weight, {}, weight.double()
    scheme = scheme or Fp8Blocks()
    tensors = dict(scheme.quantize(weight))
    (scales,) = (tensor for name, tensor in tensors.items() if "scale" in name)
    codes, scales = tensors[scheme.code_name].to(device), scales.to(device)
    own = {"scales": scales, "group": scheme.group, "rows_per_scale": scheme.rows_per_scale}
    wide = scales.double().repeat_interleave(scheme.rows_per_scale, 0)[:outputs]
    wide = wide.repeat_interleave(scheme.group or width, 1)[:, :width]
    return codes, own, codes.double() * wide


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory is NaN, and so is the result before it is stored."""
    fresh = torch.empty

    def filled(*args: Any, **how: Any) -> Tensor:
        made = fresh(*args, **how)
        return made.fill_(torch.nan) if made.dtype.is_floating_point and made.element_size() > 1 else made

    monkeypatch.setattr(torch, "empty", filled)


CASES = [
    ("plain", 3, 72, 200, 4, ("norm", "bias", "onto")),
    ("plain", 17, 64, 256, 2, ()),
    ("plain", 64, 40, 136, 8, ("onto",)),
    ("plain", 16, 64, 128, 1, ("norm",)),
    ("codes", 3, 128, 400, 2, ("bias", "onto")),
    ("codes", 16, 72, 512, 4, ("norm", "onto")),
    ("codes", 33, 64, 384, 8, ("bias",)),
]


@pytest.mark.parametrize(("kind", "rows", "outputs", "width", "parts", "fused"), CASES)
@on_every_device
@pytest.mark.sample(4)
def test_a_divided_product_is_float64s(kind, rows, outputs, width, parts, fused, device, poisoned):
    """Rows and columns that fill neither the last block nor the last part. Behind the input is NaN. Counters are zero
    after each call, and a second call gives the same bits."""
    torch.manual_seed(0)
    weight, own, exact = drawn(kind, outputs, width, device)
    buffer = torch.full((rows + 1, width + 16), torch.nan, device=device, dtype=HALF[device])
    x = buffer[:rows, 8 : 8 + width]
    x.copy_(torch.randn(rows, width))
    gain, bias, onto = (torch.randn(*size).to(device, HALF[device]) for size in ((width,), (outputs,), (rows, outputs)))
    wide = F.rms_norm(x.double(), (width,), gain.double(), 1e-2) if "norm" in fused else x.double()
    wanted, options = wide @ exact.T, {}
    if "norm" in fused:
        options["norm"] = gain, 1e-2
    if "bias" in fused:
        options["bias"], wanted = bias, wanted + bias.double()
    if "onto" in fused:
        options["onto"], wanted = onto, wanted + onto.double()
    module = kernels()
    config = module.SplitConfig(64, 64 if kind == "plain" else 128, parts, 4, 3, prefetch=2)
    counters = module.arrival_counters(outputs, x.device)
    found = module.split_gemm(x, weight, config, counters, **own, **options)
    assert error(found, wanted) <= BOUND * (2 if device == "cpu" else 1)
    assert not counters.any()
    assert torch.equal(module.split_gemm(x, weight, config, counters, **own, **options), found)


@pytest.mark.parametrize("columns", [128, 1408, 1536, 2048, 2880, 8192])
@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("parts", [1, 4, 8, 16])
def test_the_last_program_prefetches_nothing_behind_its_matrix(columns, element, parts):
    """Also if its part is shorter than others. An odd number of lines is rounded down to a power of two."""
    module = kernels()
    divided, size = module.divided(columns, parts, 128)
    for most in (0, 2, 16, 32):
        lines = module.SplitConfig(64, 128, parts, 4, 4, most).prefetched(columns, element)
        room = (columns - (divided - 1) * size) * element // 128
        assert lines <= min(room, most) < max(2 * lines, 1) and lines.bit_count() <= 1


@on_every_device
def test_one_scale_per_matrix_row(device, poisoned):
    torch.manual_seed(0)
    weight, own, exact = drawn("codes", 72, 384, device, Fp8Channels())
    x = torch.randn(7, 384).to(device, HALF[device])
    module = kernels()
    config = module.SplitConfig(64, 128, 2, 4, 3)
    found = module.split_gemm(x, weight, config, module.arrival_counters(72, x.device), **own)
    assert error(found, x.double() @ exact.T) <= BOUND * 2


@on_every_device
def test_input_and_residual_may_have_any_strides(device):
    torch.manual_seed(0)
    weight, _, exact = drawn("plain", 64, 256, device)
    x, onto = (torch.randn(9, 2 * width).to(device, HALF[device])[:, ::2] for width in (256, 64))
    module = kernels()
    config = module.SplitConfig(64, 128, 2, 4, 3)
    found = module.split_gemm(x, weight, config, module.arrival_counters(64, x.device), onto=onto)
    assert error(found, x.double() @ exact.T + onto.double()) <= BOUND * 2


@pytest.mark.parametrize("kind", ["plain", "codes"])
@on_every_device
def test_a_row_does_not_depend_on_the_others(kind, device):
    """Padding rows of a captured step have any content."""
    torch.manual_seed(0)
    weight, own, _ = drawn(kind, 64, 256, device)
    x, module = torch.randn(4, 256).to(device, HALF[device]), kernels()
    config = module.SplitConfig(64, 128, 2, 4, 3)

    def multiplied(rows: Tensor) -> Tensor:
        return module.split_gemm(rows, weight, config, module.arrival_counters(64, x.device), **own)[:3]

    first = multiplied(x)
    x[3] = torch.nan
    assert torch.equal(multiplied(x), first) and torch.equal(multiplied(x[:3]), first)


def test_what_is_divided():
    """Nine to 16 bfloat16 rows, to 64 of codes, and matrices of few rows; codes with one scale per 128 columns or per
    row. A norm of the input is fused with codes only: with 16-bit elements the product then takes 1.6 to 2.2 times as
    long as others."""
    choose = kernels().choose_split
    x, weight = torch.zeros(65, 4096).half(), torch.zeros(128, 4096).half()
    codes = torch.zeros(128, 4096).to(torch.float8_e4m3fn)
    for matrix, most in ((weight, 16), (codes, 64)):
        assert [rows for rows in range(66) if choose(x[:rows], matrix)] == list(range(9, most + 1))
        assert not choose(x[:9], matrix.repeat(40, 1)) and not choose(x[None, :9], matrix)
        assert not choose(x[:9, :4090], matrix[:, :4090].contiguous()) and not choose(x[:9, :128], matrix[:, :128])
        assert not choose(x[:9].float(), matrix)
    for rows in (9, 64):
        assert choose(x[:rows], codes, normed=True) and not choose(x[:rows], weight, normed=True)
    assert choose(x[:9], codes, group=128, rows_per_scale=128)
    assert not choose(x[:9], codes, group=32, rows_per_scale=128)
    assert not choose(x[:9], codes, group=128, rows_per_scale=20)
    square = codes[:, :2048].contiguous()  # another kernel is faster with few rows
    assert choose(x[:17, :2048], square) and not choose(x[:16, :2048], square)


@on_every_device
def test_a_model_divides_products_of_nine_rows(device, monkeypatch):
    """Weights may be quantized or not. One row and gated matrices run on other kernels, and a norm is fused with
    quantized weights only."""
    from attnplug_engine import kernels as usable
    from attnplug_engine.models.layers import Linear, QuantizedLinear, RMSNorm, silu_and_mul
    from attnplug_engine.quantization.scheme import QuantizedWeight

    monkeypatch.setattr(usable, "usable", lambda _: True)
    monkeypatch.setattr("attnplug_engine.quantization.scheme.usable", lambda _: True)
    torch.manual_seed(0)
    module = kernels()
    used = []
    for name in ("attnplug_engine.kernels.quantized_gemm", "attnplug_engine.kernels.split_gemm"):
        monkeypatch.setattr(
            import_module(name),
            "split_gemm",
            lambda *args, real=module.split_gemm, **how: used.append(1) or real(*args, **how),
        )
    x, onto = torch.randn(9, 4096).to(device, HALF[device]), torch.randn(9, 128).to(device, HALF[device])
    weight, _, exact = drawn("plain", 128, 4096, device)
    codes, own, decoded = drawn("codes", 128, 4096, device)
    quantized = QuantizedWeight(Fp8Blocks(), codes, own["scales"], 128)
    gain = torch.rand(4096).to(device, HALF[device])
    norm = RMSNorm(SimpleNamespace(take=lambda *_, **how: gain), 4096, 1e-5)
    for layer, matrix in ((Linear(weight), exact), (QuantizedLinear(quantized), decoded)):
        assert error(layer(x, onto=onto.clone()), x.double() @ matrix.T + onto.double()) <= 8e-3
        assert used == [1]
        layer(x[:1])
        layer(x, activate=silu_and_mul)
        assert used.pop() == 1 and not used
        found = layer(x, norm=norm)
        wanted = F.rms_norm(x.double(), (4096,), gain.double(), 1e-5) @ matrix.T
        assert error(found, wanted) <= 8e-3 and used == [1] * (matrix is decoded)


@on_every_device
def test_batch_invariant_arithmetic_divides_no_product(device, monkeypatch):
    """E3: whether a product is divided depends on the number of rows."""
    from attnplug_engine import kernels as usable
    from attnplug_engine.kernels.invariant import arithmetic
    from attnplug_engine.models.layers import Linear

    monkeypatch.setattr(usable, "usable", lambda _: True)
    torch.manual_seed(0)
    module = kernels()
    weight, x = drawn("plain", 128, 4096, device)[0], torch.randn(9, 4096).to(device, HALF[device])
    layer = Linear(weight)
    assert module.choose_split(x, weight)
    monkeypatch.setattr(module, "split_gemm", None)
    with arithmetic(True):
        assert torch.equal(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("device", [DEVICES[1]])
def test_a_captured_product_is_replayed(device):
    torch.manual_seed(0)
    weight, own, exact = drawn("codes", 192, 1024, device)
    x, module = torch.randn(16, 1024).to(device, HALF[device]), kernels()
    config, counters = module.SplitConfig(64, 128, 4, 4, 4, 16), module.arrival_counters(192, x.device)
    first = module.split_gemm(x, weight, config, counters, **own)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [module.split_gemm(x, weight, config, counters, **own) for _ in range(8)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(one, first) for one in found) and not counters.any()
    assert error(first, x.double() @ exact.T) <= BOUND
