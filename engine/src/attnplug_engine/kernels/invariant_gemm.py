"""Matrix products with the same bits of a row for every number of rows.

Three things decide the bits of an element: the tensor-core instruction, the order of its sum, and the rounding at the
end. Here they depend on the shape of the matrix only.

- The matrix is the first factor, so its rows fill the dimension of ``wgmma`` that is always 64, and the rows of the
  input the other one. Tiles of more rows use the same instruction with a larger ``n``, which changes no sum. On GPUs
  where that is not known, all numbers of rows have one tile.
- The summed dimension is divided into parts, few or none for a large matrix. Each part is summed in steps of 16, and
  the parts are added in order. With few rows each part has a program of its own, so that a small matrix keeps all
  multiprocessors busy; with many rows one program sums all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options, one_instruction, shared_memory
from attnplug_engine.kernels.gemm_epilogue import finish

_PROGRAMS, _MOST_PARTS, _SHORTEST_PART = 132, 8, 512
"""Number of programs that the parts of a matrix are to fill, whatever the GPU has, so that bits do not depend on it;
most parts; and fewest columns of a part."""
_DIVIDED = 64
"""Most rows for which each part has a program of its own."""
_GROUP = 8
"""Row tiles whose programs run together, so that they share the matrix in the L2 cache."""


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """Tile of a program: input rows × matrix rows, in steps of ``depth`` along the summed dimension."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


TILES = (InvariantTile(16, 64, 128, 4, 6), InvariantTile(64, 64, 128, 4, 4), InvariantTile(128, 128, 64, 8, 3))
"""By the number of rows: the first that holds them all, or the last."""
GATED_TILES = (InvariantTile(16, 64, 128, 8, 4), InvariantTile(64, 64, 64, 8, 4), InvariantTile(128, 64, 64, 8, 3))
"""The same for a gated matrix, of which a program has two blocks of ``columns`` rows."""
FLOAT32_TILE = InvariantTile(16, 32, 32, 4, 1)


@lru_cache(maxsize=512)
def parts(outputs: int, inputs: int, *, gated: bool) -> tuple[int, int]:
    """Return the number of parts of a matrix's columns, and the columns of a part, a multiple of 128."""
    programs = triton.cdiv(outputs, 64)
    count = 1
    while not gated and count < _MOST_PARTS and 2 * count * programs <= _PROGRAMS:
        if inputs < 2 * count * _SHORTEST_PART:
            break
        count *= 2
    size = triton.cdiv(triton.cdiv(inputs, count), 128) * 128
    return triton.cdiv(inputs, size), size


@triton.jit
def _part(lines, inputs, exists, begin, K: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
          BLOCK_K: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Sum of one part: ``[WIDTH, ROWS]``."""
    total = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
        column = begin + start + tl.arange(0, BLOCK_K)[None, :]
        if K % PART == 0 and PART % BLOCK_K == 0:
            weights = tl.load(lines + column, mask=exists, other=0.0)
            values = tl.load(inputs + column)
        else:
            weights = tl.load(lines + column, mask=exists & (column < K), other=0.0)
            values = tl.load(inputs + column, mask=column < K, other=0.0)
        total = tl.dot(weights, tl.trans(values), acc=total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "columns"])
def _invariant_gemm(
    out, x, weight, bias, onto, rows, columns, out_stride, x_stride, onto_stride,
    K: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, DIVIDED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``ROWS × BLOCK_N`` of the result; if ``DIVIDED``, one part's sums in float32: ``out [PARTS, rows, columns]``.

    Rows of the gate and of ``up`` alternate in one tile.
    """
    BLOCKS: tl.constexpr = 2 if GATED else 1
    if EARLY:
        gdc_launch_dependents()
    across, down = tl.cdiv(columns, BLOCK_N), tl.cdiv(rows, ROWS)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    top = (group * GROUP + place % height) * ROWS
    first = place // height * BLOCK_N
    line = tl.arange(0, BLOCKS * BLOCK_N)
    number = first + line // BLOCKS
    lines = weight + (number + line % BLOCKS * columns).to(tl.int64)[:, None] * K
    exists = (number < columns)[:, None]
    row = tl.arange(0, ROWS)
    left = rows - top
    inputs = x + (top + tl.minimum(row, left - 1)).to(tl.int64)[:, None] * x_stride  # rows behind the last repeat it
    if EARLY:
        gdc_wait()
    if DIVIDED:
        part = tl.program_id(1)
        total = _part(lines, inputs, exists, part * PART, K, PART, BLOCKS * BLOCK_N, ROWS, BLOCK_K, STAGES)
        at = out + ((part * rows + top + row[None, :]).to(tl.int64) * columns + number[:, None])
        tl.store(at, total, mask=exists & (row < left)[None, :])
    else:
        total = _part(lines, inputs, exists, 0, K, PART, BLOCKS * BLOCK_N, ROWS, BLOCK_K, STAGES)
        for part in tl.static_range(1, PARTS):
            total += _part(lines, inputs, exists, part * PART, K, PART, BLOCKS * BLOCK_N, ROWS, BLOCK_K, STAGES)
        total_up = total
        if GATED:
            total, total_up = tl.split(tl.permute(total.reshape(BLOCK_N, 2, ROWS), (0, 2, 1)))
        out += top.to(tl.int64) * out_stride
        onto += top.to(tl.int64) * onto_stride
        finish(
            total, total_up, total, out, bias, onto, first + tl.arange(0, BLOCK_N), row, left, columns, out_stride,
            onto_stride, 0.0, K, GATED, False, BIAS, ONTO,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "columns"])
def _add_parts(
    out, sums, bias, onto, rows, columns, out_stride, onto_stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of ``sums [PARTS, rows, columns]`` in order, then finish as one program does."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = number < columns
    total = tl.load(sums + row.to(tl.int64) * columns + number, mask=exists, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + (part * rows + row).to(tl.int64) * columns + number, mask=exists, other=0.0)
    out += row.to(tl.int64) * out_stride
    onto += row.to(tl.int64) * onto_stride
    total = total[:, None]
    finish(
        total, total, total, out, bias, onto, number, tl.arange(0, 1), 1, columns, out_stride, onto_stride, 0.0,
        1, False, False, BIAS, ONTO,
    )  # fmt: skip


def invariant_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: InvariantTile | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times ``weight [N, K]`` transposed: ``[rows, N]`` in ``dtype``, by default that of ``x``.

    ``gated`` computes ``silu(gate) * up`` of ``N = [gate | up]``, so the result has half as many columns. The result is
    added to ``onto [rows, N]``. ``tile`` replaces the one for the number of rows.
    """
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    weight = weight if weight.is_contiguous() else weight.contiguous()
    if onto is not None and onto.stride(1) != 1:
        onto = onto.contiguous()
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or _tile(rows, x, gated=gated)
    count, size = parts(outputs, inputs, gated=gated)
    divided = count > 1 and rows <= _DIVIDED
    sums = torch.empty(count, rows, outputs, dtype=torch.float32, device=x.device) if divided else out
    stage = ((2 if gated else 1) * tile.columns + tile.rows) * tile.depth * x.element_size()
    added = x if onto is None else onto, 0 if onto is None else onto.stride(0)
    terms = {"BIAS": bias is not None, "ONTO": onto is not None}
    programs = triton.cdiv(outputs, tile.columns) * triton.cdiv(rows, tile.rows)
    _invariant_gemm[programs, count if divided else 1](
        sums, x, weight, x if bias is None else bias, added[0], rows, outputs,
        outputs if divided else out.stride(0), x.stride(0), added[1],
        K=inputs,
        PARTS=count,
        PART=size,
        DIVIDED=divided,
        GROUP=_GROUP,
        ROWS=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        STAGES=max(min(tile.stages, (shared_memory(x.device) - 2048) // stage), 1),
        GATED=gated,
        num_warps=tile.warps,
        **terms,
        **launch_options(x.device),
    )  # fmt: skip
    if divided:
        block = min(triton.next_power_of_2(outputs), 1024)
        _add_parts[triton.cdiv(outputs, block), rows](
            out, sums, x if bias is None else bias, added[0], rows, outputs, out.stride(0), added[1],
            PARTS=count, BLOCK=block, **terms, **launch_options(x.device),
        )  # fmt: skip
    return out


def _tile(rows: int, x: Tensor, *, gated: bool) -> InvariantTile:
    if x.dtype is torch.float32:
        return FLOAT32_TILE
    choices = GATED_TILES if gated else TILES
    if not one_instruction(x.device):
        return choices[0]
    return next((tile for tile in choices if rows <= tile.rows), choices[-1])
