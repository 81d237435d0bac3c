"""Batch-invariant arithmetic: the bits of a row do not depend on the other rows (E3)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attnplug_engine.kernels import invariant
from attnplug_engine.kernels.invariant import active, arithmetic
from attnplug_testing.devices import DEVICES, INTERPRETED

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]
"""Devices on which kernels can run: interpreted where there is no GPU."""
COUNTS = (1, 2, 7, 15, 16, 17, 33, 64, 129)


def random(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def same_alone(run, x: Tensor, counts: tuple[int, ...] = COUNTS) -> None:
    """Rows have the same bits in any number of rows, at any place."""
    with torch.inference_mode(), arithmetic(True):
        whole = run(x)
        for number, count in enumerate(counts):
            start = (37 * number) % (x.shape[0] - count)
            assert torch.equal(run(x[start : start + count]), whole[start : start + count]), count


@pytest.mark.parametrize("shape", [(64, 64), (3, 64), (17, 33), (96, 2048), (1024, 300)])
def test_products(shape: tuple[int, int]) -> None:
    """E3: in MKL with 64 rows or more, a long sum has other blocks than with 16."""
    weight, bias, x = random(*shape), random(shape[0], seed=1), random(300, shape[1], seed=2)
    same_alone(lambda rows: F.linear(rows, weight, bias), x)
    same_alone(lambda rows: torch.addmm(rows[:, :1], rows, weight.t()), x)
    with torch.inference_mode(), arithmetic(True):
        found = F.linear(x, weight, bias)
    assert (found - F.linear(x, weight, bias)).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 1026), (100, 514), (2, 72), (12, 16)])
def test_products_of_16_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """E3: oneDNN sums in other blocks with 128 rows or more. Terms cancel, because rounding would hide it."""
    half = shape[1] // 2
    weight, x = random(shape[0], half, dtype=dtype), random(300, half, dtype=dtype, seed=2)
    weight, x = torch.cat((weight, -weight), 1), torch.cat((x, x), 1)
    same_alone(lambda rows: F.linear(rows, weight), x)


def test_products_by_head() -> None:
    weight = random(3, 24, 40)
    same_alone(
        lambda rows: torch.bmm(rows.unflatten(1, (3, 24)).transpose(0, 1), weight).transpose(0, 1), random(200, 72)
    )


def test_a_tile_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """E3: neither a larger tile nor the padded one; then rows are multiplied one by one."""
    tile = invariant._tile

    def by_size(matrix: Tensor, rows: Tensor) -> Tensor:
        return tile(matrix, rows) + (rows.shape[-2] if rows.shape[-2] in (16, 128) else 0) * torch.arange(
            rows.shape[-2], dtype=torch.float32
        ).unsqueeze(1)

    monkeypatch.setattr(invariant, "_tile", by_size)
    monkeypatch.setattr(invariant, "_agreeing", {})
    weight = random(8, 16)
    same_alone(lambda rows: F.linear(rows, weight), random(200, 16))


@pytest.mark.parametrize(
    "run",
    [
        F.silu,
        F.softplus,
        torch.sigmoid,
        lambda x: x.clone().exp_(),
        lambda x: torch.hypot(x, x.new_tensor(0.1)),
        lambda x: torch.view_as_real(torch.polar(torch.ones_like(x), x)),
        lambda x: torch.view_as_real(
            torch.view_as_complex(x.view(-1, 25, 2)) * torch.polar(*x.view(-1, 2, 25).unbind(1))
        ),
        lambda x: torch.addcmul(x, x.roll(1, -1), x.roll(2, -1)),
        lambda x: x.sum(1),
        lambda x: x.exp().sum(1, keepdim=True, dtype=torch.float64).log_(),
        lambda x: x.mean(-1),
        lambda x: F.rms_norm(x, (x.shape[1],)),
        lambda x: torch.linalg.vector_norm(x, dim=-1),
    ],
)
def test_functions_of_elements_and_rows(run) -> None:
    """E3: torch computes the last elements of a tensor, and of a thread's part, with scalar code."""
    same_alone(run, random(200, 50))
    assert torch.allclose(run(random(5, 50)), _inside(run, random(5, 50)), atol=1e-6)


def _inside(run, x: Tensor) -> Tensor:
    with torch.inference_mode(), arithmetic(True):
        return run(x)


def test_the_first_of_equals_is_chosen() -> None:
    """E3: ties between experts are broken by their index."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 3.0, 2.0, 3.0]]).repeat(5, 4)
    with torch.inference_mode(), arithmetic(True):
        assert scores.topk(3, sorted=False).indices.tolist() == [[1, 2, 4]] * 5


def test_it_ends_and_nests() -> None:
    with arithmetic(True):
        with arithmetic(True), arithmetic(False):
            assert active()
        assert active()
    with arithmetic(False):
        assert not active()


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(48, 1200, False), (80, 96, True)])
def test_the_gpu_product(outputs: int, inputs: int, gated: bool, device: str) -> None:
    """E3: every tile gives a row the same bits, and so do parts that have programs of their own.

    NumPy's sums depend on the tile, so the interpreter adds whole numbers: there the test finds wrong rows only.
    """
    from attnplug_engine.kernels.invariant_gemm import GATED_TILES, TILES, invariant_gemm, parts

    assert parts(outputs, inputs, gated=gated)[0] == (1 if gated else 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight = (random(*size, device=device, dtype=dtype) for size in ((70, inputs), (outputs, inputs)))
    if device == "cpu":
        x, weight = x.round(), weight.round()
    onto = None if gated else random(70, outputs, device=device, dtype=dtype, seed=3)
    bias = random(outputs, device=device, dtype=dtype, seed=4)  # of gate and ``up``

    def run(start: int, stop: int, tile=None) -> Tensor:
        added = None if onto is None else onto[start:stop]
        return invariant_gemm(x[start:stop], weight, bias=bias, gated=gated, onto=added, tile=tile)

    whole = run(0, 70)
    product = x.double() @ weight.double().t()
    product[:, : bias.shape[0]] += bias.double()
    if gated:
        gate, up = product.chunk(2, dim=1)
        wanted = F.silu(gate) * up
    else:
        wanted = product + onto.double()
    assert (whole.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    for start, stop in ((0, 1), (5, 21), (3, 67)):
        assert torch.equal(run(start, stop), whole[start:stop])
    for tile in GATED_TILES if gated else TILES:
        assert torch.equal(run(3, 20, tile), whole[3:20])


@pytest.fixture
def blocks_of_32(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let the library multiply 32 rows at once, and return the list of its inputs. On a CPU, torch multiplies in
    float32."""
    from attnplug_engine.kernels import invariant_gemm

    multiplied: list[Tensor] = []
    multiply = invariant_gemm._multiply

    def by_torch(x: Tensor, weight: Tensor, out: Tensor) -> None:
        multiplied.append(x)
        if x.is_cuda:
            multiply(x, weight, out)
        else:
            torch.mm(x.float(), weight.float().t(), out=out)

    monkeypatch.setattr(invariant_gemm, "LIBRARY_ROWS", (32,))
    monkeypatch.setattr(invariant_gemm, "_ALIGNED", 64)  # by torch's allocator for a CPU
    monkeypatch.setattr(invariant_gemm, "_multiply", by_torch)
    monkeypatch.setattr(invariant_gemm, "_agreeing", {})
    return multiplied


@pytest.mark.parametrize("device", BY_KERNEL)
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(48, 1200, False), (80, 96, True)])
def test_blocks_of_the_library(outputs, inputs, gated, device, blocks_of_32, monkeypatch) -> None:
    """E3: with bias and residual, in parts and gated. The interpreter adds whole numbers, as above."""
    from attnplug_engine.kernels import invariant_gemm

    monkeypatch.setattr(invariant_gemm, "LIBRARY_ROWS", (32, 8))
    if device == "cpu":
        monkeypatch.setattr(invariant_gemm, "_agrees", lambda *_, gated: True)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight = (random(*size, device=device, dtype=dtype).round() for size in ((75, inputs), (outputs, inputs)))
    bias = random(outputs, device=device, dtype=dtype, seed=4)
    onto = None if gated else random(75, outputs, device=device, dtype=dtype, seed=3)
    wider = torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :inputs]

    def run(rows: Tensor, start: int, stop: int) -> Tensor:
        added = None if onto is None else onto[start:stop]
        return invariant_gemm.invariant_gemm(rows[start:stop], weight, bias=bias, gated=gated, onto=added)

    whole, parts = run(wider, 0, 75), 1 if gated else 2
    assert device == "cuda" or [one.shape[0] for one in blocks_of_32] == [32] * 2 * parts + [8] * parts
    for start, stop in ((0, 31), (32, 63), (60, 75)):
        assert torch.equal(run(x, start, stop), whole[start:stop])
    assert torch.equal(run(x, 11, 75), whole[11:]) and torch.equal(run(x, 0, 64), whole[:64])


@pytest.mark.parametrize("device", BY_KERNEL)
def test_a_library_that_sums_in_another_order_is_not_used(device, blocks_of_32, monkeypatch) -> None:
    """E3: compared once per shape."""
    from attnplug_engine.kernels import invariant_gemm

    multiply = invariant_gemm._multiply

    def in_halves(x: Tensor, weight: Tensor, out: Tensor) -> None:
        half = x.shape[1] // 2
        multiply(x[:, half:].contiguous(), weight[:, half:].contiguous(), out)
        second = torch.empty_like(out)
        multiply(x[:, :half].contiguous(), weight[:, :half].contiguous(), second)
        out += second

    monkeypatch.setattr(invariant_gemm, "_multiply", in_halves)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x, weight = random(64, 520, device=device, dtype=dtype), random(512, 520, device=device, dtype=dtype, seed=1)
    whole = invariant_gemm.invariant_gemm(x, weight)
    assert list(invariant_gemm._agreeing.values()) == [False] and len(blocks_of_32) == 2
    for start in (0, 16, 48):
        assert torch.equal(invariant_gemm.invariant_gemm(x[start : start + 16], weight), whole[start : start + 16])
    invariant_gemm.invariant_gemm(x, weight)
    assert len(blocks_of_32) == 2


@pytest.mark.parametrize("device", BY_KERNEL)
def test_the_library_runs_only_as_it_was_compared(device, blocks_of_32, monkeypatch) -> None:
    """E3: its kernel may depend on the alignment of a matrix, on torch's settings, and on a capture."""
    from attnplug_engine.kernels import invariant_gemm

    def rows_of_library(x: Tensor) -> int:
        blocks_of_32.clear()
        invariant_gemm.invariant_gemm(x, weight)
        assert all(one.data_ptr() % 64 == 0 for one in blocks_of_32)
        return sum(one.shape[0] for one in blocks_of_32)

    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    x = random(64, 40, device=device, dtype=dtype)
    weight = random(48, 40, device=device, dtype=dtype, seed=1)
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    compared = 32 * (1 if device == "cpu" else 2)  # eagerly, and in a graph
    assert rows_of_library(x) == compared + 64
    buffer = torch.empty(x.numel() + 8, device=device, dtype=dtype)
    assert rows_of_library(buffer[8:].view(64, 40).copy_(x)) == 64
    settings = torch.backends.cuda.matmul
    settings.allow_bf16_reduced_precision_reduction ^= True
    try:
        assert rows_of_library(x) == compared + 64
    finally:
        settings.allow_bf16_reduced_precision_reduction ^= True
    if device == "cuda":
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert rows_of_library(x) == 64
            patch.setattr(invariant_gemm, "_agreeing", {})
            assert rows_of_library(x) == 0  # nothing can be compared in a capture
    buffer = torch.empty(weight.numel() + 8, device=device, dtype=dtype)
    weight = buffer[8:].view(48, 40).copy_(weight)
    assert rows_of_library(x) == 0


@pytest.mark.parametrize("device", [DEVICES[1]])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"), [(2048, 2048, False), (2048, 8192, False), (16384, 2048, True)]
)
def test_rows_of_a_long_prefill(outputs, inputs, gated, device) -> None:
    """E3: cuBLAS multiplies its blocks, if it agrees on this GPU; rows have the bits that they have alone, in a CUDA
    graph too."""
    from attnplug_engine.kernels import invariant_gemm
    from attnplug_engine.kernels.invariant_gemm import LIBRARY_ROWS

    large, small = LIBRARY_ROWS
    count = large + small + 300
    x = random(count, inputs, device=device, dtype=torch.bfloat16)
    weight = random(outputs, inputs, device=device, dtype=torch.bfloat16, seed=1)
    whole = invariant_gemm.invariant_gemm(x, weight, gated=gated)
    for start, stop in ((0, 1), (1000, 1064), (large - 100, large + 200), (300, large + 300), (700, 1300)):
        assert torch.equal(invariant_gemm.invariant_gemm(x[start:stop], weight, gated=gated), whole[start:stop])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = invariant_gemm.invariant_gemm(x, weight, gated=gated)
    graph.replay()
    assert torch.equal(captured, whole)
