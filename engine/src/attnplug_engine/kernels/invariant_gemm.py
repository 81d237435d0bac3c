"""Matrix products with the same bits of a row for every number of rows.

Three things decide the bits of an element: the tensor-core instruction, the order of its sum, and the rounding at the
end. Here they depend on the shape of the matrix only.

- The matrix is the first factor, so its rows fill the dimension of ``wgmma`` that is always 64, and the rows of the
  input the other one. Tiles of more rows use the same instruction with a larger ``n``, which changes no sum. On GPUs
  where that is not known, all numbers of rows have one tile.
- The summed dimension is divided into parts, few or none for a large matrix. Each part is summed in steps of 16, and
  the parts are added in order. With few rows each part has a program of its own, so that a small matrix keeps all
  multiprocessors busy; with many rows one program sums all parts.

cuBLAS multiplies hundreds of rows faster, and its kernels also sum in steps of 16, but it chooses them by the number
of rows. So it multiplies blocks of constant numbers of rows, if it gives them the same bits as this kernel. That is
compared once for each shape of a matrix, when it is first used outside of a capture. cuBLAS also chooses by strides,
the alignment of pointers, torch's settings, and perhaps by a capture of the stream. So its matrices are always
contiguous and aligned, other settings are compared again, and so is the same product in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options, one_instruction, shared_memory
from attnplug_engine.kernels.cancelling_terms import cancelling
from attnplug_engine.kernels.gemm_epilogue import finish

_PROGRAMS, _MOST_PARTS, _SHORTEST_PART = 132, 8, 512
"""Number of programs that the parts of a matrix are to fill, whatever the GPU has, so that bits do not depend on it;
most parts; and fewest columns of a part."""
_DIVIDED = 64
"""Most rows for which each part has a program of its own."""
_GROUP = 8
"""Row tiles whose programs run together, so that they share the matrix in the L2 cache."""
LIBRARY_ROWS = (2048, 512)
"""Numbers of rows that cuBLAS multiplies at once."""
_ALIGNED = 256
"""Alignment of all matrices in bytes. cuBLAS distinguishes alignments up to this one."""
_agreeing: dict[tuple[object, ...], bool] = {}
"""True if cuBLAS gives rows the bits of this kernel, by number of rows, shape of the matrix and torch's settings."""


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
"""The same for a gated matrix. A program has two blocks of ``columns`` rows of it."""
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
    PARTS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of ``sums`` in order, then finish as one program does.

    ``sums`` are ``[PARTS, rows, columns]``, or ``[1, rows, 2 * columns]`` if ``GATED``.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = number < columns
    width = 2 * columns if GATED else columns
    first = sums + row.to(tl.int64) * width + number
    total = tl.load(first, mask=exists, other=0.0)
    total_up = total
    if GATED:
        total_up = tl.load(first + columns, mask=exists, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(first + (part * rows).to(tl.int64) * width, mask=exists, other=0.0)
    out += row.to(tl.int64) * out_stride
    onto += row.to(tl.int64) * onto_stride
    total = total[:, None]
    finish(
        total, total_up[:, None], total, out, bias, onto, number, tl.arange(0, 1), 1, columns,
        out_stride, onto_stride, 0.0, 1, GATED, False, BIAS, ONTO,
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
    rows = x.shape[0]
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty(rows, outputs, dtype=dtype or x.dtype, device=x.device)
    done = 0
    for count in LIBRARY_ROWS:
        if rows - done < count or tile is not None or not _agrees(count, x, weight, out.dtype, gated=gated):
            continue
        x = x.contiguous()
        x = x if x.data_ptr() % _ALIGNED == 0 else x.clone()
        while rows - done >= count:
            block = slice(done, done + count)
            _by_library(x[block], weight, bias, None if onto is None else onto[block], out[block], gated=gated)
            done += count
    if done < rows:
        added = None if onto is None else onto[done:]
        tile = tile or _tile(rows - done, x, gated=gated)
        _by_kernel(x[done:], weight, bias, added, out[done:], tile, gated=gated)
    return out


def _by_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    onto: Tensor | None,
    out: Tensor,
    tile: InvariantTile,
    *,
    gated: bool,
) -> None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    count, size = parts(outputs, inputs, gated=gated)
    divided = count > 1 and rows <= _DIVIDED
    sums = torch.empty(count, rows, outputs, dtype=torch.float32, device=x.device) if divided else out
    stage = ((2 if gated else 1) * tile.columns + tile.rows) * tile.depth * x.element_size()
    programs = triton.cdiv(outputs, tile.columns) * triton.cdiv(rows, tile.rows)
    _invariant_gemm[programs, count if divided else 1](
        sums, x, weight, x if bias is None else bias, x if onto is None else onto, rows, outputs,
        outputs if divided else out.stride(0), x.stride(0), 0 if onto is None else onto.stride(0),
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
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=tile.warps,
        **launch_options(x.device),
    )  # fmt: skip
    if divided:
        _finish_sums(sums, bias, onto, out, gated=False)


def _by_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None, out: Tensor, *, gated: bool
) -> None:
    """Multiply by cuBLAS, each part of the summed dimension by itself."""
    (rows, inputs), outputs = x.shape, out.shape[1]
    count, size = parts(outputs, inputs, gated=gated)
    sums = torch.empty(count, rows, weight.shape[0], dtype=torch.float32, device=x.device)
    for part in range(count):
        columns = slice(part * size, (part + 1) * size)
        _multiply(x[:, columns], weight[:, columns], sums[part])
    _finish_sums(sums, bias, onto, out, gated=gated)


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x, weight.t(), torch.float32, out=out)


def _finish_sums(sums: Tensor, bias: Tensor | None, onto: Tensor | None, out: Tensor, *, gated: bool) -> None:
    rows, outputs = out.shape
    block = min(triton.next_power_of_2(outputs), 1024)
    _add_parts[triton.cdiv(outputs, block), rows](
        out, sums, out if bias is None else bias, out if onto is None else onto, rows, outputs, out.stride(0),
        0 if onto is None else onto.stride(0),
        PARTS=sums.shape[0],
        BLOCK=block,
        GATED=gated,
        BIAS=bias is not None,
        ONTO=onto is not None,
        **launch_options(out.device),
    )  # fmt: skip


def _agrees(count: int, x: Tensor, weight: Tensor, dtype: torch.dtype, *, gated: bool) -> bool:
    """Return True if cuBLAS gives ``count`` rows the bits of this kernel, eagerly and in a CUDA graph.

    Terms of every other row cancel, so that the bits of a sum show its order. Scales differ too: a kernel may flush
    denormal numbers. cuBLAS knows neither values nor what is added, so other numbers have no influence.
    """
    if x.dtype is torch.float32 or not one_instruction(x.device) or weight.data_ptr() % _ALIGNED:
        return False
    tunes = getattr(torch._C, "_cuda_tunableop_is_enabled", bool)  # absent from builds for CPUs
    if x.is_cuda and tunes():
        return False
    key = (count, weight.shape, x.dtype, dtype, gated, x.device, *_library_settings())
    if key not in _agreeing:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compared now
        rows, matrix = cancelling(count, weight.t())
        rows[2::4] *= 2.0**10
        rows[3::4] *= 4 * torch.finfo(x.dtype).tiny
        own, found = torch.empty(2, count, weight.shape[0] >> gated, dtype=dtype, device=x.device).unbind()
        _by_kernel(rows, matrix.t(), None, None, own, _tile(count, x, gated=gated), gated=gated)
        multiply = partial(_by_library, rows, matrix.t(), None, None, found, gated=gated)
        multiply()
        _agreeing[key] = torch.equal(own, found)
        if _agreeing[key] and x.is_cuda:
            found.zero_()
            _in_graph(multiply)
            _agreeing[key] = torch.equal(own, found)
    return _agreeing[key]


def _in_graph(run: Callable[[], None]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    graph.replay()
    torch.cuda.synchronize()  # the graph's memory is freed with it


def _library_settings() -> tuple[object, ...]:
    """Return the settings of torch by which a product of 16-bit numbers has another kernel or another precision."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.backends.cuda.preferred_blas_library(),
        matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


def _tile(rows: int, x: Tensor, *, gated: bool) -> InvariantTile:
    if x.dtype is torch.float32:
        return FLOAT32_TILE
    choices = GATED_TILES if gated else TILES
    if not one_instruction(x.device):
        return choices[0]
    return next((tile for tile in choices if rows <= tile.rows), choices[-1])
