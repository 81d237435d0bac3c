"""Finding plugins and loading them, one at a time, each isolated from the others (D2).

pluggy's own loader stops at the first broken plugin, skips a second one of the same name, never calls a misspelled
hook and never fills an argument with a default, all in silence. Each of these is an error here, reported with the
plugin's distribution and version and its author's own signature.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import importlib_metadata as metadata
import pluggy
from importlib_metadata import EntryPoint

from attnplug.choose import hookspecs
from attnplug.declare.errors import PluginError, describe_error
from attnplug.declare.spec import BackendSpec
from attnplug.declare.version import CONTRACT_VERSION, contract_problem

GROUP = "attnplug.plugins"
MOST_BACKENDS = 1000
"""Of one hook. A generator without end must not hang whoever lists backends."""
HOOKS = tuple(name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("attnplug_"))


@dataclass(frozen=True, slots=True)
class Source:
    """Where a plugin comes from."""

    entry_point: str
    target: str
    distribution: str
    version: str

    @classmethod
    def of(cls, point: EntryPoint) -> Source:
        return cls(point.name, point.value, *_identity(point.dist))

    @property
    def embedded(self) -> bool:
        """Whether it is core's own. Known by the module: names, and even metadata, are for anyone to choose."""
        return self.target.startswith("attnplug.")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def normal(distribution: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _identity(distribution: metadata.IDistribution | None) -> tuple[str, str]:
    """Name and version; what damaged or missing metadata cannot tell is said so."""
    found: dict[str, str] = {}
    if distribution is not None:
        try:
            # The two lines we need, without parsing a whole README as mail for each of fifty plugins.
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
            for line in text.partition("\n\n")[0].splitlines():
                key, _, value = line.partition(":")
                found.setdefault(key.lower(), value.strip())
        except Exception:  # whatever reading a damaged installation raises
            found.clear()
    place = getattr(distribution, "_path", "made by hand")
    return found.get("name") or f"unknown distribution ({place})", found.get("version") or "?"


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


def find_plugins() -> tuple[list[EntryPoint], list[Broken]]:
    """Every entry point of our group, and installations whose entry points cannot be read."""
    return find_entry_points(GROUP)


def find_entry_points(group: str) -> tuple[list[EntryPoint], list[Broken]]:
    """Every entry point of a group, and installations whose entry points cannot be read."""
    try:
        return list(metadata.entry_points(group=group)), []
    except Exception:  # one damaged installation fails the whole call
        return _find_one_by_one(group)


def _find_one_by_one(group: str) -> tuple[list[EntryPoint], list[Broken]]:
    points: dict[tuple[str, str], EntryPoint] = {}
    broken: list[Broken] = []
    for distribution in metadata.distributions():
        name, version = _identity(distribution)
        try:
            for point in distribution.entry_points.select(group=group):
                points.setdefault((name, point.name), point)  # the first on the path is the one that is imported
        except Exception as error:
            source = Source("", "entry_points.txt", name, version)
            broken.append(Broken(name, source, f"its entry points cannot be read: {describe_error(error)}"))
    return list(points.values()), broken


def new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_plugin(manager: pluggy.PluginManager, point: EntryPoint, source: Source) -> Iterator[Registered | Broken]:
    """One plugin's backends, or what is wrong with it. Raises nothing but an interrupt, which names the plugin."""
    try:
        with guarded():
            plugin = load_entry_point(point)
            functions = _hook_functions(manager, plugin, source)
            if (before := manager.get_name(plugin)) is not None:
                raise PluginError(f"{source.target} is loaded already, by entry point {before}; remove one of the two")
            manager.register(plugin, f"{source.distribution}:{source.entry_point}")
            specs = [spec for function in functions for spec in _specs(function)]
        outcomes = [_judge(spec, source) for spec in specs]
    except KeyboardInterrupt as error:
        # The user's, who wants to know what took so long, or the plugin's own: Python cannot tell them apart.
        raise KeyboardInterrupt(f"while loading plugin {source.entry_point} ({source})") from error
    except BaseException as error:  # plugins raise anything: SystemExit, types of their own
        yield Broken(source.entry_point, source, describe_error(error))
        return
    if not outcomes:
        yield Broken(source.entry_point, source, "it brings no backend: its hook returned nothing")
    yield from outcomes


def load_entry_point(point: EntryPoint) -> Any:
    """What an entry point leads to. Raises whatever the module raises that is imported: call it ``guarded``."""
    if point.pattern.match(point.value) is None:
        raise PluginError(f"its entry point leads to {point.value!r}; write 'package.module'")
    return point.load()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Around code of others: what it prints stays out of our output, and what it takes from the import system is put
    back and told, since nobody could be loaded after it. What it adds there stays: its backend may need it later.
    Standard error, filters of warnings and the current folder are put back too, in silence.
    """
    lists: dict[str, list[Any]] = {name: getattr(sys, name) for name in ("path", "meta_path", "path_hooks")}
    entries = {name: list(found) for name, found in lists.items()}
    raised: BaseException | None = None
    try:
        streams = contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(sys.stderr)
        with streams[0], streams[1], warnings.catch_warnings(), _same_folder():
            yield
    except BaseException as error:
        raised = error
    taken = []
    for name, before in entries.items():
        now = getattr(sys, name, None)
        if not isinstance(now, list) or any(entry not in now for entry in before):
            lists[name][:] = before
            setattr(sys, name, lists[name])
            taken.append(f"sys.{name}")
    if taken and not isinstance(raised, KeyboardInterrupt):
        then = "" if raised is None else f"; then: {describe_error(raised)}"
        raise PluginError(f"it removed entries from {' and '.join(taken)}, which were put back{then}") from raised
    if raised is not None:
        raise raised


@contextlib.contextmanager
def _same_folder() -> Iterator[None]:
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = None
    try:
        yield
    finally:
        if folder is not None:
            os.chdir(folder)


def _judge(spec: BackendSpec, source: Source) -> Registered | Broken:
    problem = contract_problem(spec.contract)
    return Registered(spec, source) if problem is None else Broken(spec.name, source, problem, str(spec.contract)[:20])


def _hook_functions(manager: pluggy.PluginManager, plugin: Any, source: Source) -> list[Callable[[], Any]]:
    """The plugin's hook functions, after every check that pluggy leaves out."""
    if inspect.isclass(plugin):
        raise PluginError(f"{source.target} is a class; let the entry point name a module, or an instance of the class")
    functions: list[Callable[[], Any]] = []
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        function = getattr(plugin, attribute)
        _check_hook(options.get("specname") or attribute, function, options)
        functions.append(function)
    if functions:
        return functions
    for name in HOOKS:
        if callable(candidate := getattr(plugin, name, None)):
            raise PluginError(f"{_signature(candidate, name)} is not marked as a hook; put @attnplug.hookimpl above it")
    raise PluginError(
        f"{source.target} has no hookimpl; define attnplug_backends() there, marked @attnplug.hookimpl, "
        "returning a list of BackendSpec"
    )


def _check_hook(hook: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    where = _signature(function)
    if hook not in HOOKS:
        near = difflib.get_close_matches(hook, HOOKS, n=1)
        raise PluginError(
            f"{where} implements a hook that does not exist, so it would never be called; "
            + (f"did you mean {near[0]}?" if near else f"hooks are {', '.join(HOOKS)}")
        )
    if options.get("wrapper") or options.get("hookwrapper"):
        raise PluginError(f"{where} is a hook wrapper; a backend's plugin only returns its own specs")
    names = list(inspect.signature(function).parameters)
    if names:
        raise PluginError(
            f"{where}: parameter {', '.join(names)} would never be filled, with or without a default: "
            f"{hook}() takes none; remove it"
        )


def _specs(function: Callable[[], Any]) -> list[BackendSpec]:
    """Call a hook and insist on its return type, printing the author's signature back."""
    where = _signature(function)
    try:
        result = function()
        if isinstance(result, BackendSpec):
            raise PluginError("it returned one BackendSpec; return a list of them: [spec]")
        if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
            raise PluginError(f"it returned {_brief(result)}; return a list of BackendSpec")
        specs = list(islice(result, MOST_BACKENDS + 1))
        if len(specs) > MOST_BACKENDS:
            raise PluginError(f"it returned more than {MOST_BACKENDS} backends, perhaps without end")
    except Exception as error:
        raise PluginError(f"{where}: {describe_error(error)}{_hint(error)}") from error
    for position, spec in enumerate(specs):
        if type(spec) is not BackendSpec:  # what a subclass changes would run where nobody guards against it
            raise PluginError(f"{where}: it returned {_brief(spec)} at position {position}, not a BackendSpec")
    return specs


def _hint(error: Exception) -> str:
    if isinstance(error, TypeError) and any(cls in str(error) for cls in ("BackendSpec", "Capabilities")):
        return f" (this attnplug speaks contract {CONTRACT_VERSION}; a plugin for another one may use other fields)"
    return ""


def _brief(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}{'…' if len(text) > 60 else ''} ({type(value).__name__})"


def _signature(function: Callable[..., Any], name: str | None = None) -> str:
    """``def name(parameters) (file:line)``, so that an author finds the place at once."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    try:
        signature = str(inspect.signature(function))
    except (TypeError, ValueError):
        signature = "(…)"
    return f"def {name or getattr(function, '__name__', '?')}{signature}{place}"
