"""Launch of the attention kernel for one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attnplug import LayerSpec, MHAPool
from attnplug_triton_mha.configurations import FORMATS
from attnplug_triton_mha.gluon_attention import CHUNK, MAX_BOX, attend_extend, swizzled_rows
from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape
from attnplug_triton_mha.scratch import SplitPartials
from attnplug_triton_mha.triton_attention import attend
from attnplug_triton_mha.triton_merge import launch_merge
from attnplug_triton_mha.triton_rows import NVFP4, NVFP4_BITS, NVFP4_FACTORS

_LOG2_E = 1.4426950408889634
_LARGEST_OFFSET = (1 << 31) - 1
_COPIED = 16
"""Alignment in bytes of rows that TMA copies, and their minimum number per page."""


@dataclass(frozen=True, slots=True, eq=False)
class CopiedRows:
    """Keys or values of one layer as rows for TMA, at equal distances in memory.

    A page has ``page`` rows. The next head is ``head`` columns further, wherever that is.
    """

    rows: TensorDescriptor
    page: int
    head: int

    @classmethod
    def of(cls, pages: Tensor) -> CopiedRows | None:
        """Return the rows of pages ``[pages, page_size, kv_heads, dim]``; ``None`` if TMA cannot copy them in place.

        Also ``None`` for float16, and if a head's rows are contiguous, both of which have not run on a GPU yet.
        """
        count, page_size, heads, dim = pages.shape
        page, slot, head, column = pages.stride()
        head = head if heads > 1 else 0  # the stride of one head may be anything
        size = pages.element_size()
        box = min(page_size, MAX_BOX.value)
        if pages.dtype != torch.bfloat16 or head > slot:
            return None
        if dim % CHUNK.value or column != 1 or pages.data_ptr() % _COPIED or slot * size % _COPIED:
            return None
        if box < _COPIED or MAX_BOX.value % box or page_size % box or not slot or page % slot:
            return None
        shape = (count - 1) * (page // slot) + page_size, (heads - 1) * head + dim
        if max(shape) > _LARGEST_OFFSET:
            return None
        return cls(swizzled_rows(pages.as_strided(shape, (slot, 1)), box), page // slot, head)


@dataclass(frozen=True, slots=True, eq=False)
class KVLayerCache:
    """Keys and values of one layer, ``[pages, page_size, kv_heads, elements]`` of any strides, and their scales.

    ``key_scales`` and ``value_scales`` are the scales of rows, of the same dimensions; formats without them have keys
    and values there. ``format`` is the kernel's ``FORMAT``. ``key_factor`` and ``value_factor`` apply to the whole
    layer. ``int64_offsets``: offsets within a page exceed 32 bits. ``pairs``: the bytes of coded rows are contiguous
    and 16-bit aligned. ``copied`` are keys and values as TMA copies them, if it can.
    """

    shape: TritonLayerShape
    format: int
    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor
    key_factor: float
    value_factor: float
    int64_offsets: bool
    pairs: bool
    copied: tuple[CopiedRows, CopiedRows] | None

    @classmethod
    def of(cls, pool: MHAPool, layer: LayerSpec) -> KVLayerCache:
        format = FORMATS.get(pool.dtype, 0)
        key_parts, value_parts = map(_codes, pool.parts(layer.layer_id))
        keys, values = key_parts[0], value_parts[0]
        kernel_format = format
        if format == NVFP4.value and keys.is_cuda and torch.cuda.get_device_capability(keys.device) < (8, 9):
            kernel_format = NVFP4_BITS.value
        factor = NVFP4_FACTORS.get(kernel_format, 1.0)
        copied_keys, copied_values = CopiedRows.of(keys), CopiedRows.of(values)
        group = layer.num_heads // layer.num_kv_heads
        is_copied = group & (group - 1) == 0  # others have not run on a GPU yet
        key_factor, value_factor = (scale * factor for scale in pool.scales(layer.layer_id))
        return cls(
            TritonLayerShape.of(layer, format),
            kernel_format,
            keys,
            key_parts[-1],
            values,
            value_parts[-1],
            key_factor,
            value_factor,
            int64_offsets=any(
                (pages.shape[1] - 1) * pages.stride(1) + (pages.shape[3] - 1) * pages.stride(3) > _LARGEST_OFFSET
                for pages in (*key_parts, *value_parts)
            ),
            pairs=all(_pairs(part) for part in (*key_parts, *value_parts) if part.element_size() == 1),
            copied=(copied_keys, copied_values) if is_copied and copied_keys and copied_values else None,
        )


def _codes(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of rows, with e4m3 scales as bytes, which Triton converts on every GPU."""
    return [part.view(torch.uint8) if index and part.element_size() == 1 else part for index, part in enumerate(parts)]


def _pairs(pages: Tensor) -> bool:
    """Return True if two adjacent bytes of a coded row can be loaded as 16 bits."""
    *outer, column = pages.stride()
    return column == 1 and not any(place % 2 for place in (*outer, pages.shape[3], pages.data_ptr()))


def with_unit_stride(q: Tensor) -> Tensor:
    """Return ``q``, or a contiguous copy if its column stride is not 1 or its heads exceed a 32-bit offset."""
    _, head, column = q.stride()
    if column == 1 and head * q.shape[1] <= _LARGEST_OFFSET:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def merged_at_once(rows: int, width: int, numbers: int) -> int:
    """Return the number of splits of ``rows`` rows that a fused merge loads at once: a power of two.

    A program holds ``numbers`` elements.
    """
    most = numbers // (rows * width)
    return 1 << min(max(most.bit_length() - 1, 0), 6)


def launch_attend(
    q: Tensor,
    cache: KVLayerCache,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    partials: SplitPartials,
    schedule: SplitKVSchedule,
    scale: float,
    cap: float | None,
    tree: Tensor | None,
) -> None:
    """Attend with q ``[rows, heads, dim]``. Writes ``out`` ``[rows, heads, v_dim]`` and ``lse`` ``[rows, heads]``.

    Both are contiguous. ``page_table`` is ``[requests, pages]`` int32, ``sinks`` ``[heads]``. ``tree`` ``[requests,
    queries]`` int64 is given for batches with draft trees.
    """
    configuration, shape = schedule.configuration, cache.shape
    keys, values, q = cache.keys, cache.values, with_unit_stride(q)
    key_scales, value_scales = cache.key_scales, cache.value_scales
    scale *= cache.key_factor
    if scale < 0:  # kernels scale the largest product
        q, scale = -q, -scale
    merge_rows = schedule.merge_rows
    if configuration.specialized:
        _launch_extend(q, cache, page_table, out, lse, sinks, partials, schedule, scale, cap)
    else:
        attend[shape.kv_heads, schedule.records.shape[0]](
            q,
            keys,
            key_scales,
            values,
            value_scales,
            page_table,
            out,
            partials.weights if lse is None else lse,
            partials.weights if sinks is None else sinks,
            schedule.records,
            partials.values,
            partials.weights,
            partials.counters,
            schedule.partial_rows,
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            page_table.stride(1),
            scale * _LOG2_E if cap is None else scale / cap,
            1.0 if cap is None else cap * _LOG2_E,
            cache.value_factor,
            HEADS=q.shape[1],
            GROUP=shape.group,
            DIM=shape.dim,
            V_DIM=shape.v_dim,
            WIDTH=shape.width,
            V_WIDTH=shape.v_width,
            PAGE_SIZE=keys.shape[1],
            K_PAGE=keys.stride(0),
            K_SLOT=keys.stride(1),
            K_HEAD=keys.stride(2),
            K_COLUMN=keys.stride(3),
            V_PAGE=values.stride(0),
            V_SLOT=values.stride(1),
            V_HEAD=values.stride(2),
            V_COLUMN=values.stride(3),
            KS_PAGE=key_scales.stride(0),
            KS_SLOT=key_scales.stride(1),
            KS_HEAD=key_scales.stride(2),
            KS_COLUMN=key_scales.stride(3),
            VS_PAGE=value_scales.stride(0),
            VS_SLOT=value_scales.stride(1),
            VS_HEAD=value_scales.stride(2),
            VS_COLUMN=value_scales.stride(3),
            FORMAT=cache.format,
            INT64=cache.int64_offsets,
            PAIRS=cache.pairs,
            WINDOW=shape.window,
            CAPPED=cap is not None,
            SINKS=sinks is not None,
            LSE=lse is not None,
            TILE=configuration.tile,
            STEP=configuration.step,
            SEPARATE_MERGE=schedule.separate_merge is not None,
            MERGE_ROWS=merge_rows,
            MERGE_PARTS=merged_at_once(
                merge_rows, shape.v_width, configuration.merge_elements * 32 * configuration.warps
            ),
            SINGLE=configuration.single,
            OVERLAP=configuration.overlap,
            PREFETCH=configuration.prefetch,
            tree=schedule.records if tree is None else tree,
            tree_row=0 if tree is None else tree.stride(0),
            tree_column=1 if tree is None else tree.stride(1),
            TREE=tree is not None,
            SPLIT=configuration.split,
            TILE_ROWS=schedule.tile_rows,
            num_warps=configuration.warps,
            num_stages=configuration.stages,
            maxnreg=configuration.registers,
            **configuration.compiler_options,
            **({"launch_pdl": True} if configuration.overlap else {}),
        )
    if schedule.separate_merge is not None:
        launch_merge(partials, out, lse, sinks, schedule, schedule.separate_merge, cache.value_factor, shape.format > 0)


def _launch_extend(
    q: Tensor,
    cache: KVLayerCache,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    partials: SplitPartials,
    schedule: SplitKVSchedule,
    scale: float,
    cap: float | None,
) -> None:
    """Launch ``gluon_attention``; ``scale`` includes the cache's."""
    configuration, shape = schedule.configuration, cache.shape
    assert cache.copied is not None
    keys, values = cache.copied
    attend_extend[shape.kv_heads, schedule.records.shape[0]](
        q,
        keys.rows,
        values.rows,
        page_table,
        out,
        partials.weights if lse is None else lse,
        partials.weights if sinks is None else sinks,
        schedule.records,
        partials.values,
        partials.weights,
        partials.counters,
        schedule.partial_rows,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        page_table.stride(1),
        scale * _LOG2_E if cap is None else scale / cap,
        1.0 if cap is None else cap * _LOG2_E,
        HEADS=q.shape[1],
        GROUP=shape.group,
        DIM=shape.dim,
        V_DIM=shape.v_dim,
        PAGE_SIZE=cache.keys.shape[1],
        K_PAGE=keys.page,
        V_PAGE=values.page,
        K_HEAD=keys.head,
        V_HEAD=values.head,
        WINDOW=shape.window,
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        LSE=lse is not None,
        TILE=configuration.tile,
        STEP=configuration.step,
        STAGES=configuration.stages,
        SEPARATE_MERGE=schedule.separate_merge is not None,
        OVERLAP=configuration.overlap,
        num_warps=configuration.warps,
        **({"launch_pdl": True} if configuration.overlap else {}),
    )
