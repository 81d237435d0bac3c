"""A made-up GPU, backends that were measured on it, and what ``auto`` takes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from attnplug_tune.table_writing import write_tables

from attnplug import AttentionKind, DType, Problem, Role
from attnplug.auto import table_store as store
from attnplug.auto.ranking import default_ranking
from attnplug.auto.table_store import table_path
from attnplug.declare.device import Processor
from attnplug.declare.installed import installed_version
from attnplug.declare.spec import Provided, Source
from attnplug.host import BackendRequest, Registry, Selection, select
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement
from support.selection import LLAMA, backend, registry

BOARD = Processor("Acme Board 3", 90, "580.1")
SHAPE = MeasuredShape(AttentionKind.MHA, 8, 2, 64, 64, DType.BFLOAT16, DType.BFLOAT16, 64)
PROBLEM = Problem(LLAMA, "cuda", 90, DType.BFLOAT16)
INSTALLED = registry(backend("early"), backend("late"), backend("other", preference=100))
TORCH = str(installed_version("torch"))

Times = Mapping[tuple[int, int, int], float]
CROSSING: dict[str, Times] = {
    "early": {(1, 128, 1): 5.0, (1, 4096, 1): 20.0},
    "late": {(1, 128, 1): 8.0, (1, 4096, 1): 10.0},
}


def table(name: str, times: Times, role: Role = Role.DECODE, **changes: Any) -> MeasuredTable:
    rows = tuple(Measurement(*point, False, time, time, time) for point, time in times.items())
    fields = {"shape": SHAPE, "versions": {f"{name}-dist": "1.2"}, "measured": "2026-11-16", **changes}
    return MeasuredTable(BOARD.name, BOARD.sm, name, role, rows=rows, **fields)


def crossing(**changes: Any) -> list[MeasuredTable]:
    return [table(name, times, **changes) for name, times in CROSSING.items()]


def failure(name: str, **changes: Any) -> MeasuredTable:
    return table(name, {}, failed="at 1 × 64, RuntimeError: boom", **changes)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a GPU for which no measurements ship, and a user without measurements."""
    for command in ("backends", "explain"):  # if imported later, they would keep the fake GPU
        import_module(f"attnplug.cli.{command}")
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("attnplug.machine.hardware.visible_gpus", lambda: (BOARD,))


def chosen(
    *tables: MeasuredTable, installed: Registry = INSTALLED, problem: Problem = PROBLEM, per_batch: bool = False
) -> Selection:
    """The choice after these were measured on this machine."""
    if tables:
        write_tables(table_path(BOARD), tables)
    ranking = default_ranking(installed, problem, per_batch=per_batch)
    return select(installed, BackendRequest(), problem, ranking=ranking)


def shipping(
    folder: Path, *tables: MeasuredTable, installed: Registry = INSTALLED, distribution: str = "tables-dist"
) -> Registry:
    """A registry with one more plugin, which ships these tables in a folder."""
    write_tables(folder / table_path(BOARD).name, tables)
    provided = Provided(folder, Source("t", "t", distribution, "3"))
    return replace(installed, table_folders=(*installed.table_folders, provided))


def decode(selection: Selection) -> list[str]:
    return [each.spec.name for each in selection.serving(Role.DECODE)]
