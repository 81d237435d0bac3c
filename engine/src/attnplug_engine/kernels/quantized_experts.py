"""Fused MoE with quantized weights: grouped GEMMs over (token, expert) pairs, sorted into blocks as in ``experts``.

``quantized_tiles`` describes the formats. Each block of pairs reads its expert's weight once.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug_engine.kernels import launch_options
from attnplug_engine.kernels.experts import MAX_RANKED_PAIRS, _activated, _block, _combine, _sorted
from attnplug_engine.kernels.quantized_configs import QuantizedConfig, choose_experts
from attnplug_engine.kernels.quantized_gemm import prepared
from attnplug_engine.kernels.quantized_tiles import product as tile_product
from attnplug_engine.kernels.scaled_rows import scales_rows

_UNSORTED_PAIRS = 16
"""Maximum number of pairs that run unsorted. So few rarely share an expert, and sorting takes another launch."""


class ExpertWeights(Protocol):
    """Quantized weights of all experts: ``codes [experts, N, K]`` (packed), ``scales [experts, N / rows_per_scale, K /
    group]``, ``shape`` ``(N, K)``."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    rows_per_scale: int


@triton.jit
def _grouped_product(
    x, x_scales, x_stride, x_rows, codes, scales, bias, out, order, offsets,
    PER_ROW: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, ONE_SCALE: tl.constexpr,
    FORMAT: tl.constexpr, ACTIVATED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    OFFSET: tl.constexpr, BIAS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, SORTED: tl.constexpr, BOUNDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Multiply rows of ``x [pairs / PER_ROW, K]`` by their experts' weights: ``out [pairs, N]``.

    ``CODES`` and ``SCALES`` are the numbers of elements per expert. If ``GATED``, the weight is ``[gate | up]``, and
    gate and up rows alternate in a tile. ``bias`` is ``[EXPERTS, N or 2 * N]``. If pairs are not ``SORTED``, ``order``
    holds their experts, and each pair is a block of its own.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    if EARLY and ACTIVATED:  # the first product depends on the sort kernel; the second one only on its input rows
        gdc_wait()
        gdc_launch_dependents()
    if SORTED:
        expert, pairs, exists, has_work = _block(order, offsets, tl.program_id(1), EXPERTS, PAIRS, BOUNDS)
    else:
        expert, has_work = tl.load(order + tl.program_id(1)).to(tl.int64), True
        pairs = (tl.program_id(1) + tl.zeros([PAIRS], tl.int32)).to(tl.int64)
        exists = tl.arange(0, PAIRS) == 0
    if EARLY and not ACTIVATED:
        gdc_wait()
        gdc_launch_dependents()
    if not has_work:
        return
    start = tl.program_id(0) * COLUMNS
    line = tl.arange(0, PARTS * COLUMNS)
    number = tl.minimum(start + line // PARTS, N - 1) + line % PARTS * N
    first = tile_product(
        codes + expert * CODES, scales + expert * SCALES, x, x_scales, x_stride, x_rows, start, number,
        pairs // PER_ROW, exists, K, GROUP, ROWS_PER_SCALE, ONE_SCALE, FORMAT, UNITS, STAGES, NATIVE,
    )  # fmt: skip
    second = first
    if GATED:
        first, second = tl.split(tl.permute(first.reshape(COLUMNS, 2, PAIRS), (0, 2, 1)))
    column = start + tl.arange(0, COLUMNS)
    stored = column < N
    if BIAS:
        bias_at = bias + expert * (PARTS * N) + tl.minimum(column, N - 1)
        first += tl.load(bias_at).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(bias_at + N).to(tl.float32)[:, None]
    if ACTIVATED:
        first = _activated(first, second, GATED, LIMIT, ALPHA, OFFSET)
    at = out + pairs[None, :] * N + column[:, None]
    tl.store(at, first.to(out.dtype.element_ty), mask=stored[:, None] & exists[None, :])


def quantized_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    form: str,
    group: int | None,
    gated: bool,
    clip: tuple[float, float, float] | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
    onto: Tensor | None = None,
    config: QuantizedConfig | None = None,
) -> Tensor:
    """Return the weighted sum of each token's expert MLPs, ``[tokens, hidden]`` in the dtype of ``x [tokens, hidden]``.

    See ``fused_experts`` for the arguments, and ``quantized_gemm`` for ``form``, ``group`` and ``config``.
    """
    (tokens, hidden), per_token = x.shape, topk_ids.shape[1]
    experts, width, pairs = gate_up.codes.shape[0], down.shape[1], tokens * per_token
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    is_sorted = pairs > _UNSORTED_PAIRS
    order, offsets = _sorted(topk_ids, experts, MAX_RANKED_PAIRS) if is_sorted else (topk_ids, topk_ids)
    options = launch_options(x.device)
    limit, alpha, offset = clip or (0.0, 1.0, 0.0)
    form = "scaled" if scales_rows(form, group, x.device) else form
    tile = config or choose_experts(form, pairs, experts, x.device)

    def product(
        rows: Tensor, weight: ExpertWeights, bias: Tensor | None, outputs: int, per_row: int, *, activated: bool
    ) -> Tensor:
        made = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
        columns = tile.columns // 2 if activated and gated else tile.columns
        inputs, high = weight.shape[1], weight.rows_per_scale
        values, factors, codes = prepared(rows, weight.codes, form, None)
        blocks = min(pairs, pairs // tile.rows + experts) if is_sorted else pairs
        _grouped_product[triton.cdiv(outputs, columns), blocks](
            values, factors, values.stride(0), values.shape[0], codes, weight.scales,
            rows if bias is None else bias, made, order, offsets,
            PER_ROW=per_row, EXPERTS=experts, N=outputs, K=inputs, CODES=codes[0].numel(),
            SCALES=weight.scales[0].numel(), GROUP=triton.next_power_of_2(inputs) if group is None else group,
            ROWS_PER_SCALE=high, ONE_SCALE=not (activated and gated) and high % columns == 0,
            FORMAT=form, ACTIVATED=activated, GATED=activated and gated, LIMIT=limit, ALPHA=alpha, OFFSET=offset,
            BIAS=bias is not None, PAIRS=tile.rows, COLUMNS=columns, UNITS=tile.units, STAGES=tile.stages,
            NATIVE=x.dtype is torch.bfloat16, SORTED=is_sorted, BOUNDS=triton.next_power_of_2(experts),
            num_warps=tile.warps, **options,
        )  # fmt: skip
        return made

    up_bias, down_bias = biases or (None, None)
    inner = product(x, gate_up, up_bias, width, per_token, activated=True)
    outer = product(inner, down, down_bias, hidden, 1, activated=False)
    columns = min(1024, triton.next_power_of_2(hidden))
    _combine[tokens, triton.cdiv(hidden, columns)](
        outer, out, topk_weights,
        x if shared is None else shared, 0 if shared is None else shared.stride(0),
        topk_weights if gate is None else gate, 0 if gate is None else gate.stride(0),
        x if onto is None else onto, 0 if onto is None else onto.stride(0),
        PER_TOKEN=per_token, HIDDEN=hidden, COLUMNS=columns, SHARED=shared is not None, ONTO=onto is not None,
        **options,
    )  # fmt: skip
    return out
