"""Strict reading of files of measured tables: JSON with a schema version. attnplug-tune writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from attnplug.auto.measurement import MeasuredShape, MeasuredTable
from attnplug.declare.errors import AttnplugError, PluginError
from attnplug.declare.reading import integer, of_type
from attnplug.hf.json_files import read_json_object

SCHEMA = 4
_KEYS = ("schema", "device", "sm", "tables")
_TABLE_KEYS = ("backend", "role", "shape", "measured", "versions")
_SHAPE_KEYS = tuple(each.name for each in fields(MeasuredShape))


class TableError(AttnplugError):
    """Raised if a file of measured tables cannot be read or written. The message is one line that names the file."""


@dataclass(frozen=True, slots=True)
class TableFile:
    """Contents of a file: measured tables of one device."""

    path: Path
    device: str
    sm: int
    tables: tuple[MeasuredTable, ...]


def read_tables(path: Path) -> TableFile:
    """Read a file of tables. Raises only :class:`TableError`, whatever is wrong with the file."""
    try:
        found = read_json_object(path)
    except AttnplugError as error:
        raise TableError(error.message) from error
    try:
        if found.get("schema") != SCHEMA:
            raise PluginError(f"it has schema {found.get('schema')!r}, and this attnplug reads {SCHEMA}")
        _, device, sm, tables = _values(found, _KEYS, "the file")
        read = [_table(device, sm, table) for table in of_type("tables", tables, list, "a list")]
        for title, count in Counter(table.title for table in read).items():
            if count > 1:
                raise PluginError(f"it has two tables of {title}")
        return TableFile(path, of_type("device", device, str, "a text"), integer("sm", sm), tuple(read))
    except PluginError as error:
        raise TableError(f"{path} is not a file of measured tables: {' '.join(error.message.split())}") from error


def _table(device: Any, sm: Any, value: object) -> MeasuredTable:
    last = "failed" if "failed" in of_type("a table", value, dict, "an object") else "rows"
    backend, role, shape, measured, versions, found = _values(value, (*_TABLE_KEYS, last), "a table")
    own = MeasuredShape(*_values(shape, _SHAPE_KEYS, "a shape"))
    rows, failed = ((), found) if last == "failed" else (found, "")
    return MeasuredTable(device, sm, backend, role, own, rows, versions, measured, failed)


def _values(value: object, names: Iterable[str], title: str) -> list[Any]:
    """Values of an object that must have exactly these keys."""
    found = of_type(title, value, dict, "an object")
    missing, unknown = set(names) - set(found), set(found) - set(names)
    if missing or unknown:
        wrong = f"lacks {', '.join(sorted(missing))}" if missing else f"has unknown keys {', '.join(sorted(unknown))}"
        raise PluginError(f"{title} {wrong}")
    return [found[name] for name in names]
