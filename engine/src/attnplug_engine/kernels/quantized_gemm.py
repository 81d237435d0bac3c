"""GEMM with quantized weights, for any number of rows. ``quantized_tiles`` describes the formats.

Up to 64 rows it is bound by reading the matrix once. Bias, SwiGLU gate and residual are fused. An RMS norm is fused
into the scaling of activations to fp8; for other formats it is a separate kernel. One or two rows are multiplied by
fp8 codes in ``skinny_fp8_gemm``, up to 64 by a matrix of few rows in ``split_gemm`` or ``tiled_fp8_gemm``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.elementwise import rms_norm
from attnplug_engine.kernels.gemm_epilogue import finish
from attnplug_engine.kernels.gemm_tiles import FEW, GemmConfig, choose_codes
from attnplug_engine.kernels.quantized_configs import QuantizedConfig, choose
from attnplug_engine.kernels.quantized_tiles import prefetch, product
from attnplug_engine.kernels.scaled_rows import scale_rows, scales_rows
from attnplug_engine.kernels.skinny_fp8_gemm import skinny_fp8_gemm
from attnplug_engine.kernels.skinny_gemm import aligned
from attnplug_engine.kernels.split_gemm import SplitConfig, choose_split, split_gemm
from attnplug_engine.kernels.tiled_fp8_gemm import choose_tiled, tiled_fp8_gemm

_BAND = 8
"""Row tiles per band. Programs iterate over a band before the next matrix rows, so that both stay in L2."""


@triton.jit(do_not_specialize=["rows", "columns"])
def _quantized_gemm(
    out, x, x_scales, codes, scales, bias, onto, rows, columns, out_stride, x_stride, onto_stride,
    K: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ONE_SCALE: tl.constexpr, FORMAT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
    BAND: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ONTO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a tile ``[ROWS, BLOCK_N]`` of the result. If ``GATED``, gate and up rows alternate in a tile."""
    PARTS: tl.constexpr = 2 if GATED else 1
    if EARLY:
        gdc_launch_dependents()
    # Programs of a band of row tiles share the matrix rows of their column tile.
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, BLOCK_N)
    band = tl.program_id(0) // (BAND * column_tiles)
    band_tiles = tl.minimum(row_tiles - band * BAND, BAND)
    in_band = tl.program_id(0) % (BAND * column_tiles)
    first = in_band // band_tiles * BLOCK_N
    line = tl.arange(0, PARTS * BLOCK_N)
    # Rows behind the last repeat it and are not stored.
    number = tl.minimum(first + line // PARTS, columns - 1) + line % PARTS * columns
    row = (band * BAND + in_band % band_tiles) * ROWS + tl.arange(0, ROWS)
    if EARLY and LINES > 0:
        prefetch(codes, number, K if FORMAT == "scaled" or FORMAT == "fp8" else K // 2, LINES)
    if EARLY:
        gdc_wait()
    total = product(
        codes, scales, x, x_scales, x_stride, rows, first, number, tl.minimum(row, rows - 1), row < rows, K,
        GROUP, ROWS_PER_SCALE, ONE_SCALE, FORMAT, UNITS, STAGES, NATIVE,
    )  # fmt: skip
    total_up = total
    if GATED:
        total, total_up = tl.split(tl.permute(total.reshape(BLOCK_N, 2, ROWS), (0, 2, 1)))
    finish(
        total, total_up, total, out, bias, onto, first + tl.arange(0, BLOCK_N), row.to(tl.int64), rows, columns,
        out_stride, onto_stride, 0.0, K, GATED, False, BIAS, ONTO,
    )  # fmt: skip


def supports(width: int, group: int | None) -> bool:
    """Return True if the kernel supports a weight with ``width`` columns and ``group`` columns per scale."""
    return width % 16 == 0 and (group is None or (group & (group - 1) == 0 and group >= 16))


def prepared(x: Tensor, codes: Tensor, form: str, norm: tuple[Tensor, float] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations, their scales (or a dummy) and codes in the dtypes that ``product`` takes for a format."""
    if form == "scaled":
        values, factors = scale_rows(x, norm)
        return values, factors, codes
    x = x if norm is None else rms_norm(x, *norm)
    rows = (x if x.stride(1) == 1 else x.contiguous()) if form == "fp8" else aligned(x).view(torch.int32)
    return rows, rows, codes.view(torch.uint8)


def quantized_gemm(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    form: str,
    group: int | None,
    rows_per_scale: int,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gated: bool = False,
    onto: Tensor | None = None,
    config: QuantizedConfig | GemmConfig | SplitConfig | None = None,
    counters: Tensor | None = None,
    long_wait: bool = False,
) -> Tensor:
    """Return ``x [rows, K]`` times a quantized matrix ``[N, K]`` transposed: ``[rows, N]`` like ``x``.

    ``form`` is the codes' format: ``fp8``, ``int4`` or ``mxfp4``. ``skinny_fp8_gemm`` multiplies up to ``FEW`` rows by
    fp8 codes, and ``tiled_fp8_gemm`` up to 16 by short matrices; other rows are scaled to fp8 if ``scales_rows``. With
    the weight's ``arrival_counters``, ``split_gemm`` multiplies up to 64 rows by short matrices.
    ``scales`` are ``[N / rows_per_scale, K / group]``. ``norm`` is the weight and epsilon of an RMS norm of ``x``. See
    ``skinny_gemm`` for the others. ``config`` is of ``quantized_configs``, of ``split_gemm``, or of ``gemm_tiles``
    for ``tiled_fp8_gemm`` (``tiles``) and ``skinny_fp8_gemm``. ``long_wait``: several short kernels run before this
    product.
    """
    (rows, width), parts = x.shape, 2 if gated else 1
    outputs = codes.shape[0] // parts
    if rows == 0:
        return x.new_empty(0, outputs)
    if config is None and form == "fp8":
        if rows <= FEW:
            config = choose_codes(rows, codes.shape[0], width, x.device, gated=gated, long_wait=long_wait)
        else:
            if counters is not None and not gated:
                config = choose_split(x, codes, group=group, rows_per_scale=rows_per_scale)
            config = config or choose_tiled(x, codes, group, rows_per_scale, gated=gated)
    if isinstance(config, SplitConfig):
        assert counters is not None, "programs that divide the columns count their arrivals"
        return split_gemm(
            x, codes, config, counters, scales=scales, group=group, rows_per_scale=rows_per_scale, bias=bias, norm=norm,
            onto=onto,
        )  # fmt: skip
    if isinstance(config, GemmConfig):
        if config.tiles:
            return tiled_fp8_gemm(
                x, codes, scales, config, group=group, rows_per_scale=rows_per_scale, bias=bias, norm=norm, onto=onto
            )
        return skinny_fp8_gemm(
            x, codes, scales, config, group=group, rows_per_scale=rows_per_scale,
            bias=bias, norm=norm, gated=gated, onto=onto,
        )  # fmt: skip
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    form = "scaled" if scales_rows(form, group, x.device) else form
    config = config or choose(form, rows, codes.shape[0], x.device)
    values, factors, codes = prepared(x, codes, form, norm)
    onto = onto if onto is None or onto.stride(1) == 1 else onto.contiguous()
    block_n = config.columns // parts
    _quantized_gemm[(triton.cdiv(outputs, block_n) * triton.cdiv(rows, config.rows),)](
        out, values, factors, codes, scales,
        x if bias is None else bias,
        x if onto is None else onto,
        rows, outputs,
        out.stride(0), values.stride(0),
        0 if onto is None else onto.stride(0),
        K=width,
        GROUP=triton.next_power_of_2(width) if group is None else group,
        ROWS_PER_SCALE=rows_per_scale,
        ONE_SCALE=not gated and rows_per_scale % block_n == 0,
        FORMAT=form,
        ROWS=config.rows,
        BLOCK_N=block_n,
        UNITS=config.units,
        STAGES=config.stages,
        LINES=config.lines,
        BAND=_BAND,
        NATIVE=x.dtype is torch.bfloat16,
        GATED=gated,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out
