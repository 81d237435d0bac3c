"""Registries in which a backend claims other levels of invariance than its plugin declares."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from attnplug.host import Registry, load_registry


def registry_claiming(name: str, levels: Collection[str]) -> Registry:
    """Return the installed backends; ``name`` claims ``levels``."""
    found = load_registry()
    own = found.get(name)
    claims = replace(own.spec.capabilities, invariant=frozenset(levels))
    return replace(found, backends={**found.backends, name: replace(own, spec=replace(own.spec, capabilities=claims))})
