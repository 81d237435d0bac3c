"""Schedule kernels of attention, shared with the sparse index."""

from __future__ import annotations

from attnplug import schedule_kernels

_KERNELS = schedule_kernels()
HEADER, RECORD = _KERNELS.HEADER, _KERNELS.RECORD
begin_stretch, rows_of_part, next_tile = _KERNELS.begin_stretch, _KERNELS.rows_of_part, _KERNELS.next_tile
launch_plan, size_of_numbers = _KERNELS.launch_plan, _KERNELS.size_of_numbers
