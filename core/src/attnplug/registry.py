"""Entry points → backend specs, one plugin at a time, each isolated from the others (D1, D2).

There is no list of names here. A plugin is an entry point of group ``attnplug.plugins`` that leads to a module
(or object) with hookimpls; the embedded default arrives the same way. Whatever goes wrong with one plugin is
recorded with its distribution, version and error, and leaves the others alone.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from attnplug import hookspecs
from attnplug.contract import CONTRACT_VERSION, contract_problem
from attnplug.errors import PluginError, UsageError
from attnplug.spec import BackendSpec

GROUP = "attnplug.plugins"
BUILTIN_DISTRIBUTION = "attnplug"
ALLOW_VARIABLE = "ATTNPLUG_PLUGINS"
STRICT_VARIABLE = "ATTNPLUG_STRICT"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a plugin comes from."""

    entry_point: str
    target: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend that can be asked for, and the plugin that brought it."""

    spec: BackendSpec
    source: Source


@dataclass(frozen=True, slots=True)
class Broken:
    """A plugin, or one of its backends, that cannot be used. ``name`` is the backend's where it is known."""

    name: str
    source: Source
    error: str
    contract: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.source}): {self.error}"


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
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"there is no backend {name!r}; {hint}Installed: {', '.join(sorted(self.backends)) or 'none'}. "
            "'attnplug backends --all' shows the broken and blocked ones too"
        )


def load_registry(
    plugins: Iterable[EntryPoint] | None = None, environment: Mapping[str, str] | None = None
) -> Registry:
    """Find and load every plugin. In strict mode a broken plugin is an error that lists all broken ones."""
    environment = os.environ if environment is None else environment
    points = sorted(entry_points(group=GROUP) if plugins is None else plugins, key=_order)
    allowed, blocked, unmatched = _permit(points, environment.get(ALLOW_VARIABLE))
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    candidates: list[Registered] = []
    broken: list[Broken] = []
    for point in allowed:
        source = _source(point)
        for outcome in _load(manager, point, source):
            (candidates if isinstance(outcome, Registered) else broken).append(outcome)  # type: ignore[arg-type]
    backends, taken = _unique(candidates)
    registry = Registry(backends, tuple(broken + taken), tuple(map(_source, blocked)), unmatched)
    if _strict(environment.get(STRICT_VARIABLE)):
        _insist(registry)
    return registry


def _order(point: EntryPoint) -> tuple[str, str]:
    return (_source(point).distribution, point.name)


def _source(point: EntryPoint) -> Source:
    distribution = point.dist
    if distribution is None:  # an entry point that was made by hand and not read from an installation
        return Source(point.name, point.value, "unknown distribution", "?")
    return Source(point.name, point.value, distribution.name, distribution.version)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _permit(
    points: list[EntryPoint], setting: str | None
) -> tuple[list[EntryPoint], list[EntryPoint], tuple[str, ...]]:
    """Divide plugins by the allow-list: allowed, blocked, and the names in the list that match nothing."""
    if setting is None:
        return points, [], ()
    wanted = {_normal(name): name.strip() for name in setting.split(",") if name.strip()}
    answers = [(point, {_normal(point.name), _normal(_source(point).distribution)}) for point in points]
    permitted = {*wanted, BUILTIN_DISTRIBUTION}
    allowed = [point for point, names in answers if names & permitted]
    blocked = [point for point, names in answers if not names & permitted]
    known = {name for _, names in answers for name in names}
    return allowed, blocked, tuple(sorted(text for name, text in wanted.items() if name not in known))


def _strict(setting: str | None) -> bool:
    return (setting or "").strip().lower() not in ("", "0", "false", "no", "off")


def _insist(registry: Registry) -> None:
    faults = [str(broken) for broken in registry.broken]
    faults += [f"{ALLOW_VARIABLE} names {name!r}, which no installed plugin answers to" for name in registry.unmatched]
    if faults:
        raise PluginError(f"{STRICT_VARIABLE} is set and plugins are broken:\n" + "\n".join(f"  {f}" for f in faults))


def _load(manager: pluggy.PluginManager, point: EntryPoint, source: Source) -> Iterator[Registered | Broken]:
    """One plugin's backends, or what is wrong with it. Never raises: D2's isolation is here and only here."""
    try:
        # A plugin that prints while it loads must not end up inside our --json output.
        with contextlib.redirect_stdout(sys.stderr):
            plugin = point.load()
            name = manager.register(plugin, f"{source.distribution}:{source.entry_point}")
            assert name is not None
            specs = [spec for hook in _hookimpls(manager, plugin, source) for spec in _specs(hook)]
    except (Exception, SystemExit) as error:
        yield Broken(source.entry_point, source, _describe(error))
        return
    if not specs:
        yield Broken(source.entry_point, source, "it brings no backend: its hook returned nothing")
    for spec in specs:
        if (problem := contract_problem(spec.contract)) is not None:
            yield Broken(spec.name, source, problem, contract=str(spec.contract))
        else:
            yield Registered(spec, source)


def _describe(error: BaseException) -> str:
    if isinstance(error, PluginError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TypeError) and any(cls in str(error) for cls in ("BackendSpec", "Capabilities")):
        text += f" (this attnplug speaks contract {CONTRACT_VERSION}; a plugin for another one may use other fields)"
    return text


def _hookimpls(manager: pluggy.PluginManager, plugin: Any, source: Source) -> list[Callable[[], Any]]:
    """The plugin's hook functions, after every check that pluggy leaves out."""
    known = [name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("attnplug_")]
    functions: list[Callable[[], Any]] = []
    for caller in manager.get_hookcallers(plugin) or ():
        impl = next(impl for impl in caller.get_hookimpls() if impl.plugin is plugin)
        where = _signature(impl.function)
        if not caller.has_spec():
            near = difflib.get_close_matches(caller.name, known, n=1)
            raise PluginError(
                f"{where} implements a hook that does not exist, so it would never be called; "
                + (f"did you mean {near[0]}?" if near else f"hooks are {', '.join(known)}")
            )
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(f"{where} is a hook wrapper; a backend's plugin only returns its own specs")
        optional = _optional_parameters(impl.function)
        if optional:
            raise PluginError(
                f"{where}: parameter {', '.join(optional)} would never be filled, since pluggy passes no argument "
                "that has a default or is keyword-only; remove it"
            )
        functions.append(impl.function)
    if not functions:
        undecorated = [name for name in known if callable(getattr(plugin, name, None))]
        if undecorated:
            where = _signature(getattr(plugin, undecorated[0]))
            raise PluginError(f"{where} is not marked as a hook; put @attnplug.hookimpl above it")
        raise PluginError(
            f"{source.target} has no hookimpl; define attnplug_backends() there, marked @attnplug.hookimpl, "
            "returning a list of BackendSpec"
        )
    return functions


def _optional_parameters(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is not p.empty or p.kind is p.KEYWORD_ONLY]


def _specs(function: Callable[[], Any]) -> list[BackendSpec]:
    """Call a hook and insist on its return type, printing the author's signature back."""
    result = function()
    if isinstance(result, BackendSpec):
        raise PluginError(f"{_signature(function)} returned one BackendSpec; return a list of them: [spec]")
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise PluginError(f"{_signature(function)} returned {_brief(result)}; return a list of BackendSpec")
    specs = list(result)
    for position, spec in enumerate(specs):
        if not isinstance(spec, BackendSpec):
            raise PluginError(
                f"{_signature(function)} returned {_brief(spec)} at position {position}, not a BackendSpec"
            )
    return specs


def _brief(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def _signature(function: Callable[..., Any]) -> str:
    """``def name(parameters) in file:line``, so that an author finds the place at once."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"def {function.__name__}{inspect.signature(function)}{place}"


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
    owners = " and ".join(f"{claimant.source} (entry point {claimant.source.entry_point})" for claimant in claimants)
    return (
        f"the name {name!r} is claimed by {owners}, so neither is used; "
        f"uninstall one, or name the one to keep in {ALLOW_VARIABLE}"
    )
