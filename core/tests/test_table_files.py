"""Files of measured tables are read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attnplug_tune.table_writing import write_tables

from attnplug import AttentionKind, DType, Role
from attnplug.auto.table_files import TableError, read_tables
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement

SHAPE = MeasuredShape(AttentionKind.MLA, 16, 1, 576, 512, DType.BFLOAT16, DType.FLOAT8_E4M3, 64)
TABLE = MeasuredTable(
    "NVIDIA H200",
    90,
    "fast",
    Role.DECODE,
    SHAPE,
    (Measurement(1, 4096, 1, False, 7.0, 6.5, 7.25),),
    {"torch": "2.11.0"},
    "2026-11-16",
)


def _changed(change: Any) -> Any:
    def changed(content: dict[str, Any]) -> object:
        change(content)
        return content

    return changed


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: [content], "not an object"),
        (_changed(lambda c: c.update(schema=1)), "it has schema 1, and this attnplug reads 4"),
        (_changed(lambda c: c.pop("schema")), "it has schema None"),
        (_changed(lambda c: c.pop("device")), "the file lacks device"),
        (_changed(lambda c: c.update(more=1)), "the file has unknown keys more"),
        (_changed(lambda c: c.update(tables={})), "tables={} must be a list"),
        (_changed(lambda c: c["tables"].append(c["tables"][0])), "two tables of fast decode on NVIDIA H200"),
        (_changed(lambda c: c["tables"].append(3)), "a table=3 must be an object"),
        (_changed(lambda c: c["tables"][0].update(role="pilot")), "role holds 'pilot'"),
        (_changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, 7.0]])), "write \\(requests, length"),
        (
            _changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, False, float("nan"), 1, 1]])),
            "above 0",
        ),
        (
            _changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, False, 10**400, 1, 1]])),
            "above 0 and below",
        ),
        (_changed(lambda c: c["tables"][0].update(rows=[[2, 4096, 1, 1, 7.0, 7, 7]])), "ragged is true or false"),
        (_changed(lambda c: c["tables"][0].update(rows=[[2, 4096, 1, False, 7.0, 8, 9]])), "between low and high"),
        (_changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, True, 7.0, 7, 7]])), "false of one request"),
        (_changed(lambda c: c["tables"][0].update(rows=[])), "has no rows"),
        (_changed(lambda c: c["tables"][0].update(failed="boom")), "a table has unknown keys rows"),
        (_changed(lambda c: c["tables"].append({**c["tables"].pop(), "failed": 3})), "a table has unknown keys rows"),
        (_changed(lambda c: (c["tables"][0].pop("rows"), c["tables"][0].update(failed="a\nb"))), "say in one line"),
        (_changed(lambda c: c["tables"][0].update(measured="today\n\x1b[31m")), "must be a day: 2026-11-16"),
        (_changed(lambda c: c["tables"][0].update(versions={"torch": 2})), "say what was measured"),
        (_changed(lambda c: c["tables"][0]["shape"].update(dtype="float7")), "dtype holds 'float7'"),
        (_changed(lambda c: c["tables"][0]["shape"].update(num_heads="16")), "num_heads='16' must be a whole number"),
        (_changed(lambda c: c["tables"][0]["shape"].update(window=-1)), "window=-1 must not be negative"),
        (_changed(lambda c: c["tables"][0]["shape"].update(num_heads=10**400)), "must not be negative, and below"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: Any, reason: str) -> None:
    path = tmp_path / "nvidia-h200.json"
    write_tables(path, [TABLE])
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with pytest.raises(TableError, match=reason) as error:
        read_tables(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
