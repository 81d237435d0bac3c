"""Products of activations with a quantized matrix, bound by the time to read the matrix.

Up to 64 rows, the matrix is streamed through shared memory once, as in ``streamed_gemm``. On SM 89 and newer, fp8 codes
go to the tensor cores as they are: each row's activations are scaled to fp8 in groups of ``BLOCK_K`` columns, and
products of a group are scaled in float32. Otherwise codes are decoded in registers to the dtype of the activations.
With more rows, each program has 64 of them.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options, shared_memory
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.quantized_tiles import decoded_tile, scale_tile

MOST_ROWS = 64
"""Most rows of one program."""
_BLOCK_K = 128
_LARGEST = 448.0


@triton.jit(do_not_specialize=["rows", "columns"])
def _quantized_gemm(
    out, x, codes, scales, bias, onto, rows, columns, out_stride, x_stride, onto_stride,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``BLOCK_N`` columns of ``ROWS`` rows of the result. Rows of the gate and of ``up`` alternate in one tile."""
    PARTS: tl.constexpr = 2 if GATED else 1
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    line = tl.arange(0, PARTS * BLOCK_N)
    place = first + line // PARTS
    number = place + line % PARTS * columns  # row of the matrix
    exists = place < columns
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride  # rows behind the last repeat it
    total = tl.zeros([PARTS * BLOCK_N, ROWS], tl.float32)
    if EARLY:
        gdc_wait()
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_K)[None, :]
        values = tl.load(inputs + column, mask=column < K, other=0.0)
        if SCALED:
            there = exists[:, None] & (column < K)
            weights = tl.load(codes + number.to(tl.int64)[:, None] * K + column, mask=there, other=0.0,
                              eviction_policy="evict_first")  # fmt: skip
            exact = values.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(exact), 1), 1e-12)
            scaled = (exact * (448.0 / largest)[:, None]).to(codes.dtype.element_ty)
            product = tl.dot(weights, tl.trans(scaled)) * (largest / 448.0)[None, :]
            total += product * scale_tile(scales, number, exists, start, K, GROUP, BLOCK_K, ROWS_PER_SCALE)
        else:
            weights = decoded_tile(codes, scales, number, exists, start, K, GROUP, BLOCK_K, ROWS_PER_SCALE, FORMAT)
            total = tl.dot(weights.to(values.dtype), tl.trans(values), acc=total, input_precision="ieee")
    total_up = total
    if GATED:
        total, total_up = tl.split(tl.permute(total.reshape(BLOCK_N, 2, ROWS), (0, 2, 1)))
    finish(
        total, total_up, total, out, bias, onto, first + tl.arange(0, BLOCK_N), row, rows, columns, out_stride,
        onto_stride, 0.0, K, GATED, False, BIAS, ONTO,
    )  # fmt: skip


@triton.jit
def _scale_rows(x, x_stride, codes, scales, K: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):
    """Scale one row's group of ``GROUP`` columns to fp8. ``scales`` are ``[rows, groups]``."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    BLOCK: tl.constexpr = triton.next_power_of_2(GROUP)
    inside = tl.arange(0, BLOCK)
    column = group * GROUP + inside
    there = (inside < GROUP) & (column < K)
    values = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(values), 0), 1e-12)
    tl.store(codes + row * K + column, (values * (448.0 / largest)).to(codes.dtype.element_ty), mask=there)
    tl.store(scales + row * tl.num_programs(1) + group, largest / 448.0)


def scale_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return ``x [rows, K]`` as fp8 e4m3, and its scales ``[rows, ceil(K / group)]`` float32."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, triton.cdiv(width, group), device=x.device)
    if rows:
        _scale_rows[rows, scales.shape[1]](
            x, x.stride(0), codes, scales, K=width, GROUP=group, num_warps=1, **launch_options(x.device)
        )
    return codes, scales


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return True if tensor cores take fp8: SM 89 and newer. An interpreter does, too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def supports(width: int, group: int | None) -> bool:
    """Return True if a weight with ``width`` columns and ``group`` columns per scale can be multiplied here."""
    return width % 16 == 0 and (group is None or (group & (group - 1) == 0 and group >= 16))


def quantized_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    form: str,
    group: int | None,
    rows_per_scale: int,
    bias: Tensor | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    scaled: bool | None = None,
) -> Tensor:
    """Return ``x [rows, K]`` times a quantized matrix ``[N, K]`` transposed: ``[rows, N]`` like ``x``.

    ``form`` is the codes' format: ``fp8``, ``int4`` or ``mxfp4``. ``scaled``: activations are scaled to fp8, by default
    if that is possible. See ``skinny_gemm`` for the others.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    rows, width = x.shape
    parts = 2 if gated else 1
    outputs = codes.shape[0] // parts
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if scaled is None:
        scaled = form == "fp8" and (group is None or group >= _BLOCK_K) and multiplies_fp8(x.device)
    if form == "fp8" and not scaled:
        codes = codes.view(torch.uint8)
    padded = min(max(triton.next_power_of_2(rows), 16), MOST_ROWS)
    block_n, warps, stages = tile(outputs, padded, parts, x.device)
    _quantized_gemm[triton.cdiv(outputs, block_n), triton.cdiv(rows, padded)](
        out, x, codes, scales,
        x if bias is None else bias,
        x if onto is None else onto,
        rows, outputs,
        out.stride(0), x.stride(0),
        0 if onto is None else onto.stride(0),
        K=width,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        FORMAT=form,
        SCALED=scaled,
        ROWS=padded,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        STAGES=stages,
        GATED=gated,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def tile(outputs: int, rows: int, parts: int, device: torch.device) -> tuple[int, int, int]:
    """Return matrix rows of a program, its warps and its stages. Programs are at least as many as multiprocessors, if
    tiles of 16 rows allow that; stages fit into shared memory."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    block_n = next((size for size in (64, 32) if outputs >= size * processors), 16) // parts
    stage = (parts * block_n + 2 * rows) * _BLOCK_K
    return block_n, 4, max(min(12, (shared_memory(device) // 2 - 2048) // stage), 2)
