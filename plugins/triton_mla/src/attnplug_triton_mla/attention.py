"""Launch of the attention kernel that a schedule is configured for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import DType, MLAPool, PoolError
from attnplug_sparse.plugin import FP8_DS_MLA
from attnplug_triton_mha.plugin import NVFP4
from attnplug_triton_mla.configurations import RowFormat
from attnplug_triton_mla.gluon_low import attend_low
from attnplug_triton_mla.gluon_wide import attend_wide
from attnplug_triton_mla.planner import MLASchedule
from attnplug_triton_mla.plugin import FP8_PER_TOKEN_HEAD
from attnplug_triton_mla.scratch import MLAPartials
from attnplug_triton_mla.triton_attention import attend

_LOG2_E = 1.4426950408889634
_LARGEST_OFFSET = (1 << 31) - 1
_COPIED = 16
"""Alignment in bytes that Gluon kernels require: they copy 16 bytes at a time to shared memory."""


_NVFP4_FACTOR = 128.0
"""Inverse of the factor by which the kernel's ``nvfp4`` rows in fp16 differ from the stored ones."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentLayerCache:
    """Cache of one layer, ``[pages, page_size, 1, row_width]``, and the factor of its rows' latent part.

    Pages and rows may have any strides. ``copied``: rows are aligned for the Gluon kernels. ``format`` is the kernel's
    name of the row format. ``scale_at`` and ``rope_at`` are the first bytes of these parts in a row, 0 if it has no
    such part; formats with values of one dtype do not use them. ``rope_scale`` is the factor of rotary columns.
    """

    pages: Tensor
    scale: float
    rank: int
    rope: int
    copied: bool
    format: RowFormat
    scale_at: int = 0
    rope_at: int = 0
    rope_scale: float = 1.0

    @property
    def row_bytes(self) -> int:
        return self.pages.shape[-1] * self.pages.element_size()

    @property
    def converted_bytes(self) -> int:
        """Bytes of a row that is converted for products; see ``MLAKernelLimits``."""
        return {"plain": 0, "fp8_ds_mla": 2 * self.rank, "nvfp4": 2 * self.rank}.get(self.format, self.row_bytes)

    @classmethod
    def of(cls, pool: MLAPool, layer_id: int, rank: int, rope: int) -> LatentLayerCache:
        pages, scale, parts = pool.rows(layer_id), pool.scale(layer_id), pool.parts(layer_id)
        page, slot, _, column = pages.stride()
        places = [number * pages.element_size() for number in (page, slot)] + [pages.data_ptr()]
        wanted = max(part.element_size() for part in parts) if len(parts) > 1 else 2  # fp8 is read by pairs
        if column != 1 or any(place % wanted for place in places):
            raise PoolError(
                f"the rows of layer {layer_id} have strides {pages.stride()} at address {pages.data_ptr():#x}; "
                f"triton_mla reads rows with adjacent columns, at multiples of {wanted} bytes"
            )
        copied = not any(place % _COPIED for place in places)
        if pool.dtype not in (FP8_DS_MLA.name, FP8_PER_TOKEN_HEAD, NVFP4):
            name: RowFormat = "fp8" if pool.dtype == DType.FLOAT8_E4M3 else "plain"
            return cls(pages, scale, rank, rope, copied, name, rope_scale=scale)
        scale_at, rope_at = parts[1].data_ptr() - pages.data_ptr(), parts[-1].data_ptr() - pages.data_ptr()
        if pool.dtype == NVFP4:
            return cls(pages, scale * _NVFP4_FACTOR, rank, rope, False, "nvfp4", scale_at, rope_at)
        packed: RowFormat = "fp8_ds_mla" if pool.dtype == FP8_DS_MLA.name else "fp8_per_token_head"
        return cls(pages, scale, rank, rope, False, packed, scale_at, rope_at)


def aligned(q: Tensor, multiple_of: int = 1) -> Tensor:
    """Return ``q``, or a contiguous copy if its address or strides are not multiples of ``multiple_of``.

    Kernels also require a column stride of 1, and all heads of a row within a 32-bit offset.
    """
    row, head, column = q.stride()
    odd = any(number % multiple_of for number in (q.data_ptr(), row, head))
    if column == 1 and head * q.shape[1] <= _LARGEST_OFFSET and not odd:
        return q
    return q.clone(memory_format=torch.contiguous_format)


def launch_attend(
    q: Tensor,
    q_rope: Tensor | None,
    cache: LatentLayerCache,
    page_table: Tensor,
    out: Tensor,
    lse: Tensor | None,
    partials: MLAPartials,
    schedule: MLASchedule,
    scale: float,
    tree: Tensor | None,
    selected: bool = False,
) -> None:
    """Attend with q ``[rows, heads, rank + rope]``.

    Writes ``out`` ``[rows, heads, rank]`` and ``lse``, both contiguous.

    With ``q_rope`` ``[rows, heads, rope]``, q is ``[rows, heads, rank]``. ``tree`` ``[requests, queries]`` int64 is for
    the Triton kernel only: no other is scheduled for trees. With ``selected``, every query row is a request of the
    schedule, and ``page_table`` holds its cache slots, -1 for none. If ``schedule.merged_by_kernel``, split tiles are
    left in ``partials`` for ``launch_merge``.
    """
    configuration, pages = schedule.configuration, cache.pages
    multiple_of = 1 if configuration.kernel == "triton" else _COPIED
    q = aligned(q, multiple_of)
    rope = q if q_rope is None else aligned(q_rope, multiple_of)
    page_size = pages.shape[1]
    if selected and pages.stride(0) == page_size * pages.stride(1):
        pages, page_size = pages.flatten(0, 1).unsqueeze(1), 1  # slots are evenly spaced
    by_place = (
        q,
        rope,
        pages,
        page_table,
        out,
        partials.weights if lse is None else lse,
        partials.values,
        partials.weights,
        schedule.numbers,
        schedule.shape.requests,
        schedule.programs,
        partials.weights.shape[-1],
        q.stride(0),
        q.stride(1),
        rope.stride(0),
        rope.stride(1),
        page_table.stride(0),
        page_table.stride(1),
        scale * cache.scale * _LOG2_E,
        cache.scale,
    )
    by_name = {
        "HEADS": q.shape[1],
        "RANK": cache.rank,
        "ROPE": cache.rope,
        "PAGE_SIZE": page_size,
        "PAGE_STRIDE": pages.stride(0),
        "SLOT_STRIDE": pages.stride(1),
        "LSE": lse is not None,
        "SEPARATE_Q_ROPE": q_rope is not None,
        "OVERLAP": configuration.overlap,
        "SELECTED": selected,
        "num_warps": configuration.warps,
        **({"launch_pdl": True} if configuration.overlap else {}),
    }
    grid = (schedule.programs,)
    splits = {"SPLIT": configuration.split, "GROWS": configuration.grows, "TILE_ROWS": schedule.tile_rows}
    if configuration.kernel == "wide":
        attend_wide[grid](*by_place, **by_name, **splits)
        return
    if configuration.kernel == "low":
        attend_low[grid](*by_place, **by_name, STEP=configuration.step, BUFFERS=configuration.stages)
        return
    attend[grid](
        *by_place,
        scale * cache.rope_scale * _LOG2_E,
        partials.counters,
        schedule.numbers if tree is None else tree,
        *((0, 1) if tree is None else tree.stride()),
        **by_name,
        **splits,
        TILE=configuration.tile,
        STEP=configuration.step,
        MERGE_COLUMNS=0
        if schedule.merged_by_kernel or configuration.split
        else min(configuration.merge_columns, cache.rank),
        TREE=tree is not None,
        FORMAT=cache.format,
        SCALE_AT=cache.scale_at,
        ROPE_AT=cache.rope_at,
        num_stages=configuration.stages,
        maxnreg=configuration.registers,
    )
