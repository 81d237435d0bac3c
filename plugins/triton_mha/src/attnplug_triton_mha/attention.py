"""Launch of the attention kernel for one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import LayerSpec, MHAPool
from attnplug_triton_mha.planner import SplitKVSchedule, TritonLayerShape
from attnplug_triton_mha.scratch import SplitPartials
from attnplug_triton_mha.triton_attention import attend
from attnplug_triton_mha.triton_merge import launch_merge

_LOG2_E = 1.4426950408889634
_LARGEST_OFFSET = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class KVLayerCache:
    """Keys and values of one layer, ``[pages, page_size, kv_heads, dim]`` of any strides, and their scales.

    ``far``: offsets within a page need 64 bits. ``pairs``: fp8 columns are contiguous and 16-bit aligned.
    """

    shape: TritonLayerShape
    keys: Tensor
    values: Tensor
    key_scale: float
    value_scale: float
    far: bool
    pairs: bool

    @classmethod
    def of(cls, pool: MHAPool, layer: LayerSpec) -> KVLayerCache:
        keys, values = pool.keys(layer.layer_id), pool.values(layer.layer_id)
        far = any(
            (pages.shape[1] - 1) * pages.stride(1) + (pages.shape[3] - 1) * pages.stride(3) > _LARGEST_OFFSET
            for pages in (keys, values)
        )
        pairs = _pairs(keys) and _pairs(values)
        return cls(TritonLayerShape.of(layer), keys, values, *pool.scales(layer.layer_id), far, pairs)


def _pairs(pages: Tensor) -> bool:
    """Return True if two adjacent fp8 elements of a row can be loaded as 16 bits."""
    *outer, column = pages.stride()
    return pages.element_size() == 1 and column == 1 and not any(place % 2 for place in (*outer, pages.data_ptr()))


def with_unit_stride(q: Tensor) -> Tensor:
    """Return ``q``, or a contiguous copy if its column stride is not 1 or its heads exceed a 32-bit offset."""
    _, head, column = q.stride()
    if column == 1 and head * q.shape[1] <= _LARGEST_OFFSET:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def merged_at_once(rows: int, width: int, numbers: int) -> int:
    """Return the splits of ``rows`` rows that are merged at once, if a program holds ``numbers`` elements: a power of
    two."""
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
    """Attend with q ``[rows, heads, dim]``. Writes ``out`` ``[rows, heads, v_dim]`` and ``lse``, both contiguous.

    ``page_table`` is ``[requests, pages]`` int32, ``sinks`` ``[heads]``. ``tree`` ``[requests, queries]`` int64 is for
    batches with trees.
    """
    configuration, shape = schedule.configuration, cache.shape
    keys, values, q = cache.keys, cache.values, with_unit_stride(q)
    scale *= cache.key_scale
    merge_rows = schedule.merge_rows
    attend[shape.kv_heads, schedule.records.shape[0]](
        q,
        keys,
        values,
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
        cache.value_scale,
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
        FAR=cache.far,
        PAIRS=cache.pairs,
        WINDOW=shape.window,
        CAPPED=cap is not None,
        SINKS=sinks is not None,
        LSE=lse is not None,
        TILE=configuration.tile,
        STEP=configuration.step,
        APART=schedule.apart is not None,
        MERGE_ROWS=merge_rows,
        MERGE_PARTS=merged_at_once(merge_rows, shape.v_width, configuration.merged * 32 * configuration.warps),
        SINGLE=configuration.single,
        OVERLAP=configuration.overlap,
        PREFETCH=configuration.prefetch,
        tree=schedule.records if tree is None else tree,
        tree_row=0 if tree is None else tree.stride(0),
        tree_column=1 if tree is None else tree.stride(1),
        TREE=tree is not None,
        num_warps=configuration.warps,
        num_stages=configuration.stages,
        **({"launch_pdl": True} if configuration.overlap else {}),
    )
    if schedule.apart is not None:
        fp8 = keys.element_size() == 1
        launch_merge(partials, out, lse, sinks, schedule, schedule.apart, cache.value_scale, fp8)
