"""MLA prefill as MHA: the tiles of a batch's ragged calls, and the launch of the kernel over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug import LayerSpec, MLAShape, RaggedCall
from attnplug_triton_mha.attention import with_unit_stride
from attnplug_triton_mha.gluon_attention import CHUNK, swizzled_rows
from attnplug_triton_mla.gluon_ragged import attend_ragged_rows
from attnplug_triton_mla.triton_ragged import attend_ragged, order_tiles

_LOG2_E = 1.4426950408889634
_SEQUENCES_AT_A_TIME = 256
_LEAST_WIDTH = 16  # of a matrix product
MAX_WIDTH = 256
"""Maximum width of a head: nope and rope together, and values."""
_WIDTH_OF_THREE_STAGES = 320
_MAX_WIDTHS = 192, 128
"""Maximum (key, value) widths of ``gluon_ragged``, by shared memory and registers."""
_COPIED = 16
"""Alignment in bytes of rows and heads that TMA copies."""


@dataclass(frozen=True, slots=True)
class RaggedConfig:
    """Query rows per tile, key rows per step, and launch parameters.

    ``specialized``: use ``gluon_ragged`` instead of ``triton_ragged``.
    """

    tile: int = 128
    step: int = 64
    warps: int = 8
    stages: int = 3
    specialized: bool = False


def supports_ragged(shape: MLAShape) -> bool:
    """Return True if tiles fit the widths of a model's heads, and TMA can read their rope columns in place."""
    nope_bytes = shape.dims.qk_nope_head_dim * shape.dtype.itemsize
    return max(shape.ragged_dims) <= MAX_WIDTH and not nope_bytes % _COPIED


def fit_ragged(sm: int, shared_bytes: int, dims: tuple[int, int]) -> RaggedConfig:
    """Return the configuration for a GPU's version, its shared memory per program, and (key, value) widths of heads."""
    width, v_width = dims
    if (
        sm == 90
        and not any(each % CHUNK.value for each in dims)
        and width <= _MAX_WIDTHS[0]
        and v_width <= _MAX_WIDTHS[1]
    ):
        return RaggedConfig(step=128, warps=4, stages=2, specialized=True)
    if shared_bytes < 200 << 10:
        return RaggedConfig(64, 32, 4, 2)
    return RaggedConfig(stages=3 if sum(dims) <= _WIDTH_OF_THREE_STAGES else 2)


def plan_tiles(call: RaggedCall, config: RaggedConfig) -> Tensor:
    """Return the tiles ``[count, 2]`` int32 of a call, ordered on the device. Only shapes are read on the host."""
    sequences = len(call.query_indptr) - 1
    count = -(-call.query_rows // config.tile) + sequences
    tiles = torch.empty(count, 2, dtype=torch.int32, device=call.query_indptr.device)
    order_tiles[(sequences,)](
        tiles,
        call.query_indptr,
        call.kv_indptr,
        sequences,
        count,
        TILE=config.tile,
        CAUSAL=call.causal,
        BLOCK=_SEQUENCES_AT_A_TIME,  # any number of sequences: another value would be another compilation
        FILL=256,
    )
    return tiles


def launch_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: LayerSpec,
    call: RaggedCall,
    tiles: Tensor,
    config: RaggedConfig,
    lse: Tensor | None,
) -> Tensor:
    """Attend as ``forward_ragged`` does; ``lse`` is contiguous."""
    assert layer.mla is not None
    heads, rope = q.shape[1], layer.mla.qk_rope_head_dim
    nope = q.shape[2] - rope
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out = (q.new_empty if call.padded_rows is None else q.new_zeros)(q.shape[0], heads, v.shape[2])
    if config.specialized:
        _launch_specialized(q, k, v, out, layer.scale, call, tiles, config, lse)
        return out
    wide, narrow, value = (max(triton.next_power_of_2(width), _LEAST_WIDTH) for width in (nope, rope, v.shape[2]))
    queries, keys = _rows(q[..., :nope], config.tile, wide), _rows(k[..., :nope], config.step, wide)
    rope_queries, rope_keys = queries, keys
    if rope:
        rope_queries, rope_keys = _rows(q[..., nope:], config.tile, narrow), _rows(k[..., nope:], config.step, narrow)
    attend_ragged[(heads, len(tiles))](
        queries,
        rope_queries,
        keys,
        rope_keys,
        _rows(v, config.step, value),
        out,
        out if lse is None else lse,
        tiles,
        call.query_indptr,
        call.kv_indptr,
        layer.scale * _LOG2_E,
        out.stride(0),
        HEADS=heads,
        NOPE=wide,
        ROPE=narrow if rope else 0,
        V_DIM=value,
        V_COLUMNS=v.shape[2],
        TILE=config.tile,
        STEP=config.step,
        CAUSAL=call.causal,
        LSE=lse is not None,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def _launch_specialized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    scale: float,
    call: RaggedCall,
    tiles: Tensor,
    config: RaggedConfig,
    lse: Tensor | None,
) -> None:
    heads, q, k, v = q.shape[1], with_unit_stride(q), _token_major(k), _token_major(v)
    if scale < 0:  # the kernel scales the largest product
        q, scale = -q, -scale
    attend_ragged_rows[(heads, len(tiles))](
        q,
        _columns(k),
        _columns(v),
        out,
        out if lse is None else lse,
        tiles,
        call.query_indptr,
        call.kv_indptr,
        q.stride(0),
        q.stride(1),
        scale * _LOG2_E,
        HEADS=heads,
        DIM=k.shape[2],
        V_DIM=v.shape[2],
        K_HEAD_COLUMNS=k.stride(1),
        V_HEAD_COLUMNS=v.stride(1),
        TILE=config.tile,
        STEP=config.step,
        STAGES=config.stages,
        CAUSAL=call.causal,
        LSE=lse is not None,
        num_warps=config.warps,
    )


def _token_major(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a contiguous copy if heads are further apart than rows.

    The distance of heads is a constant of the compiled kernel, so it must not depend on the number of rows (E1).
    """
    row, head, _ = tensor.stride()
    return tensor if head <= row else tensor.clone(memory_format=torch.contiguous_format)


def _columns(tensor: Tensor) -> SwizzledDescriptor:
    """Return a descriptor of rows ``[rows, heads, width]``, with the columns of all heads side by side."""
    count, heads, width = tensor.shape
    row, head, _ = tensor.stride()
    return swizzled_rows(tensor.as_strided((count, (heads - 1) * head + width), (row, 1)))


def _rows(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [rows, 1, width])


def _aligned(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a contiguous copy if TMA cannot read its rows and heads in place."""
    row, head, column = tensor.stride()
    size = tensor.element_size()
    if column == 1 and not any(number % _COPIED for number in (tensor.data_ptr(), row * size, head * size)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
