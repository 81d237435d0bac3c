"""For all tests: nothing of this machine's user decides what a test sees, and garbage collection leaves alone what was
collected. On some CPUs torch multiplies small matrices by another library. Without a GPU, tests of one are left out."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
import torch

_nowhere = tempfile.TemporaryDirectory(prefix="attnplug-cache-")
os.environ["ATTNPLUG_CACHE_DIR"] = _nowhere.name  # measured tables
os.environ.pop("ATTNPLUG_TABLES", None)


def _onednn_only_slows() -> bool:
    """On Arm without bfloat16: 16 rows by a small matrix take oneDNN 15 times as long as OpenBLAS."""
    here = torch.backends.mkldnn.is_available() and not torch.backends.mkl.is_available()
    return here and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


if _onednn_only_slows():
    torch.backends.mkldnn.enabled = False


def pytest_report_header(config: pytest.Config) -> str | None:
    return "no CUDA device: tests marked gpu are left out" if _gpu_is_left_out(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Seven of ten skips would be these. Who selects by marks sees them skipped, with the reason."""
    if _gpu_is_left_out(config):
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
        left = set(gpu)
        items[:] = [item for item in items if item not in left]


def _gpu_is_left_out(config: pytest.Config) -> bool:
    return not config.option.markexpr and not torch.cuda.is_available()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
