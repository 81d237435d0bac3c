"""Functions shared by the Gluon kernels: Triton functions compiled as Gluon, and names that differ between versions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

import attnplug_sparse.index.triton_schedule as triton_schedule
import attnplug_sparse.index.triton_splits as triton_splits
from attnplug_triton_mla import triton_merge

begin_stretch, next_tile = gluon.jit(triton_schedule.begin_stretch.fn), gluon.jit(triton_schedule.next_tile.fn)
rows_of_part = gluon.jit(triton_schedule.rows_of_part.fn)
slot_of_part, log2_sum = gluon.jit(triton_merge.slot_of_part.fn), gluon.jit(triton_merge.log2_sum.fn)
slot_of_split, splits_before = gluon.jit(triton_merge.slot_of_split.fn), gluon.jit(triton_splits.splits_before.fn)
power_of_two, to_power_of_two = gluon.jit(triton_splits.power_of_two.fn), gluon.jit(triton_splits.to_power_of_two.fn)

# The name in newer versions, and the one in Triton 3.6. Masked elements become zero.
copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
