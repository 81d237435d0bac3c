"""Files of measured tables are read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attnplug_tune.table_writing import write_tables

from attnplug import AttentionKind, DType, Role
from attnplug.auto.table_store import TableError, read_tables
from attnplug.tables import MeasuredShape, MeasuredTable, Measurement
from attnplug_testing.errors import raises_naming

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
    ("damage", "named"),
    [
        (lambda content: [content], ["object"]),
        (_changed(lambda c: c.update(schema=1)), ["schema", 1, 5]),
        (_changed(lambda c: c.pop("schema")), ["schema", None]),
        (_changed(lambda c: c.pop("device")), ["device"]),
        (_changed(lambda c: c.update(more=1)), ["more"]),
        (_changed(lambda c: c.update(tables={})), ["tables={}", "list"]),
        (_changed(lambda c: c["tables"].append(c["tables"][0])), ["fast", "decode", "NVIDIA H200"]),
        (_changed(lambda c: c["tables"].append(3)), ["table=3", "object"]),
        (_changed(lambda c: c["tables"][0].update(role="pilot")), ["role", "'pilot'"]),
        (_changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, 7.0]])), ["(requests, length"]),
        (
            _changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, False, float("nan"), 1, 1]])),
            ["nan"],
        ),
        (
            _changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, False, 10**400, 1, 1]])),
            [10**400, 2**40],
        ),
        (_changed(lambda c: c["tables"][0].update(rows=[[2, 4096, 1, 1, 7.0, 7, 7]])), ["ragged"]),
        (_changed(lambda c: c["tables"][0].update(rows=[[2, 4096, 1, False, 7.0, 8, 9]])), ["low", "high"]),
        (_changed(lambda c: c["tables"][0].update(rows=[[1, 4096, 1, True, 7.0, 7, 7]])), ["ragged"]),
        (_changed(lambda c: c["tables"][0].update(rows=[])), ["rows"]),
        (_changed(lambda c: c["tables"][0].update(failed="boom")), ["rows"]),
        (_changed(lambda c: c["tables"].append({**c["tables"].pop(), "failed": 3})), ["rows"]),
        (_changed(lambda c: (c["tables"][0].pop("rows"), c["tables"][0].update(failed="a\nb"))), ["one line"]),
        (_changed(lambda c: c["tables"][0].update(measured="today\n\x1b[31m")), ["2026-11-16"]),
        (_changed(lambda c: c["tables"][0].update(versions={"torch": 2})), ["torch"]),
        (_changed(lambda c: c["tables"][0]["shape"].update(dtype="float7")), ["dtype", "'float7'"]),
        (_changed(lambda c: c["tables"][0]["shape"].update(num_heads="16")), ["num_heads='16'"]),
        (_changed(lambda c: c["tables"][0]["shape"].update(window=-1)), ["window=-1"]),
        (_changed(lambda c: c["tables"][0]["shape"].update(num_heads=10**400)), ["num_heads"]),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, damage: Any, named: list[object]) -> None:
    path = tmp_path / "nvidia-h200.json"
    write_tables(path, [TABLE])
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    with raises_naming(TableError, path, *named) as error:
        read_tables(path)
    assert "\n" not in str(error.value)
