"""Writing of measured tables, safe across processes. Core reads them (``attnplug.auto.table_store``)."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from packaging.requirements import Requirement

from attnplug.auto.table_store import DRIVER, SCHEMA, MeasuredTable, TableError, read_tables
from attnplug.declare.device import Processor
from attnplug.declare.errors import TableWarning
from attnplug.declare.installed import installed_version
from attnplug.declare.spec import Registered

LOCK_SECONDS = 10.0
"""Time that a writer waits for the lock. Writing takes milliseconds."""


def versions_of(backend: Registered, processor: Processor) -> dict[str, str]:
    """Installed versions that a backend's times depend on: its plugin, the libraries that it requires or uses, torch
    and the driver."""
    required = [each if isinstance(each, str) else each[0] for each in backend.spec.requires]
    names = [*(Requirement(each).name for each in required), *backend.spec.uses, "torch"]
    found = {name: installed_version(name) for name in names}
    driver = {DRIVER: processor.driver} if processor.driver else {}
    known = {name: version for name, version in found.items() if version is not None}
    return {backend.source.distribution: backend.source.version, **known, **driver}


def ensure_writable(path: Path) -> None:
    """Check that a file can be written, before anything is measured. Raises :class:`TableError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            pass
    except OSError as error:
        raise TableError(f"{path} cannot be written: {error.strerror or error}") from error


def write_tables(path: Path, tables: Iterable[MeasuredTable]) -> None:
    """Add tables to a file, creating it if needed. All tables, old and new, must be of the same device.

    If the file has a table with the same title and versions, new rows replace old rows of the same point and the other
    old rows stay. With different versions the old table is replaced as a whole. So it is if the backend failed before
    or fails now: a backend that fails at some points must not be chosen for its times at others. Concurrent writers
    lose no data. Readers see the file as it was before or after the write. Raises :class:`TableError`.
    """
    added = tuple(tables)
    devices = {(table.device, table.sm) for table in added}
    if len(devices) != 1:
        raise TableError(f"{path}: tables of {len(devices)} devices cannot be in one file; write one for each device")
    ((device, sm),) = devices
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            merged = {table.title: table for table in _present(path, device, sm)}
            for table in added:
                merged[table.title] = _merged(merged.get(table.title), table)
            _replace(path, device, sm, merged.values())
    except OSError as error:
        raise TableError(f"{path} cannot be written: {error.strerror or error}") from error


def _present(path: Path, device: str, sm: int) -> tuple[MeasuredTable, ...]:
    """Tables that a file has before it is written. An unreadable file is renamed, with a warning."""
    if not path.exists():
        return ()
    try:
        file = read_tables(path)
    except TableError as error:
        aside = path.with_suffix(".unreadable")
        os.replace(path, aside)
        warnings.warn(f"{error}; it is kept as {aside.name}", TableWarning, stacklevel=3)
        return ()
    if (file.device, file.sm) != (device, sm):
        raise TableError(f"{path} holds tables of {file.device} (SM {file.sm}), not of {device} (SM {sm})")
    return file.tables


def _merged(before: MeasuredTable | None, after: MeasuredTable) -> MeasuredTable:
    if before is None or before.versions != after.versions or before.failed or after.failed:
        return after
    rows = {row[:4]: row for row in (*before.rows, *after.rows)}
    return replace(after, rows=tuple(rows.values()))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a file against other writers. The lock is a file beside it, which is never deleted."""
    import fcntl  # here because it does not exist on Windows, and reading does not need it

    beside = path.with_name(f"{path.name}.lock")
    until = time.monotonic() + LOCK_SECONDS
    with beside.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TableError(
                        f"{path} cannot be written: another process has held {beside} for {LOCK_SECONDS:g} s; "
                        "end it, or write to another file"
                    ) from None
                time.sleep(0.02)
        yield


def _replace(path: Path, device: str, sm: int, tables: Iterable[MeasuredTable]) -> None:
    """Replace the file atomically, so that no reader sees half of it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(_text(device, sm, tables), encoding="utf-8")
        os.replace(fresh, path)
    finally:
        with suppress(FileNotFoundError):
            fresh.unlink()


def _text(device: str, sm: int, tables: Iterable[MeasuredTable]) -> str:
    """JSON for readable diffs: one line per field of a table and per row."""
    blocks = []
    for table in tables:
        lines = [f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in _head(table).items()]
        rows = ",\n".join(f"    {json.dumps(list(row))}" for row in table.rows)
        lines.append(f'   "failed": {json.dumps(table.failed)}' if table.failed else f'   "rows": [\n{rows}\n   ]')
        blocks.append("  {\n" + ",\n".join(lines) + "\n  }")
    head = {"schema": SCHEMA, "device": device, "sm": sm}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    return "{\n" + ",\n".join([*lines, ' "tables": [\n' + ",\n".join(blocks) + "\n ]"]) + "\n}\n"


def _head(table: MeasuredTable) -> dict[str, object]:
    """All fields of a table but its rows or its failure."""
    return {
        "backend": table.backend,
        "role": table.role.value,
        "shape": asdict(table.shape),
        "measured": table.measured,
        "versions": dict(table.versions),
    }
