"""MLPs of routed experts with quantized weights. Pairs and their blocks are those of ``experts``.

Codes are decoded in registers to the dtype of the activations. Each block of pairs reads its expert's weight once.
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
from attnplug_engine.kernels.quantized_tiles import decoded_tile

_BLOCK_K = 128


class ExpertWeights(Protocol):
    """Quantized weights ``[experts, N, K]``: codes, scales ``[experts, N / rows_per_scale, K / group]``."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, int]
    rows_per_scale: int


@triton.jit
def _grouped_product(
    x, x_row, codes, scales, bias, out, order, offsets,
    PER_ROW: tl.constexpr, EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, CODES: tl.constexpr,
    SCALES: tl.constexpr, GROUP: tl.constexpr, ROWS_PER_SCALE: tl.constexpr, FORMAT: tl.constexpr,
    ACTIVATED: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BOUNDS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute ``out [pairs, N]`` of the rows ``x [pairs / PER_ROW, K]`` and their experts' weights.

    An expert has ``CODES`` codes and ``SCALES`` scales: those of ``[N, K]``, or of gate and up if ``GATED``. With
    ``BIAS`` it has a row of ``bias [EXPERTS, N or 2 * N]``.
    """
    if EARLY and ACTIVATED:  # the first product reads what the kernel before it sorted, the second one only its rows
        gdc_wait()
        gdc_launch_dependents()
    expert, pairs, exists, has_work = _block(order, offsets, tl.program_id(1), EXPERTS, PAIRS, BOUNDS)
    if EARLY and not ACTIVATED:
        gdc_wait()
        gdc_launch_dependents()
    if not has_work:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    stored = column < N
    depth = tl.arange(0, BLOCK_K)
    own, own_scales = codes + expert * CODES, scales + expert * SCALES
    first = tl.zeros([PAIRS, COLUMNS], tl.float32)
    second = tl.zeros([PAIRS, COLUMNS], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + depth < K
        rows = tl.load(
            x + (pairs // PER_ROW)[:, None] * x_row + start + depth[None, :], mask=inside[None, :], other=0.0
        )
        weights = decoded_tile(own, own_scales, column, stored, start, K, GROUP, BLOCK_K, ROWS_PER_SCALE, FORMAT)
        first = tl.dot(rows, tl.trans(weights.to(rows.dtype)), first, input_precision="ieee")
        if GATED:
            weights = decoded_tile(
                own, own_scales, column + N, stored, start, K, GROUP, BLOCK_K, ROWS_PER_SCALE, FORMAT
            )
            second = tl.dot(rows, tl.trans(weights.to(rows.dtype)), second, input_precision="ieee")
    if BIAS:
        bias_at = bias + expert * (2 * N if GATED else N) + tl.minimum(column, N - 1)
        first += tl.load(bias_at).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(bias_at + N).to(tl.float32)[None, :]
    if ACTIVATED:
        first = _activated(first, second, GATED, LIMIT, ALPHA, OFFSET)
    at = out + pairs[:, None] * N + column[None, :]
    tl.store(at, first.to(out.dtype.element_ty), mask=exists[:, None] & stored[None, :])


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
) -> Tensor:
    """Return the weighted sum of each token's experts, ``[tokens, hidden]``, like ``x``.

    See ``fused_experts`` for the arguments, and ``quantized_gemm`` for ``form`` and ``group``.
    """
    (tokens, hidden), per_token = x.shape, topk_ids.shape[1]
    experts, width, pairs = gate_up.codes.shape[0], down.shape[1], tokens * per_token
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    order, offsets = _sorted(topk_ids, experts, MAX_RANKED_PAIRS)
    block = 16 if pairs <= 16 * experts else 64
    options = launch_options(x.device)
    limit, alpha, offset = clip or (0.0, 1.0, 0.0)

    def product(
        rows: Tensor, weight: ExpertWeights, bias: Tensor | None, outputs: int, per_row: int, *, activated: bool
    ) -> Tensor:
        made = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
        columns = 64 if outputs >= 64 else 16
        codes, inputs = weight.codes, weight.shape[1]
        _grouped_product[triton.cdiv(outputs, columns), min(pairs, pairs // block + experts)](
            rows, rows.stride(0), codes.view(torch.uint8) if form == "fp8" else codes, weight.scales,
            rows if bias is None else bias, made, order, offsets,
            PER_ROW=per_row, EXPERTS=experts, N=outputs, K=inputs, CODES=codes[0].numel(),
            SCALES=weight.scales[0].numel(), GROUP=triton.next_power_of_2(inputs) if group is None else group,
            ROWS_PER_SCALE=weight.rows_per_scale, FORMAT=form, ACTIVATED=activated, GATED=activated and gated,
            LIMIT=limit, ALPHA=alpha, OFFSET=offset, BIAS=bias is not None, PAIRS=block, COLUMNS=columns,
            BLOCK_K=_BLOCK_K, BOUNDS=triton.next_power_of_2(experts),
            num_warps=4, num_stages=3, **options,
        )  # fmt: skip
        return made

    x = x if x.stride(1) == 1 else x.contiguous()
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
