"""Factory of the Triton kernels that encode and write rows. Imports Triton only when a pool is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnplug_kv_formats.triton_rows import RowWriter


def row_writer(parts: Sequence[Tensor], scale: float) -> RowWriter | None:
    """Return a writer into ``parts``, ``[pages, page_size, heads, columns]`` each, with the layer's ``scale``.

    ``None`` if Triton is missing or columns are not adjacent.
    """
    if any(part.stride(3) != 1 and part.shape[3] > 1 for part in parts):
        return None
    try:
        from attnplug_kv_formats.triton_rows import RowWriter
    except ImportError:
        return None
    early = torch.version.hip is None and torch.cuda.get_device_capability(parts[0].device) >= (9, 0)
    return RowWriter(parts, scale, early=early)
