"""All that installed plugins bring, by name (D1, D2). There is no list of names here: entry points are the list."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeVar

from importlib_metadata import EntryPoint

from attnplug.choose.loading import (
    Broken,
    Loaded,
    find_plugins,
    load_plugin,
    new_manager,
    normal,
)
from attnplug.declare.errors import PluginError, UsageError
from attnplug.declare.factory import factory_refusal
from attnplug.declare.refusal import Refusal, RefusalCode
from attnplug.declare.registered import Provided, Registered, Source
from attnplug.declare.version import CONTRACT_VERSION, contract_problem
from attnplug.declare.workspace_kind import WorkspaceKind

SLOW_SECONDS = 1.0
"""A plugin that takes longer to load is reported: loading should take milliseconds."""
ALLOW_VARIABLE = "ATTNPLUG_PLUGINS"
STRICT_VARIABLE = "ATTNPLUG_STRICT"


@dataclass(frozen=True, slots=True)
class Registry:
    """Every plugin found: the backends to choose from, the broken ones, and those the environment blocks."""

    backends: Mapping[str, Registered]
    broken: tuple[Broken, ...] = ()
    blocked: tuple[Source, ...] = ()
    unmatched: tuple[str, ...] = ()
    """Names in ``ATTNPLUG_PLUGINS`` that match no installed plugin."""
    slow: Mapping[Source, float] = field(default_factory=dict)
    """Plugins that took long to load, with their seconds."""
    strict: bool = False
    """``ATTNPLUG_STRICT`` is set: what is wrong with any plugin is an error."""
    workspace_kinds: Mapping[str, Provided[WorkspaceKind]] = field(default_factory=dict)
    table_folders: tuple[Provided[Path], ...] = ()
    """Folders of measured tables."""
    tiny_models: Mapping[str, Provided[Mapping[str, object]]] = field(default_factory=dict)

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
        near = _near(name, self.backends)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(
            f"there is no backend {name!r}{hint} Installed: {', '.join(sorted(self.backends)) or 'none'}; "
            "'attnplug doctor' shows the broken and blocked ones too"
        )

    def insist_on_checks(self, reasons: Iterable[tuple[Registered, Sequence[Refusal]]]) -> None:
        """In strict mode, a backend's own check that fails is an error, which lists all that do."""
        if self.strict:
            _fail(
                dict.fromkeys(
                    f"{backend.spec.name} ({backend.source}): {reason}"
                    for backend, refusals in reasons
                    for reason in refusals
                    if reason.code == RefusalCode.CHECK_FAILED
                )
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
    loaded: list[Loaded] = []
    known: dict[str, Any] = {}
    slow: dict[Source, float] = {}
    for point in allowed:
        started = monotonic()
        outcome = load_plugin(manager, point, points[point], known)
        seconds = monotonic() - started
        if isinstance(outcome, Loaded):
            loaded.append(outcome)
        else:
            broken.append(outcome)
            manager = new_manager()
        if seconds > SLOW_SECONDS and not points[point].embedded:
            slow[points[point]] = seconds
    backends = _settle("the name {!r}", "{}", _backends(loaded, broken), broken, CONTRACT_VERSION)
    kinds = _settle(
        "the workspace kind {!r} (zeroed by one, not by the other)", "workspace kind {}", _kinds(loaded), broken
    )
    models = [
        (name, Provided(config, plugin.source)) for plugin in loaded for name, config in plugin.tiny_models.items()
    ]
    tiny_models = _settle("the name 'tiny:{}'", "tiny:{}", models, broken)
    registry = Registry(
        backends,
        tuple(broken),
        tuple(points[point] for point in blocked),
        unmatched,
        slow,
        _strict(environment.get(STRICT_VARIABLE)),
        kinds,
        tuple(Provided(folder, plugin.source) for plugin in loaded for folder in plugin.table_folders),
        tiny_models,
    )
    if registry.strict:
        _insist(registry)
    return registry


def _near(name: str, backends: Iterable[str]) -> list[str]:
    """Similar names; one that differs only in case or hyphens is certainly meant."""
    lower = name.lower().replace("-", "_")
    known = list(backends)
    return [lower] if lower in known else difflib.get_close_matches(lower, known, n=3, cutoff=0.5)


def _permit(
    points: list[EntryPoint], sources: Mapping[EntryPoint, Source], setting: str | None
) -> tuple[list[EntryPoint], list[EntryPoint], tuple[str, ...]]:
    """Divide plugins by the allow-list: allowed, blocked, and the names in the list that match nothing."""
    if setting is None:
        return points, [], ()
    wanted = {normal(name): name.strip() for name in setting.split(",") if name.strip()}
    known: set[str] = set()
    allowed: list[EntryPoint] = []
    blocked: list[EntryPoint] = []
    for point in points:
        distribution = normal(sources[point].distribution)
        names = {distribution, normal(point.name)}
        known |= names
        permitted = sources[point].embedded or not names.isdisjoint(wanted)
        (allowed if permitted else blocked).append(point)
    return allowed, blocked, tuple(sorted(text for name, text in wanted.items() if name not in known))


def _strict(setting: str | None) -> bool:
    return (setting or "").strip().lower() not in ("", "0", "false", "no", "off")


def _insist(registry: Registry) -> None:
    faults = [str(broken) for broken in registry.broken]
    faults += [f"{ALLOW_VARIABLE} names {name!r}, which matches no installed plugin" for name in registry.unmatched]
    faults += [
        f"{name} ({backend.source}): {missing}"
        for name, backend in registry.backends.items()
        if (missing := factory_refusal(backend.spec.factory)) is not None
    ]
    _fail(faults)


def _fail(faults: Collection[str]) -> None:
    if faults:
        raise PluginError(f"{STRICT_VARIABLE} is set and plugins are broken:\n" + "\n".join(f"  {f}" for f in faults))


def _backends(loaded: Iterable[Loaded], broken: list[Broken]) -> list[tuple[str, Registered]]:
    """The backends of our contract by name. Those of another contract are left out and added to ``broken``."""
    found = []
    for plugin in loaded:
        for spec in plugin.backends:
            problem = contract_problem(spec.contract)
            if problem is None:
                found.append((spec.name, Registered(spec, plugin.source)))
            else:
                broken.append(Broken(spec.name, plugin.source, problem, str(spec.contract)[:20]))
    return found


def _kinds(loaded: Iterable[Loaded]) -> list[tuple[str, Provided[WorkspaceKind]]]:
    """Kinds by name, each contract once: plugins that declare an equal kind share it. Core's own declaration counts."""
    core_last = sorted(loaded, key=lambda plugin: plugin.source.embedded)
    kinds = {kind: Provided(kind, plugin.source) for plugin in core_last for kind in plugin.workspace_kinds}
    return [(kind.name, provided) for kind, provided in kinds.items()]


class _Sourced(Protocol):
    @property
    def source(self) -> Source: ...


Claim = TypeVar("Claim", bound=_Sourced)


def _settle(
    title: str, label: str, claims: Iterable[tuple[str, Claim]], broken: list[Broken], contract: str | None = None
) -> dict[str, Claim]:
    """Make names unique. Core keeps its own; otherwise two claims to one name are an error of both (D2), in ``broken``.

    ``title`` and ``label`` are formats of the name, for the error's text and for the name of what is broken.
    """
    by_name: dict[str, list[Claim]] = {}
    for name, claim in claims:
        by_name.setdefault(name, []).append(claim)
    kept: dict[str, Claim] = {}
    for name, claimants in sorted(by_name.items()):
        embedded = [claimant for claimant in claimants if claimant.source.embedded]
        keeper = next((group[0] for group in (embedded, claimants) if len(group) == 1), None)
        if keeper is not None:
            kept[name] = keeper
        error = _taken(title.format(name), claimants, keeper)
        broken += [Broken(label.format(name), one.source, error, contract) for one in claimants if one is not keeper]
    return kept


def _taken(title: str, claimants: Sequence[_Sourced], keeper: _Sourced | None) -> str:
    owners = [f"{claimant.source} (entry point {claimant.source.entry_point})" for claimant in claimants]
    if len(set(owners)) == 1:
        return f"{title} is given {len(owners)} times by {owners[0]}, so none is used; keep one of them"
    claimed = f"{title} is claimed by {' and '.join(owners)}"
    if keeper is not None:
        return f"{claimed}; attnplug's own keeps it; uninstall the other, or give it another name"
    return f"{claimed}, so neither is used; uninstall one, or name the one to keep in {ALLOW_VARIABLE}"
