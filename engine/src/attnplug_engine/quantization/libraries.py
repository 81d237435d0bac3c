"""Products of many rows by libraries: DeepGEMM if it is installed, and torch's scaled products.

Each is checked once on its device with a small product before it is used, because their layouts of scales differ
between versions and GPUs.
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
_BLOCK = 128


def deep_gemm_blocks(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """DeepGEMM: scales ``[rows, K / 128]`` and ``[N / 128, K / 128]`` float32."""
    out = torch.empty(x.shape[0], codes.shape[0], dtype=torch.bfloat16, device=x.device)
    import_module("deep_gemm").fp8_gemm_nt((x, x_scales), (codes, scales), out)
    return out


def torch_blocks(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Blockwise scaled product of cuBLAS. It reads the rows' scales column by column."""
    return torch._scaled_mm(
        x, codes.t(), x_scales.t().contiguous().t(), scales.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def torch_rows(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Row-wise scaled product: scales ``[rows, 1]`` and ``[N, 1]`` float32."""
    return torch._scaled_mm(x, codes.t(), x_scales, scales.t(), out_dtype=torch.bfloat16, use_fast_accum=False)


@cache
def block_product(device: torch.device) -> Product | None:
    """Return the product for scales of 128 × 128 blocks; None if no library has one on this device."""
    products: list[Product] = [torch_blocks]
    if find_spec("deep_gemm") is not None:
        products.insert(0, deep_gemm_blocks)
    return next((product for product in products if works(product, device, _BLOCK)), None)


@cache
def row_product(device: torch.device) -> Product | None:
    """Return the product for one scale per row; None if no library has one on this device."""
    return torch_rows if works(torch_rows, device, None) else None


def works(product: Product, device: torch.device, block: int | None) -> bool:
    """Return True if a library's product of random codes with random scales is right."""
    rows, outputs, width = 256, 256, 512
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    x, codes = (draw(count, width).sub(0.5).to(torch.float8_e4m3fn) for count in (rows, outputs))
    groups = 1 if block is None else width // block
    x_scales = draw(rows, groups) + 0.5
    scales = draw(outputs if block is None else outputs // block, groups) + 0.5
    wide = scales if block is None else scales.repeat_interleave(block, 0)
    left, right = (
        values.float() * factors.repeat_interleave(width // groups, 1)
        for values, factors in ((x, x_scales), (codes, wide))
    )
    wanted = left @ right.t()
    try:
        found = product(x, x_scales, codes, scales).float()
    except Exception:  # a library may raise anything on a GPU that it does not know
        return False
    return bool((found - wanted).norm() < 0.01 * wanted.norm())
