"""fp8 GEMMs with many rows by DeepGEMM, if it is installed.

A small product is checked once per device before DeepGEMM is used, because layouts of scales differ between versions
and GPUs. ``torch._scaled_mm`` is not used: with block scales, cuBLAS returns ``CUBLAS_STATUS_NOT_SUPPORTED`` on an H200
(torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Multiplies fp8 ``[rows, K]`` with its scales by fp8 ``[N, K]`` with its scales: bfloat16 ``[rows, N]``."""
FEWEST_ROWS = 65
"""Minimum rows for which the library is used."""
_BLOCK = 128


def deep_gemm_blocks(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply by DeepGEMM. Scales are float32 ``[rows, K / 128]`` and ``[N / 128, K / 128]``."""
    out = torch.empty(x.shape[0], codes.shape[0], dtype=torch.bfloat16, device=x.device)
    import_module("deep_gemm").fp8_gemm_nt((x, x_scales.contiguous()), (codes, scales), out)
    return out


@cache
def block_product(device: torch.device) -> Product | None:
    """Return the product for scales of 128 × 128 blocks; None if no library has one on this device."""
    if find_spec("deep_gemm") is not None and works(deep_gemm_blocks, device):
        return deep_gemm_blocks
    return None


def works(product: Product, device: torch.device) -> bool:
    """Return True if a library multiplies random codes with random scales correctly."""
    rows, outputs, width = 256, 256, 512
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    x, codes = (draw(count, width).sub(0.5).to(torch.float8_e4m3fn) for count in (rows, outputs))
    x_scales, scales = (draw(count, width // _BLOCK) + 0.5 for count in (rows, outputs // _BLOCK))
    left, right = (
        values.float() * factors.repeat_interleave(_BLOCK, 1)
        for values, factors in ((x, x_scales), (codes, scales.repeat_interleave(_BLOCK, 0)))
    )
    wanted = left @ right.t()
    try:
        found = product(x, x_scales, codes, scales).float()
    except Exception:  # a library may raise anything on a GPU that it does not know
        return False
    return bool((found - wanted).norm() < 0.01 * wanted.norm())
