"""The faults of ``benchmarks/gpu_faults.py``, put into kernels on a GPU, are faults of the kernels that there are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


def test_every_fault_is_found_once_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu_faults.py"
    spec = importlib.util.spec_from_file_location("gpu_faults", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_faults", module)  # dataclasses look up their module there
    spec.loader.exec_module(module)
    assert module.stale() == []
    assert all(fault.old != fault.new for fault in module.FAULTS)
