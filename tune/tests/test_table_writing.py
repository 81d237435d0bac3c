"""Files of measured tables: written by several processes at once."""

from __future__ import annotations

import fcntl
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attnplug_tune import table_writing
from attnplug_tune.table_writing import write_tables

from attnplug import AttentionKind, DType, Role
from attnplug.auto.table_store import TableError, read_tables
from attnplug.declare.errors import TableWarning
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement
from attnplug_testing.errors import raises_naming

SHAPE = MeasuredShape(AttentionKind.MLA, 16, 1, 576, 512, DType.BFLOAT16, DType.FLOAT8_E4M3, 64)


def row(requests: int, microseconds: float = 7.0) -> Measurement:
    return Measurement(requests, 4096, 1, False, microseconds, microseconds - 0.5, microseconds + 0.25)


def table(**changes: Any) -> MeasuredTable:
    made = MeasuredTable("NVIDIA H200", 90, "fast", Role.DECODE, SHAPE, (row(1),), {"torch": "2.11.0"}, "2026-11-16")
    return replace(made, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "made" / "nvidia-h200.json"


def test_what_is_written_is_read_again(path: Path) -> None:
    tables = (table(), table(backend="slow", rows=(row(1, 8.5), row(64, 133.0))))
    write_tables(path, tables)
    read = read_tables(path)
    assert (read.device, read.sm, read.tables) == ("NVIDIA H200", 90, tables)
    assert json.loads(path.read_text())["schema"] == 5


def test_rows_are_added_and_replaced(path: Path) -> None:
    write_tables(path, [table(rows=(row(1), row(2)))])
    write_tables(path, [table(rows=(row(2, 9.0), row(4)), measured="2026-11-17")])
    assert read_tables(path).tables == (table(rows=(row(1), row(2, 9.0), row(4)), measured="2026-11-17"),)


def test_times_of_other_versions_are_not_mixed(path: Path) -> None:
    write_tables(path, [table(rows=(row(1), row(2)))])
    newer = table(versions={"torch": "2.12.0"})
    write_tables(path, [newer])
    assert read_tables(path).tables == (newer,)


def test_a_failure_takes_the_place_of_times_and_times_that_of_a_failure(path: Path) -> None:
    for after in (table(rows=(), failed="at 1 × 64, ValueError: no"), table()):
        write_tables(path, [table(rows=(row(2),))] if after.failed else [after])
        write_tables(path, [after])
        assert read_tables(path).tables == (after,)


def test_writers_at_once_lose_nothing_of_each_other(path: Path) -> None:
    """Every write reads the file, adds to it and replaces it, under a lock that threads take like processes."""

    def write(requests: int) -> None:
        write_tables(path, [table(rows=(row(requests),)), table(backend=f"b{requests}")])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(1, 17)))
    tables = {each.backend: each for each in read_tables(path).tables}
    assert [each.requests for each in tables["fast"].rows] == [*range(1, 17)]
    assert len(tables) == 17


def test_a_writer_that_does_not_end_is_waited_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tables(path, [table()])
    monkeypatch.setattr(table_writing, "LOCK_SECONDS", 0.05)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with raises_naming(TableError, f"{path}.lock", "0.05 s"):
            write_tables(path, [table(backend="slow")])
    write_tables(path, [table(backend="slow")])
    assert len(read_tables(path).tables) == 2


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_naming(TableError, "file/x.json"):
        write_tables(tmp_path / "file" / "x.json", [table()])


def test_a_file_is_of_one_device(path: Path) -> None:
    with raises_naming(TableError, "2 devices"):
        write_tables(path, [table(), table(device="NVIDIA B200")])
    write_tables(path, [table()])
    with raises_naming(TableError, "NVIDIA H200 (SM 90)", "NVIDIA B200 (SM 100)"):
        write_tables(path, [table(device="NVIDIA B200", sm=100)])


def test_an_unreadable_file_is_put_aside_when_it_is_written(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(TableWarning, match=r"is not JSON.*it is kept as nvidia-h200.unreadable"):
        write_tables(path, [table()])
    assert read_tables(path).tables == (table(),)
    assert path.with_suffix(".unreadable").read_text() == "{"
