"""Batch-invariant arithmetic: a row has the same bits whatever the other rows are (E3)."""

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
