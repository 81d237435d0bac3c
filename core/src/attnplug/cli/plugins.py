"""``attnplug plugins``: list what installed packages provide."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from attnplug.cli import output
from attnplug.cli.app import command_claims, command_conflict
from attnplug.cli.backends import listing
from attnplug.declare.spec import Source
from attnplug.hf.config_keys import TINY
from attnplug.registry.hosts import GROUP
from attnplug.registry.loading import find_entry_points
from attnplug.registry.registry import Registry, load_registry

_KINDS = dict.fromkeys(("broken", "blocked"), "plugin")  # their backends are unknown


class Item(NamedTuple):
    """One item of an installed package: a backend, a command, a host, another hook's item, or a broken plugin."""

    source: Source
    kind: str
    name: str
    status: str
    text: str


def run(parsed: argparse.Namespace) -> int:
    registry = load_registry()
    items = [
        Item(row.source, _KINDS.get(row.status, "backend"), row.name, row.status, row.text)
        for row in listing(registry, every=True)
    ]
    found, _ = command_claims()  # none is loaded; unreadable installations are listed as broken plugins
    for name, points in found.items():
        taken = command_conflict(name, points)
        status, text = ("installed", "installed") if taken is None else ("broken", taken)
        items += [Item(source, "command", name, status, text) for source in map(Source.of, points)]
    hosts = map(Source.of, find_entry_points(GROUP)[0])  # from metadata: only ``explain --host`` loads them
    items += [Item(source, "host", source.entry_point, "installed", "installed") for source in hosts]
    items += _other(registry)
    items.sort(key=lambda item: (not item.source.embedded, str(item.source), item.kind, item.name))
    if parsed.json:
        packages = []
        for (name, version), provided in groupby(items, lambda each: (each.source.distribution, each.source.version)):
            brings = [{"kind": i.kind, "name": i.name, "status": i.status, "text": i.text} for i in provided]
            packages.append({"distribution": name, "version": version, "brings": brings})
        output.write_json({"installed": packages})
    else:
        cells = [(str(item.source), f"{item.kind} {item.name}", item.text) for item in items]
        print(output.table(("installed", "brings", "status"), cells))
    output.warn_of_plugins(registry, broken=False)
    return 0


def _other(registry: Registry) -> Iterator[Item]:
    """Yield items other than backends. Core's own are the same everywhere and are left out."""
    kinds = [("workspace kind", name, kind.source) for name, kind in registry.workspace_kinds.items()]
    tables = [
        ("measured tables", path.stem, folder.source)
        for folder in registry.table_folders
        for path in sorted(folder.value.glob("*.json"))
    ]
    formats = [("KV format", name, format.source) for name, format in registry.kv_formats.items()]
    models = [("model", TINY + name, model.source) for name, model in registry.tiny_models.items()]
    devices = [("device", name, device.source) for name, device in registry.devices.items()]
    for kind, name, source in (*formats, *kinds, *tables, *models, *devices):
        if not source.embedded:
            yield Item(source, kind, name, "installed", "installed")
