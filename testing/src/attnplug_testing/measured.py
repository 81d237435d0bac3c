"""Two backends that differ only in their measured times, for tests of hosts that use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from attnplug_tune.table_writing import versions_of, write_tables

from attnplug import DType, LayerSpec, Role
from attnplug.auto.table_store import table_path
from attnplug.host import Registry, load_registry
from attnplug.machine.hardware import CPU
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement

Times = Mapping[str, Mapping[int, float]]
TIMES: Times = {"alpha": {8: 10.0, 64: 90.0}, "beta": {8: 11.0, 64: 20.0}}
"""Microseconds of a request with one new token, by its length. Alpha is the faster one for very short requests."""


def measured_twins(
    monkeypatch: pytest.MonkeyPatch, folder: Path, layer: LayerSpec, dtype: DType, times: Times = TIMES
) -> Registry:
    """Return a registry with ``alpha`` and ``beta``, both torch_native, and write their times to this machine's table,
    in ``folder``."""
    monkeypatch.setenv("ATTNPLUG_CACHE_DIR", str(folder))
    native = load_registry().get("torch_native")
    twins = {name: replace(native, spec=replace(native.spec, name=name)) for name in ("alpha", "beta")}
    here = next(iter(CPU.detect()))
    tables = [
        MeasuredTable(
            here.name,
            here.sm,
            name,
            role,
            MeasuredShape.of(layer, (dtype, dtype), 64, False),
            tuple(Measurement(1, length, 1, False, *[time] * 3) for length, time in times[name].items()),
            versions_of(twins[name], here),
            "2026-11-16",
        )
        for name in times
        for role in (Role.PREFILL, Role.DECODE)
    ]
    write_tables(table_path(here), tables)
    return Registry(twins)
