"""Devices and implementations that write cache rows: torch, and Triton kernels, interpreted without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from attnplug.kv import buffer
from attnplug.kv.layout import PageLayout
from attnplug_testing.devices import DEVICES, GPU_MARKS, INTERPRETED


def _plain_writer(pages: torch.Tensor, writer: Any) -> Any:
    return writer(pages, PageLayout.of(pages), 1.0) if pages.is_floating_point() and pages.element_size() > 1 else None


@contextmanager
def writing(how: str) -> Iterator[str]:
    """Return the device to write on.

    ``how`` is a device, ``cuda without triton`` (as if it were not installed), or ``cpu by triton`` (interpreted).
    """
    with pytest.MonkeyPatch.context() as patch:
        if how.endswith("without triton"):
            patch.setitem(sys.modules, "attnplug.kv.triton_rows", None)
        if how.endswith("by triton"):
            from attnplug.kv.triton_rows import RowWriter

            patch.setattr(buffer, "row_kernel", lambda pages: _plain_writer(pages, RowWriter))
            make = buffer.format_kernel
            patch.setattr(buffer, "format_kernel", lambda format, parts, scale, _: make(format, parts, scale, "cuda"))
            patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        yield how.partition(" ")[0]


BY_TRITON = pytest.param("cpu by triton", marks=INTERPRETED)
WAYS = [*DEVICES, BY_TRITON, pytest.param("cuda without triton", marks=GPU_MARKS)]
"""Parameters of ``writing``: torch on a CPU, a kernel on a GPU, an interpreted kernel, and torch on a GPU."""
