"""Products of few rows with a large matrix, which take as long as reading the matrix does.

One program has some rows of the matrix, all of them in registers: many loads are in flight at once, and they are issued
before the kernel waits for its input. A norm of the input and a sum with a residual cost no launch of their own. The
norm's factor is one number a row, so it is put on the result; sums are float32. With more rows those of
``tile_products``, of ``streamed_products`` or of a library are faster: ``choose`` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.product_ends import finish
from attnplug_engine.kernels.streamed_products import _streamed_product
from attnplug_engine.kernels.tile_products import _tile_product

FEW, SOME, MANY = 2, 8, 64
"""Up to ``FEW`` rows the kernel in here is used, up to ``SOME`` that of ``tile_products`` for matrices of few rows, and
up to ``MANY`` that of ``streamed_products`` for gated ones of many. The library is faster for all else; measured on an
H200 (``benchmarks/product_cuts.py``), with the norm, gate and residual that the library takes launches of their own
for."""
_SHORT = 4096


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is divided: matrix rows of a program, how many columns it loads at once, and its warps.

    ``tiles`` says that it is made by tensor cores; with ``stages`` so many parts of the matrix are in shared memory.
    """

    block_n: int
    block_k: int
    warps: int
    tiles: bool = False
    stages: int = 0
    ahead: int = 0


CUTS: Mapping[tuple[int, int], Cut] = {
    (2112, 2048): Cut(2, 2048, 4),
    (3072, 1536): Cut(2, 2048, 2),
    (2048, 2048): Cut(8, 2048, 8),
}
"""By the matrix's ``(rows, columns)``, where a cut is better than the rule (``benchmarks/product_cuts.py``)."""
TILES: Mapping[tuple[int, int], Cut] = {(2112, 2048): Cut(16, 2048, 8, tiles=True)}
"""The same for products by tensor cores."""
STREAMED = Cut(64, 128, 8, tiles=True, stages=4)
"""Of each two blocks of a gated matrix; what tensor cores take at once."""

_LONGEST = 4096
_TILE = 16_384
"""Elements of the matrix that a program loads at once: 32 KiB of a 16-bit type, of which a processor holds several."""


@lru_cache(maxsize=256)
def choose_few(outputs: int, inputs: int, tiles: int = 1) -> Cut:
    """The cut for a matrix ``[tiles * outputs, inputs]``, of which a program takes ``tiles`` blocks."""
    found = CUTS.get((tiles * outputs, inputs))
    if found is not None:
        return found
    # In one piece, if need be with lanes that load nothing: only the first piece is loaded before the kernel waits.
    block_k = triton.next_power_of_2(inputs)
    if block_k > _LONGEST:
        whole = inputs & -inputs  # the largest power of two that divides it
        block_k = min(whole if whole >= 512 else block_k, _LONGEST)
    block_n = min(max(_TILE // (block_k * tiles), 1), 8 // tiles)
    return Cut(block_n, block_k, 8 if block_n * block_k * tiles > _TILE else 4)


def choose_tiles(outputs: int, inputs: int, *, normed: bool) -> Cut:
    """The cut for a product by tensor cores, of which every warp gets a part that is at least one tile wide."""
    found = TILES.get((outputs, inputs))
    if found is not None:
        return found
    most = 512 if normed else 1024  # a norm takes registers
    block_k = min(max(triton.next_power_of_2(inputs), 256), most)
    return Cut(16, block_k, 4 if inputs <= 2048 else 8, tiles=True)


@triton.jit
def _weights(weight, number, pair, columns, PAIRS: tl.constexpr):
    """``[block_n, block_k / 2]`` pairs of the matrix. They are the first to leave the cache: nobody reads them again in
    this step."""
    at = weight + number.to(tl.int64)[:, None] * PAIRS + pair[None, :]
    there = (number < columns)[:, None] & (pair < PAIRS)[None, :]
    return tl.load(at, mask=there, other=0, eviction_policy="evict_first")


@triton.jit
def _halves(pairs, BFLOAT16: tl.constexpr):
    """Both numbers of each pair in float32."""
    if BFLOAT16:  # the upper half of a float32
        first = (pairs << 16).to(tl.float32, bitcast=True)
        second = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        first = pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize=["rows", "columns"])
def _product(
    out, x, weight, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BFLOAT16: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of the result. Columns of the input are taken in turns, each turn's weights a turn ahead.

    Input and weights come as pairs in 32 bits: single 16-bit numbers would be taken apart right after their load, that
    is, weights would be waited for before the input is.
    """
    PAIRS: tl.constexpr = K // 2
    BLOCK: tl.constexpr = BLOCK_K // 2
    if EARLY:
        gdc_launch_dependents()
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK)
    upper = weight + columns.to(tl.int64) * PAIRS  # the rows that make ``up``; those before make ``gate``
    ahead = _weights(weight, number, place, columns, PAIRS)
    if GATED:
        ahead_up = _weights(upper, number, place, columns, PAIRS)
    if EARLY:
        gdc_wait()
    row = tl.arange(0, ROWS)
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    total_up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.static_range(0, PAIRS, BLOCK):
        pair = start + place
        first, second = _halves(ahead, BFLOAT16)
        if GATED:
            first_up, second_up = _halves(ahead_up, BFLOAT16)
        if start + BLOCK < PAIRS:
            ahead = _weights(weight, number, pair + BLOCK, columns, PAIRS)
            if GATED:
                ahead_up = _weights(upper, number, pair + BLOCK, columns, PAIRS)
        if NORM:
            column = 2 * start + tl.arange(0, BLOCK_K)
            gains = tl.load(gain + column, mask=column < K, other=0.0).to(tl.float32)
            first_gain, second_gain = tl.split(gains.reshape(1, BLOCK, 2))
        for index in tl.static_range(ROWS):
            # A row past the last repeats it, and is not stored.
            line = x + tl.minimum(index, rows - 1) * x_stride
            a, b = _halves(tl.load(line + pair[None, :], mask=(pair < PAIRS)[None, :], other=0), BFLOAT16)
            here = row == index
            if NORM:
                squares = tl.where(here, squares + tl.sum(tl.sum(a * a + b * b, 1), 0), squares)
                a *= first_gain
                b *= second_gain
            total = tl.where(here[None, :], total + tl.sum(first * a + second * b, 1)[:, None], total)
            if GATED:
                total_up = tl.where(
                    here[None, :], total_up + tl.sum(first_up * a + second_up * b, 1)[:, None], total_up
                )
    finish(
        total, total_up, squares, out, bias, onto, number, row, rows, columns, out_stride, onto_stride, eps,
        K, GATED, NORM, BIAS, ONTO,
    )  # fmt: skip


def choose(x: Tensor, weight: Tensor, *, normed: bool = False, gated: bool = False) -> Cut | None:
    """How ``product`` multiplies these; ``None`` where a library is faster, or the only one that can.

    The answer is the same for every run of so many rows.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return None
    rows, (numbers, inputs) = x.shape[0], weight.shape
    tiles = 2 if gated else 1
    if not 0 < rows <= MANY or inputs % 2 or not weight.is_contiguous():
        return None
    if rows <= FEW:
        return choose_few(numbers // tiles, inputs, tiles)
    if x.dtype is torch.float16:  # has no room for a row times its gain that is not yet divided by its length
        return None
    if rows <= SOME and numbers <= _SHORT:
        return choose_tiles(numbers // tiles, inputs, normed=normed)
    return STREAMED if gated and numbers > _SHORT and inputs % 8 == 0 else None


def product(
    x: Tensor,
    weight: Tensor,
    cut: Cut,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``x`` ``[rows, K]`` times ``weight`` ``[N, K]`` transposed: ``[rows, N]`` in ``dtype``, by default that of ``x``.

    ``norm`` is the weight and the epsilon of a root-mean-square norm of ``x``. ``gated`` makes ``silu(gate) * up`` of
    ``N = [gate | up]``, so the result has half as many columns. The result is added to ``onto`` ``[rows, N]``.
    """
    if x.stride(1) != 1 or x.stride(0) % 2 or x.storage_offset() % 2:
        x = x.clone(memory_format=torch.contiguous_format)  # one row is contiguous already, whatever its stride
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    if onto is not None and onto.stride(1) != 1:
        onto = onto.contiguous()
    out = torch.empty(rows, outputs, dtype=x.dtype if dtype is None else dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    pairs = (x.view(torch.int32), weight.view(torch.int32), x.stride(0) // 2)
    kernel, shape = _product, {"ROWS": triton.next_power_of_2(rows), "BFLOAT16": x.dtype is torch.bfloat16}
    if cut.stages:
        kernel, shape = (
            _streamed_product,
            {"ROWS": max(triton.next_power_of_2(rows), 16), "STAGES": cut.stages, "AHEAD": cut.ahead},
        )
        pairs = (x, weight, x.stride(0))
    elif cut.tiles:
        kernel, shape = _tile_product, {**shape, "ROWS": max(triton.next_power_of_2(rows), 8), "WARPS": cut.warps}
    x_read, weight_read, x_stride = pairs
    kernel[(triton.cdiv(outputs, cut.block_n),)](
        out, x_read, weight_read,
        x if bias is None else bias,
        x if onto is None else onto,
        gain, rows, outputs,
        out.stride(0), x_stride,
        0 if onto is None else onto.stride(0),
        eps,
        K=inputs,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        **shape,
        num_warps=cut.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
