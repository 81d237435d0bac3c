"""Every installed backend by its name (D1, D2). There is no list of names here: entry points are the list."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from attnplug.errors import PluginError, UsageError
from attnplug.loading import Broken, Registered, Source, find_plugins, load_plugin, new_manager

BUILTIN_DISTRIBUTION = "attnplug"
ALLOW_VARIABLE = "ATTNPLUG_PLUGINS"
STRICT_VARIABLE = "ATTNPLUG_STRICT"


@dataclass(frozen=True, slots=True)
class Registry:
    """Every plugin found: the backends to choose from, the broken ones, and those the environment blocks."""

    backends: Mapping[str, Registered]
    broken: tuple[Broken, ...] = ()
    blocked: tuple[Source, ...] = ()
    unmatched: tuple[str, ...] = ()
    """Names in ``ATTNPLUG_PLUGINS`` that no installed plugin answers to."""

    def get(self, name: str) -> Registered:
        """The backend of this name, or an error that says why there is none and which names are near."""
        if name in self.backends:
            return self.backends[name]
        faults = [broken for broken in self.broken if name in (broken.name, broken.source.entry_point)]
        if faults:
            raise PluginError(f"backend {name!r} is installed but broken:\n" + "\n".join(f"  {f}" for f in faults))
        barred = [source for source in self.blocked if name == source.entry_point]
        if barred:
            raise UsageError(
                f"backend {name!r} ({barred[0]}) is blocked: {ALLOW_VARIABLE} does not name it; "
                f"add {barred[0].distribution} to it, or unset it"
            )
        near = difflib.get_close_matches(name, self.backends, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(
            f"there is no backend {name!r}{hint} Installed: {', '.join(sorted(self.backends)) or 'none'}; "
            "'attnplug backends --all' shows the broken and blocked ones too"
        )


def load_registry(
    plugins: Iterable[EntryPoint] | None = None, environment: Mapping[str, str] | None = None
) -> Registry:
    """Find and load every plugin. In strict mode a broken plugin is an error that lists all broken ones."""
    environment = os.environ if environment is None else environment
    found, broken = find_plugins() if plugins is None else (list(plugins), [])
    points = {point: Source.of(point) for point in found}
    ordered = sorted(points, key=lambda point: (points[point].distribution, point.name))
    allowed, blocked, unmatched = _permit(ordered, points, environment.get(ALLOW_VARIABLE))
    manager = new_manager()
    outcomes = [outcome for point in allowed for outcome in load_plugin(manager, point, points[point])]
    backends, taken = _unique([outcome for outcome in outcomes if isinstance(outcome, Registered)])
    broken += [outcome for outcome in outcomes if isinstance(outcome, Broken)] + taken
    registry = Registry(backends, tuple(broken), tuple(points[point] for point in blocked), unmatched)
    if _strict(environment.get(STRICT_VARIABLE)):
        _insist(registry)
    return registry


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _permit(
    points: list[EntryPoint], sources: Mapping[EntryPoint, Source], setting: str | None
) -> tuple[list[EntryPoint], list[EntryPoint], tuple[str, ...]]:
    """Divide plugins by the allow-list: allowed, blocked, and the names in the list that match nothing."""
    if setting is None:
        return points, [], ()
    wanted = {_normal(name): name.strip() for name in setting.split(",") if name.strip()}
    known = {BUILTIN_DISTRIBUTION}
    allowed: list[EntryPoint] = []
    blocked: list[EntryPoint] = []
    for point in points:
        distribution = _normal(sources[point].distribution)
        names = {distribution, _normal(point.name)}
        known |= names
        permitted = distribution == BUILTIN_DISTRIBUTION or not names.isdisjoint(wanted)
        (allowed if permitted else blocked).append(point)
    return allowed, blocked, tuple(sorted(text for name, text in wanted.items() if name not in known))


def _strict(setting: str | None) -> bool:
    return (setting or "").strip().lower() not in ("", "0", "false", "no", "off")


def _insist(registry: Registry) -> None:
    faults = [str(broken) for broken in registry.broken]
    faults += [f"{ALLOW_VARIABLE} names {name!r}, which no installed plugin answers to" for name in registry.unmatched]
    if faults:
        raise PluginError(f"{STRICT_VARIABLE} is set and plugins are broken:\n" + "\n".join(f"  {f}" for f in faults))


def _unique(candidates: list[Registered]) -> tuple[dict[str, Registered], list[Broken]]:
    """Names are unique. Two claims to one name are an error of both: neither wins (D2)."""
    claims: dict[str, list[Registered]] = {}
    for candidate in candidates:
        claims.setdefault(candidate.spec.name, []).append(candidate)
    backends = {name: claimants[0] for name, claimants in sorted(claims.items()) if len(claimants) == 1}
    broken = [
        Broken(name, claimant.source, _taken(name, claimants), contract=claimant.spec.contract)
        for name, claimants in sorted(claims.items())
        if len(claimants) > 1
        for claimant in claimants
    ]
    return backends, broken


def _taken(name: str, claimants: list[Registered]) -> str:
    owners = [f"{claimant.source} (entry point {claimant.source.entry_point})" for claimant in claimants]
    if len(set(owners)) == 1:
        return f"the name {name!r} is given {len(owners)} times by {owners[0]}, so none is used; give each its own name"
    embedded = any(_normal(claimant.source.distribution) == BUILTIN_DISTRIBUTION for claimant in claimants)
    keep = "set {} to leave the other out" if embedded else "name the one to keep in {}"
    return (
        f"the name {name!r} is claimed by {' and '.join(owners)}, so neither is used; "
        f"uninstall one, or {keep.format(ALLOW_VARIABLE)}"
    )
