"""Ways in which a pool writes rows: by torch, and by kernels, which are interpreted where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attnplug.kv import buffer
from attnplug_testing.devices import DEVICES, GPU_MARKS, INTERPRETED


@contextmanager
def writing(how: str) -> Iterator[str]:
    """The device to write on, ``how`` being one; or ``cuda without triton``, as if it were not installed; or ``cpu by
    triton``, the kernel in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if how.endswith("without triton"):
            patch.setitem(sys.modules, "attnplug.kv.triton_rows", None)
        if how.endswith("by triton"):
            from attnplug.kv.triton_rows import RowWriter

            patch.setattr(buffer, "_row_kernel", RowWriter)
            patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        yield how.partition(" ")[0]


BY_TRITON = pytest.param("cpu by triton", marks=INTERPRETED)
WAYS = [*DEVICES, BY_TRITON, pytest.param("cuda without triton", marks=GPU_MARKS)]
"""Ways in which rows are written: by torch on a CPU, by one kernel on a GPU, interpreted, and by torch on a GPU too."""
