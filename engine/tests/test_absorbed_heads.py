"""Absorbing by one kernel: against float64, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from attnplug.host import MLAWeights
from attnplug_engine.models.latent_attention import multiply_few
from attnplug_testing.devices import DEVICES, INTERPRETED

BY_KERNEL = [pytest.param("cpu", marks=INTERPRETED), DEVICES[1]]
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the largest number. The interpreter rounds to bfloat16 toward zero, so on a CPU all is float32."""
NOPE, ROPE, RANK, VALUE, HEADS = 24, 10, 40, 20, 3


def random(*shape: int, device: str, seed: int) -> torch.Tensor:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def poisoned(rows: int, width: int, device: str) -> torch.Tensor:
    """Heads with NaN after each and a row of NaN after the last."""
    wide = torch.nn.functional.pad(random(rows, HEADS, width, device=device, seed=0), (0, 6), value=torch.nan)
    return torch.cat((wide, wide.new_full((1, HEADS, width + 6), torch.nan)))[:rows, :, :width]


@pytest.fixture
def weights(device: str) -> MLAWeights:
    from attnplug_engine.kernels.head_gemm import multiply_heads

    w_kc = random(HEADS, NOPE, RANK, device=device, seed=1)
    return MLAWeights(w_kc, random(HEADS, VALUE, RANK, device=device, seed=2).transpose(1, 2), multiply_heads)


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("device", BY_KERNEL)
def test_queries_are_absorbed_beside_their_rotary_part(weights: MLAWeights, rows: int, device: str) -> None:
    q = poisoned(rows, NOPE + ROPE, device)
    found = weights.absorb(q)
    latent = torch.einsum("thn,hnr->thr", q[..., :NOPE].double(), weights.w_kc.double())
    assert found.shape == (rows, HEADS, RANK + ROPE) and found.is_contiguous()
    assert (found[..., :RANK] - latent).abs().max() <= BOUNDS[q.dtype] * latent.abs().max()
    assert torch.equal(found[..., RANK:], q[..., NOPE:])


@pytest.mark.parametrize("rows", [1, 3, 5, 40])
@pytest.mark.parametrize("device", BY_KERNEL)
def test_latents_are_projected_back_into_rows_that_lie_together(weights: MLAWeights, rows: int, device: str) -> None:
    latent = poisoned(rows, RANK, device)
    found = weights.project_back(latent)
    wanted = torch.einsum("thr,hrv->thv", latent.double(), weights.w_vc.double())
    assert found.is_contiguous()
    assert (found - wanted).abs().max() <= BOUNDS[latent.dtype] * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_kernel_is_for_few_rows_of_short_types(device: str) -> None:
    weight = torch.zeros(2, 4, 4, dtype=torch.bfloat16, device=device)
    rows = torch.zeros(257, 2, 4, dtype=torch.bfloat16, device=device)
    assert multiply_few(rows[:256], weight) is not None
    assert multiply_few(rows, weight) is None
    assert multiply_few(rows[:0], weight) is None
    assert multiply_few(rows[:1].float(), weight.float()) is None
