"""Products of one or two rows with a large matrix. The first weights are in shared memory before the input is ready.

While attention runs, memory is idle. ``skinny_gemm`` loads weights into registers before it waits for its input, but
the kernels before it leave few registers. Here weights are copied to shared memory, which those kernels hardly use. A
thread multiplies what it has copied itself.

With one block of the matrix per program, programs start one by one as earlier kernels end, and the next kernels as
these programs end. Programs with several blocks read faster, at the limit of memory (16.0 instead of 17.4 µs for
64 MiB, H200), but leave no room for others, and fetch so much that attention is delayed: they pay off if several
kernels run before the product, as with MLA.

The matrix may be fp8 codes with scales, like ``skinny_fp8_gemm``'s. The sum of 16 products of a thread is multiplied by
their scale: a multiplication per 16 codes. Scales of a program's next block are loaded during the current one.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.gemm_tiles import GemmConfig, multiprocessors

# The name in newer versions, and the one in Triton 3.6.
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _copy_block(
    weight, buffers, up_buffers, stage, block, blocks, columns, line, column,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start the copy of ``BLOCK_N`` rows of the matrix, or of the gate and of ``up``. The last row repeats."""
    if block < blocks:
        at = weight + gl.minimum(block * BLOCK_N + line, columns - 1).to(gl.int64)[:, None] * K + column[None, :]
        for chunk in gl.static_range(K // BLOCK_K):
            place = stage * (K // BLOCK_K) + chunk
            part = at + chunk * BLOCK_K
            _copy(buffers.index(place), part, eviction_policy="evict_first")
            if GATED:
                _copy(up_buffers.index(place), part + columns.to(gl.int64) * K, eviction_policy="evict_first")
    async_copy.commit_group()


@gluon.jit
def _block_scales(
    scales, block, blocks, columns, line, unit,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, ROWS_PER_SCALE: gl.constexpr,
    GATED: gl.constexpr,
):  # fmt: skip
    """Load the scales of a block's rows ``line``, of the gate and of ``up``: a tensor ``[len(line), BLOCK_K / 16]`` for
    each chunk. The last block and its last row repeat."""
    WIDTH: gl.constexpr = (K + GROUP - 1) // GROUP
    number = gl.minimum(gl.minimum(block, blocks - 1) * BLOCK_N + line, columns - 1)
    found = ()
    found_up = ()
    for chunk in gl.static_range(K // BLOCK_K):
        group = ((chunk * BLOCK_K + unit * 16) // GROUP)[None, :]
        found += (gl.load(scales + (number // ROWS_PER_SCALE)[:, None] * WIDTH + group),)
        if GATED:
            found_up += (gl.load(scales + ((columns + number) // ROWS_PER_SCALE)[:, None] * WIDTH + group),)
    return found, found_up


@gluon.jit
def _products(weights, values, scale, chunk: gl.constexpr, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return products, or the scaled sums of 16 neighbours, which one thread has."""
    found = weights * values[None, :]
    if GROUP:
        sums = gl.sum(found.reshape([weights.shape[0], weights.shape[1] // 16, 16]), 2)
        found = gl.convert_layout(sums, SUMS, assert_trivial=True) * scale[chunk]
    return found


@gluon.jit(do_not_specialize=["rows", "columns"])
def _preloaded_gemm(
    out, x, weight, scales, bias, onto, gain, rows, columns, out_stride, x_stride, onto_stride, eps,
    K: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS_N: gl.constexpr, WARPS_K: gl.constexpr,
    GROUP: gl.constexpr, ROWS_PER_SCALE: gl.constexpr, SCALE_ROWS: gl.constexpr,
    GATED: gl.constexpr, NORM: gl.constexpr, BIAS: gl.constexpr, ONTO: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Every ``num_programs``-th block of ``BLOCK_N`` columns of the result. ``WARPS_K`` warps share a row.

    ``GROUP`` is 0 without scales. ``SCALE_ROWS`` is 1 if all rows of a block have the same scales, else ``BLOCK_N``.
    """
    WIDE: gl.constexpr = 16 if GROUP else 8  # elements of 16 bytes
    LINES: gl.constexpr = gl.BlockedLayout([1, WIDE], [1, 32], [WARPS_N, WARPS_K], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(WIDE, 1, 1, [1, 0])
    # Of what is added by a thread: products, or scaled sums of 16 products.
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS_N, WARPS_K], [1, 0]) if GROUP else LINES
    WIDTH: gl.constexpr = BLOCK_K // 16 if GROUP else BLOCK_K
    CHUNKS: gl.constexpr = K // BLOCK_K
    TYPE: gl.constexpr = weight.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
    buffers = gl.allocate_shared_memory(TYPE, [STAGES * CHUNKS, BLOCK_N, BLOCK_K], SHARED)
    up_buffers = buffers
    if GATED:
        up_buffers = gl.allocate_shared_memory(TYPE, [STAGES * CHUNKS, BLOCK_N, BLOCK_K], SHARED)
    line = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LINES))
    first, programs = gl.program_id(0), gl.num_programs(0)
    blocks = (columns + BLOCK_N - 1) // BLOCK_N
    for stage in gl.static_range(STAGES):
        _copy_block(
            weight, buffers, up_buffers, stage, first + stage * programs, blocks, columns, line, column,
            K, BLOCK_N, BLOCK_K, GATED,
        )  # fmt: skip
    ahead = ()
    ahead_up = ()
    if GROUP:
        scaled = gl.arange(0, SCALE_ROWS, gl.SliceLayout(1, SUMS))
        unit = gl.arange(0, BLOCK_K // 16, gl.SliceLayout(0, SUMS))
        ahead, ahead_up = _block_scales(
            scales, first, blocks, columns, scaled, unit, K, BLOCK_N, BLOCK_K, GROUP, ROWS_PER_SCALE, GATED
        )
    gains = ()
    if NORM:
        for chunk in gl.static_range(CHUNKS):
            gains += (gl.load(gain + chunk * BLOCK_K + column).to(gl.float32),)
    if EARLY:
        gdc_wait()
    values = ()
    factors = ()
    for row in gl.static_range(ROWS):
        squares = gl.full([BLOCK_K], 0.0, gl.float32, gl.SliceLayout(0, LINES))
        for chunk in gl.static_range(CHUNKS):
            at = x + gl.minimum(row, rows - 1) * x_stride + chunk * BLOCK_K
            part = gl.load(at + column).to(gl.float32)
            if NORM:
                squares += part * part
                part *= gains[chunk]
            values += (part,)
        if NORM:
            factors += (gl.rsqrt(gl.sum(squares, 0) / K + eps),)
    stage = 0
    result = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    for block in range(first, blocks, programs):
        number = block * BLOCK_N + result
        live = number < columns
        scale, scale_up = ahead, ahead_up
        if GROUP:
            ahead, ahead_up = _block_scales(
                scales, block + programs, blocks, columns, scaled, unit,
                K, BLOCK_N, BLOCK_K, GROUP, ROWS_PER_SCALE, GATED,
            )  # fmt: skip
        biases = gl.full([BLOCK_N], 0.0, gl.float32, gl.SliceLayout(1, SUMS))
        up_biases = biases
        if BIAS:
            biases = gl.load(bias + number, mask=live, other=0.0).to(gl.float32)
            if GATED:
                up_biases = gl.load(bias + columns + number, mask=live, other=0.0).to(gl.float32)
        residuals = ()
        if ONTO:
            for row in gl.static_range(ROWS):
                there = live & (row < rows)
                residuals += (gl.load(onto + row * onto_stride + number, mask=there, other=0.0).to(gl.float32),)
        async_copy.wait_group(STAGES - 1)
        totals = ()
        up_totals = ()
        for _ in gl.static_range(ROWS):
            totals += (gl.full([BLOCK_N, WIDTH], 0.0, gl.float32, SUMS),)
            up_totals += (gl.full([BLOCK_N, WIDTH], 0.0, gl.float32, SUMS),)
        for chunk in gl.static_range(CHUNKS):
            weights = buffers.index(stage * CHUNKS + chunk).load(LINES).to(gl.float32)
            added = ()
            for row in gl.static_range(ROWS):
                found = _products(weights, values[row * CHUNKS + chunk], scale, chunk, GROUP, SUMS)
                added += (totals[row] + found,)
            totals = added
            if GATED:
                weights = up_buffers.index(stage * CHUNKS + chunk).load(LINES).to(gl.float32)
                added = ()
                for row in gl.static_range(ROWS):
                    found = _products(weights, values[row * CHUNKS + chunk], scale_up, chunk, GROUP, SUMS)
                    added += (up_totals[row] + found,)
                up_totals = added
        _copy_block(
            weight, buffers, up_buffers, stage, block + STAGES * programs, blocks, columns, line, column,
            K, BLOCK_N, BLOCK_K, GATED,
        )  # fmt: skip
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        for row in gl.static_range(ROWS):
            total = gl.sum(totals[row], 1)
            if NORM:
                total *= factors[row]
            total += biases
            if GATED:
                up = gl.sum(up_totals[row], 1)
                if NORM:
                    up *= factors[row]
                total = total / (1.0 + gl.exp(-total)) * (up + up_biases)
            if ONTO:
                total += residuals[row]
            gl.store(out + row * out_stride + number, total.to(out.dtype.element_ty), mask=live & (row < rows))


def preloaded_gemm(
    x: Tensor,
    weight: Tensor,
    config: GemmConfig,
    out: Tensor,
    *,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    onto: Tensor | None,
    scales: Tensor | None = None,
    group: int | None = None,
    rows_per_scale: int = 1,
) -> None:
    """Write a product to ``out``, as ``skinny_gemm`` returns it, or with ``scales`` as ``skinny_fp8_gemm``."""
    rows, inputs = x.shape
    gain, eps = (x, 0.0) if norm is None else norm
    blocks = triton.cdiv(out.shape[1], config.block_n)
    straddles = rows_per_scale % config.block_n or (gated and out.shape[1] % config.block_n)
    programs = config.programs * multiprocessors(x.device)
    _preloaded_gemm[(min(blocks, programs or blocks),)](
        out, x, weight,
        x if scales is None else scales,
        x if bias is None else bias,
        x if onto is None else onto,
        gain, rows, out.shape[1],
        out.stride(0), x.stride(0),
        0 if onto is None else onto.stride(0),
        eps,
        K=inputs,
        ROWS=triton.next_power_of_2(rows),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        WARPS_N=config.warps // config.along,
        WARPS_K=config.along,
        GROUP=0 if scales is None else group or triton.next_power_of_2(inputs),
        ROWS_PER_SCALE=rows_per_scale,
        SCALE_ROWS=config.block_n if straddles else 1,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias is not None,
        ONTO=onto is not None,
        num_warps=config.warps,
        **launch_options(x.device),
    )  # fmt: skip
