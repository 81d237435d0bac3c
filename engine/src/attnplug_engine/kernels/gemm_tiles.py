"""Choice of kernel and tile configuration for products of few rows with a large matrix.

Measured on an H200 (``benchmarks/gemm_tiles.py``), including the norm, gate and residual, for which a library needs
separate launches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from attnplug_engine.kernels import shared_memory, starts_early

FEW, SOME, MORE, MANY = 2, 8, 16, 64
"""Largest numbers of rows by kernel: ``FEW`` in ``skinny_gemm``; for a matrix of few rows ``SOME`` in ``tiled_gemm``
and ``MORE`` in ``streamed_gemm``; for a gated matrix of many rows ``MANY`` there. The library is faster for all
others."""
_SHORT, _NARROW = 4096, 4096


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile configuration of a product: matrix rows of a program, columns that it loads at once, and its warps.

    ``tiles``: it uses tensor cores. ``stages`` is the number of matrix parts in shared memory, 0 for none.
    """

    block_n: int
    block_k: int
    warps: int
    tiles: bool = False
    stages: int = 0
    along: int = 1
    """Warps of ``preloaded_gemm`` that share a matrix row."""
    programs: int = 0
    """Programs of ``preloaded_gemm`` per multiprocessor, which take several blocks each; 0: one per block."""

    @property
    def preloads(self) -> bool:
        """True if it is a configuration of ``preloaded_gemm``."""
        return self.stages > 0 and not self.tiles


ONE_ROW_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (2048, 2048): GemmConfig(2, 2048, 2),
    (2112, 2048): GemmConfig(4, 2048, 4, stages=1, along=2),
    (3072, 2048): GemmConfig(2, 2048, 2, stages=1, along=2),
    (16384, 2048): GemmConfig(4, 2048, 4, stages=1, along=2),
}
"""Configurations of one row by the matrix's ``(rows, columns)``, where kernels start early, measured in whole decode
steps (``benchmarks/one_row_h200.py``)."""
LONG_WAIT_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (16384, 2048): GemmConfig(2, 2048, 4, stages=3, along=2, programs=4),
}
"""Those of products that wait for several short kernels, during which more can be loaded."""
ONE_ROW_FP8_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (2112, 2048): GemmConfig(4, 2048, 4, stages=1),
    (3072, 2048): GemmConfig(4, 2048, 4, stages=1),
    (16384, 2048): GemmConfig(8, 2048, 4, stages=1, along=2),
}
"""``ONE_ROW_CONFIGS`` and ``LONG_WAIT_CONFIGS`` for fp8 codes."""
LONG_WAIT_FP8_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (16384, 2048): GemmConfig(4, 2048, 4, stages=3, along=2, programs=4),
}
FEW_ROW_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (2112, 2048): GemmConfig(2, 2048, 4),
    (3072, 1536): GemmConfig(2, 2048, 2),
    (2048, 2048): GemmConfig(8, 2048, 8),
}
"""Configurations by the matrix's ``(rows, columns)`` that are better than the rule (``benchmarks/gemm_tiles.py``)."""
FEW_ROW_FP8_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {
    (2048, 2048): GemmConfig(4, 2048, 4),
    (2048, 8192): GemmConfig(8, 8192, 8),
}
"""The same for fp8 codes (``benchmarks/quantized_products_h200.py``)."""
TENSOR_CORE_CONFIGS: Mapping[tuple[int, int], GemmConfig] = {(2112, 2048): GemmConfig(16, 2048, 8, tiles=True)}
"""The same for products on tensor cores."""
STREAMED, STREAMED_GATED = GemmConfig(64, 128, 4, tiles=True, stages=6), GemmConfig(64, 128, 8, tiles=True, stages=4)
_FILLED = 0.9
"""Smallest share of busy multiprocessors, on average over waves, in a gated product: if more are idle in the last wave,
a library divides the matrix better."""

_BYTES = 32 << 10
"""Bytes of the matrix that a program loads at once; a multiprocessor holds several."""
_LONGEST = 8192
"""Bytes of a matrix row that a program loads at once."""


@lru_cache(maxsize=256)
def choose_few(outputs: int, inputs: int, tiles: int = 1) -> GemmConfig:
    """Return the configuration for a 16-bit matrix ``[tiles * outputs, inputs]``. A program computes ``tiles``
    blocks."""
    return FEW_ROW_CONFIGS.get((tiles * outputs, inputs)) or _few(inputs, tiles, 2)


def choose_codes(
    rows: int, outputs: int, inputs: int, device: torch.device, *, gated: bool = False, long_wait: bool = False
) -> GemmConfig:
    """Return the configuration of ``skinny_fp8_gemm`` for ``FEW`` rows or one, and codes ``[outputs, inputs]``. See
    ``choose``."""
    if rows == 1 and starts_early(device):
        configs = LONG_WAIT_FP8_CONFIGS if long_wait else {}
        config = configs.get((outputs, inputs), ONE_ROW_FP8_CONFIGS.get((outputs, inputs)))
        if config is not None:
            return config
    tiles = 2 if gated else 1
    return choose_few_codes(outputs // tiles, inputs, tiles)


@lru_cache(maxsize=256)
def choose_few_codes(outputs: int, inputs: int, tiles: int = 1) -> GemmConfig:
    """The same for a matrix of fp8 codes, from registers."""
    found = FEW_ROW_FP8_CONFIGS.get((tiles * outputs, inputs))
    if found is not None:
        return found
    config = _few(inputs, tiles, 1)
    # 128 codes per thread. A warp loads 512 columns of a row at once.
    warps = min(config.block_n * config.block_k * tiles // 4096, config.block_k // 512, 8)
    return replace(config, warps=max(warps, 1))


def _few(inputs: int, tiles: int, size: int) -> GemmConfig:
    """Return the configuration for matrix elements of ``size`` bytes."""
    # One block if possible, even with masked lanes: only the first block is loaded before the kernel waits.
    block_k, most = triton.next_power_of_2(inputs), _BYTES // size
    if block_k * size > _LONGEST:
        whole = inputs & -inputs  # the largest power of two that divides it
        block_k = min(whole if whole >= 512 else block_k, _LONGEST // size)
    block_n = min(max(most // (block_k * tiles), 1), 8 // tiles)
    return GemmConfig(block_n, block_k, 8 if block_n * block_k * tiles > most else 4)


def choose_tiles(outputs: int, inputs: int, *, normed: bool) -> GemmConfig:
    """Return the configuration for tensor cores. Every warp gets a part that is at least one tile wide."""
    found = TENSOR_CORE_CONFIGS.get((outputs, inputs))
    if found is not None:
        return found
    most = 512 if normed else 1024  # a norm needs registers
    block_k = min(max(triton.next_power_of_2(inputs), 256), most)
    return GemmConfig(16, block_k, 4 if inputs <= 2048 else 8, tiles=True)


def choose(
    x: Tensor, weight: Tensor, *, normed: bool = False, gated: bool = False, long_wait: bool = False
) -> GemmConfig | None:
    """Return the configuration of ``skinny_gemm`` for these tensors; None if a library is faster, or the only option.

    It depends on no values, so it is the same for every call with the same number of rows. ``long_wait``: several
    short kernels run before this product.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return None
    rows, (numbers, inputs) = x.shape[0], weight.shape
    if not 0 < rows <= MANY or inputs % 2 or not weight.is_contiguous():
        return None
    tiles = 2 if gated else 1
    if rows == 1 and starts_early(x.device):
        config = (LONG_WAIT_CONFIGS if long_wait else {}).get((numbers, inputs), ONE_ROW_CONFIGS.get((numbers, inputs)))
        if config is not None:
            return config
    if rows <= FEW:
        return choose_few(numbers // tiles, inputs, tiles)
    if rows <= SOME and numbers <= _SHORT:
        # float16 overflows for a row times its gain before the division by the row's norm
        return choose_tiles(numbers // tiles, inputs, normed=normed) if x.dtype is torch.bfloat16 else None
    if inputs % 8:  # copies are 16 bytes wide
        return None
    config = STREAMED_GATED if gated else STREAMED
    if streamed_bytes(config, rows, tiles) > shared_memory(x.device):  # e.g. SM 86, 89 and 120, which have 99 KiB
        return None
    if gated:
        programs = numbers // 2 / config.block_n / multiprocessors(x.device)
        return config if programs >= _FILLED * math.ceil(programs) else None
    return config if rows <= MORE and numbers <= _SHORT and inputs <= _NARROW else None


def streamed_bytes(config: GemmConfig, rows: int, tiles: int) -> int:
    """Return the shared memory of a program of ``streamed_gemm``, without a few barriers; before SM 90 it is a stage
    less."""
    padded: int = max(triton.next_power_of_2(rows), 16)
    return config.stages * (tiles * config.block_n + padded) * config.block_k * 2


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, on a CPU that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
