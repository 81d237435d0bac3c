"""``attnplug plugins``: list what installed packages provide."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from attnplug.choose.hosts import GROUP
from attnplug.choose.loading import Source, find_entry_points
from attnplug.choose.registry import Registry, load_registry
from attnplug.cli import output
from attnplug.cli.backends import Row, listing
from attnplug.cli.foreign import claims, conflict
from attnplug.cli.text import table
from attnplug.cli.warn import warn_of_the_rest
from attnplug.hf.tiny import TINY


@dataclass(frozen=True, slots=True)
class Brought:
    """One thing that an installed package brings: a backend, a command, another hook's item, or a broken plugin."""

    distribution: str
    version: str
    kind: str
    name: str
    status: str
    text: str

    def as_json(self) -> dict[str, object]:
        return {"kind": self.kind, "name": self.name, "status": self.status, "text": self.text}


def list_plugins(own_commands: Collection[str], *, json: bool) -> int:
    registry = load_registry()
    brought = [_backend(row) for row in listing(registry, every=True)]
    brought += _commands(own_commands)
    brought += _hosts()
    brought += _other(registry)
    brought.sort(key=lambda one: (one.distribution != "attnplug", one.distribution, one.kind, one.name))
    if json:
        output.write_json({"installed": _by_package(brought)})
    else:
        cells = [(f"{b.distribution} {b.version}", f"{b.kind} {b.name}", b.text) for b in brought]
        print(table(("installed", "brings", "status"), cells))
    warn_of_the_rest(registry)
    return 0


def _backend(row: Row) -> Brought:
    kind = "plugin" if row.status in ("broken", "blocked") else "backend"  # only the entry point of those is known
    return Brought(row.distribution, row.version, kind, row.name, row.status, row.text)


def _commands(own: Collection[str]) -> Iterator[Brought]:
    """Commands according to metadata. None is loaded, so a command that fails to load is not known to be broken."""
    found, _ = claims()  # what cannot be read is listed among the broken plugins
    for name, points in found.items():
        taken = conflict(name, points, own)
        for source in map(Source.of, points):
            status = "installed" if taken is None else "broken"
            yield Brought(source.distribution, source.version, "command", name, status, taken or "installed")


def _hosts() -> Iterator[Brought]:
    """Hosts according to metadata; ``explain --host`` loads them."""
    for source in map(Source.of, find_entry_points(GROUP)[0]):
        yield Brought(source.distribution, source.version, "host", source.entry_point, "installed", "installed")


def _other(registry: Registry) -> Iterator[Brought]:
    """What plugins bring beyond backends. Core's own is the same everywhere, and is left out."""
    kinds = [("workspace kind", name, kind.source) for name, kind in registry.workspace_kinds.items()]
    tables = [("measured table", name, table.source) for name, table in registry.rankings.items()]
    models = [("model", TINY + name, model.source) for name, model in registry.tiny_models.items()]
    for kind, name, source in (*kinds, *tables, *models):
        if not source.embedded:
            yield Brought(source.distribution, source.version, kind, name, "installed", "installed")


def _by_package(brought: list[Brought]) -> list[dict[str, object]]:
    packages: dict[tuple[str, str], list[Brought]] = {}
    for one in brought:
        packages.setdefault((one.distribution, one.version), []).append(one)
    return [
        {"distribution": distribution, "version": version, "brings": [one.as_json() for one in brings]}
        for (distribution, version), brings in packages.items()
    ]
