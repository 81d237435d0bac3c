"""Where measured tables come from: the user's cache folder, this package, and plugins; and which of them hold here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from attnplug import tables as shipped
from attnplug.choose.loading import Registered
from attnplug.choose.measured.files import TableError, read_tables
from attnplug.choose.registry import Registry
from attnplug.declare.installed import installed_version
from attnplug.declare.measured import MeasuredTable
from attnplug.machine.hardware import Processor

CACHE_VARIABLE = "ATTNPLUG_CACHE_DIR"
TABLES_VARIABLE = "ATTNPLUG_TABLES"
"""``off``: no measured table is used, wherever it lies."""
DRIVER = "driver"
"""The key of the GPU driver among a table's versions; the others are distributions."""
_PLATFORM = ("torch", "triton")
"""Distributions whose releases leave the order of backends as it is, mostly; so do those of the backend's own package.
Tables of others hold until their major version changes; who measures on the machine itself gets a table for exactly
what is there."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a table comes from, in a few words, and the file or the plugin that holds it."""

    words: str
    holder: str
    own: bool = False
    """Whether it was measured on this machine."""


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A measured table that holds here."""

    table: MeasuredTable
    origin: Origin


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables that hold on a processor, each title once; in one line each, what was found and cannot be used."""

    found: tuple[FoundTable, ...]
    faults: tuple[str, ...] = ()


def cache_folder() -> Path:
    """Where this user's measured tables lie. The folder need not be there. Raises TableError if there is no place."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own) / "tables"
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "attnplug" / "tables"
    try:
        return Path.home() / ".cache" / "attnplug" / "tables"
    except RuntimeError:
        told = f"this user has no home folder; set {CACHE_VARIABLE} to a folder for measured tables"
        raise TableError(told) from None


def table_path(processor: Processor) -> Path:
    """The file of what this user measured on a processor."""
    return cache_folder() / f"{_file_name(processor)}.json"


def table_files(processor: Processor) -> Iterator[tuple[Path, Origin]]:
    """The files that are named after a processor: the user's own, and those that ship with this package."""
    folders = [(Path(shipped.__file__).parent, partial(Origin, f"shipped for {processor.name}"))]
    with suppress(TableError):  # a user without a home has no tables there
        folders.insert(0, (cache_folder(), partial(Origin, "measured on this machine", own=True)))
    name = _file_name(processor)
    more = re.compile(rf"{re.escape(name)}\..*\.json")
    for folder, made in folders:
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            yield folder, made(str(folder))  # whoever reads it is told why it cannot be
            continue
        found = [f"{name}.json"] * (f"{name}.json" in names) + sorted(filter(more.fullmatch, names))
        yield from ((folder / each, made(str(folder / each))) for each in found)


def versions_of(backend: Registered, processor: Processor) -> dict[str, str]:
    """What a measurement of a backend depends on, as it is installed here: its plugin, the libraries that it requires
    or uses, torch and the driver."""
    from packaging.requirements import Requirement  # here: a start-up without measurements need not pay for it

    required = [each if isinstance(each, str) else each[0] for each in backend.spec.requires]
    names = [*(Requirement(each).name for each in required), *backend.spec.uses, "torch"]
    found = {name: installed_version(name) for name in names}
    driver = {DRIVER: processor.driver} if processor.driver else {}
    known = {name: version for name, version in found.items() if version is not None}
    return {backend.source.distribution: backend.source.version, **known, **driver}


def load_tables(registry: Registry, processor: Processor) -> Tables:
    """The tables of installed backends that hold on a processor. Where several have one title, the user's own comes
    first, then what ships with this package, then what plugins bring."""
    if os.environ.get(TABLES_VARIABLE, "").strip().lower() == "off":
        return Tables(())
    found: dict[str, FoundTable] = {}
    faults: dict[str, None] = {}
    for table, origin in _all_tables(registry, processor, faults):
        if table.backend not in registry.backends:
            continue
        backend = registry.backends[table.backend]
        what, are = ("a failure", "is") if table.failed else ("times", "are")
        unused = f"{origin.holder}: {what} of {table.backend} {are} not used"
        if table.failed and not origin.own:
            faults[f"{unused}: it was not on this machine"] = None
            continue
        outdated = _outdated(table, origin, backend, _here(table, backend, processor))
        if outdated is None:
            found.setdefault(table.title, FoundTable(table, origin))
        elif outdated:
            again = "; 'attnplug tune' measures again" if origin.own else ""
            faults[f"{unused}: {outdated}{again}"] = None
    return Tables(tuple(found.values()), tuple(faults))


def _all_tables(
    registry: Registry, processor: Processor, faults: dict[str, None]
) -> Iterator[tuple[MeasuredTable, Origin]]:
    """Every table of this processor. What cannot be read is added to ``faults``."""
    for path, origin in table_files(processor):
        try:
            file = read_tables(path)
        except TableError as error:
            faults[f"{error}; it is not used"] = None
            continue
        if (file.device, file.sm) != (processor.name, processor.sm):
            other = Processor(file.device, file.sm)
            faults[f"{path} is not used: it was measured on {other}, and this is {processor}"] = None
            continue
        yield from ((table, origin) for table in file.tables)
    for provided in registry.rankings.values():
        if (provided.value.device, provided.value.sm) == (processor.name, processor.sm):
            yield provided.value, Origin(f"brought by {provided.source}", str(provided.source))


def _here(table: MeasuredTable, backend: Registered, processor: Processor) -> dict[str, str | None]:
    """What is here of all that a table depends on."""
    known = {backend.source.distribution: backend.source.version, DRIVER: processor.driver}
    return {name: known[name] if name in known else installed_version(name) for name in table.versions}


def _outdated(table: MeasuredTable, origin: Origin, backend: Registered, here: Mapping[str, str | None]) -> str | None:
    """Why a table no longer holds; ``None`` if it does, and nothing to say if what it measured is not installed."""
    for name in backend.spec.uses:
        measured, found = table.versions.get(name), installed_version(name)
        if (measured is None) != (found is None):
            return f"measured with {name} {measured or 'missing'}, and it is {found or 'missing'} here"
    if not all(here.values()):
        return ""
    loosely = () if origin.own else (DRIVER, backend.source.distribution, *_PLATFORM)
    for name, measured in table.versions.items():
        if not _equal(name, measured, str(here[name]), name in loosely):
            return f"measured with {name} {measured}, and {here[name]} is here"
    return None


def _equal(name: str, measured: str, here: str, loosely: bool) -> bool:
    if not loosely:
        return measured == here
    return name == DRIVER or measured.partition(".")[0] == here.partition(".")[0]


def _file_name(processor: Processor) -> str:
    return re.sub(r"[^a-z0-9]+", "-", processor.name.lower()).strip("-") or "unnamed"


def file_states(registry: Registry, processor: Processor) -> Mapping[str, str]:
    """What to say about each file of a processor, by its path, and about each plugin that brings tables."""
    tables = load_tables(registry, processor)
    states: dict[str, list[MeasuredTable]] = {str(path): [] for path, _ in table_files(processor)}
    for found in tables.found:
        states.setdefault(found.origin.holder, []).append(found.table)
    return {
        holder: "\n".join([*_used(used), *(fault for fault in tables.faults if fault.startswith(holder))])
        for holder, used in states.items()
    }


def _used(tables: Sequence[MeasuredTable]) -> Iterator[str]:
    times = [table.backend for table in tables if not table.failed]
    if times:
        yield f"used: {len(times)} table{'s' * (len(times) != 1)} of {', '.join(sorted(set(times)))}"
    for table in tables:
        if table.failed:
            yield f"not taken by auto: {table.backend} for {table.role} of {table.shape}, which failed {table.failed}"
    if not tables:
        yield "nothing of it is used"
