"""Finding plugins and loading them, one at a time, each isolated from the others (D2).

Hooks are called through pluggy, with one plugin registered at a time. pluggy's own loader stops at the first broken
plugin, skips a second one of the same name, never calls a misspelled hook and never fills an argument with a default,
all in silence. Each of these is an error here, reported with the plugin's distribution and version and its author's own
signature.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import importlib_metadata as metadata
import pluggy
from importlib_metadata import EntryPoint

from attnplug.choose import plugin_hooks
from attnplug.declare.errors import PluginError, describe_error
from attnplug.declare.registered import Source, distribution_identity
from attnplug.declare.spec import BackendSpec
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.declare.workspace_kind import WorkspaceKind

GROUP = "attnplug.plugins"
MOST_ITEMS = 1000
"""The most items of one hook. An endless generator must not hang whoever lists backends."""
HOOKS = tuple(name for name in vars(plugin_hooks) if name.startswith("attnplug_"))

Item = TypeVar("Item")
Result = TypeVar("Result")


def normal(distribution: str) -> str:
    """A distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one plugin brings, hook by hook."""

    source: Source
    backends: Sequence[BackendSpec]
    workspace_kinds: Sequence[WorkspaceKind]
    table_folders: Sequence[Path]
    tiny_models: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Broken:
    """A plugin, or one thing that it brings, that cannot be used. ``name`` is the backend's, if it is known."""

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
        name, version = distribution_identity(distribution)
        try:
            for point in distribution.entry_points.select(group=group):
                points.setdefault((name, point.name), point)  # the first on the path is the one that is imported
        except Exception as error:
            source = Source("", "entry_points.txt", name, version)
            broken.append(Broken(name, source, f"its entry points cannot be read: {describe_error(error)}"))
    return list(points.values()), broken


def new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(plugin_hooks.PROJECT)
    manager.add_hookspecs(plugin_hooks)
    return manager


def load_plugin(
    manager: pluggy.PluginManager, point: EntryPoint, source: Source, known: dict[str, Any]
) -> Loaded | Broken:
    """What one plugin brings, or what is wrong with it. Raises nothing but an interrupt, which names the plugin.

    No plugin is registered with ``manager``, before or after. A broken plugin may leave anything there, so another
    manager is needed after it. ``known`` holds the plugins that were loaded before, by distribution and entry point.
    """
    name = f"{source.distribution}:{source.entry_point}"
    try:
        with guarded():
            plugin = load_entry_point(point)
            _check_hooks(manager, plugin, source)
            if before := [other for other, one in known.items() if one is plugin]:
                raise PluginError(
                    f"{source.target} is loaded already, by entry point {before[0]}; remove one of the two"
                )
            known[name] = plugin
            manager.register(plugin, name)
            loaded = Loaded(
                source,
                _call(manager.hook.attnplug_backends, partial(_items, BackendSpec), ()),
                _call(manager.hook.attnplug_workspace_kinds, partial(_items, WorkspaceKind), ()),
                _call(manager.hook.attnplug_rankings, _folders, ()),
                _call(manager.hook.attnplug_tiny_models, _models, {}),
            )
            if not (loaded.backends or loaded.workspace_kinds or loaded.table_folders or loaded.tiny_models):
                raise PluginError("it brings nothing: its hooks returned nothing")
            manager.unregister(plugin)
            return loaded
    except KeyboardInterrupt as error:
        # Either the user, who wants to know what took so long, or the plugin itself: Python cannot tell them apart.
        raise KeyboardInterrupt(f"while loading plugin {source.entry_point} ({source})") from error
    except BaseException as error:  # plugins raise anything: SystemExit, types of their own
        return Broken(source.entry_point, source, describe_error(error))


def load_entry_point(point: EntryPoint) -> Any:
    """What an entry point leads to. Raises whatever the imported module raises, so call it ``guarded``."""
    if point.pattern.match(point.value) is None:
        raise PluginError(f"its entry point leads to {point.value!r}; write 'package.module'")
    return point.load()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """For running foreign code: what it prints stays out of our output. What it removes from the import system is put
    back and reported, because otherwise nothing could be loaded after it. What it adds there stays: its backend may
    need it later. Standard error, warning filters and the current folder are put back too, in silence."""
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
    except OSError:  # the folder was deleted
        folder = None
    try:
        yield
    finally:
        if folder is not None:
            os.chdir(folder)


def _check_hooks(manager: pluggy.PluginManager, plugin: Any, source: Source) -> None:
    """The checks of a plugin's hooks that pluggy leaves out."""
    if inspect.isclass(plugin):
        raise PluginError(f"{source.target} is a class; let the entry point name a module, or an instance of the class")
    found: dict[str, Callable[..., Any]] = {}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in HOOKS and callable(candidate := getattr(plugin, attribute)):
                where = _signature(candidate, attribute)
                raise PluginError(f"{where} is not marked as a hook; put @attnplug.hookimpl above it")
            continue
        hook, function = options.get("specname") or attribute, getattr(plugin, attribute)
        _check_hook(hook, function, options)
        if hook in found:
            both = f"{_signature(found[hook])} and {_signature(function)}"
            raise PluginError(f"{both} both implement {hook}; let one return what both do")
        found[hook] = function
    if not found:
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
        raise PluginError(f"{where} is a hook wrapper; a plugin only returns what it brings itself")
    names = list(inspect.signature(function).parameters)
    if names:
        raise PluginError(
            f"{where}: parameter {', '.join(names)} would never be filled, with or without a default: "
            f"{hook}() takes none; remove it"
        )


def _call(hook: pluggy.HookCaller, read: Callable[[Any], Result], nothing: Any) -> Result:
    """Call a plugin's hook and read what it returns, ``nothing`` if it has no such hook.

    An error shows the author's signature.
    """
    implementations = hook.get_hookimpls()
    if not implementations:
        return read(nothing)
    try:
        return read(next(iter(hook()), None))  # one implementation; pluggy drops a None
    except Exception as error:
        where = _signature(implementations[0].function)
        raise PluginError(f"{where}: {describe_error(error)}{_hint(error)}") from error


def _items(item: type[Item], result: Any) -> list[Item]:
    """The result of a hook that returns a list."""
    name = item.__name__
    if isinstance(result, item):
        raise PluginError(f"it returned one {name}; return a list of them, even of one")
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise PluginError(f"it returned {_brief(result)}; return a list of {name}")
    items = list(islice(result, MOST_ITEMS + 1))
    if len(items) > MOST_ITEMS:
        raise PluginError(f"it returned more than {MOST_ITEMS} items, perhaps without end")
    for position, one in enumerate(items):
        if type(one) is not item:  # a subclass's own code would run unguarded
            raise PluginError(f"it returned {_brief(one)} at position {position}, not a {name}")
    return items


def _folders(result: Any) -> list[Path]:
    """Read the result of ``attnplug_rankings``."""
    wanted = "return a list of folders: [Path(__file__).parent / 'tables']"
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise PluginError(f"it returned {_brief(result)}; {wanted}")
    folders = list(islice(result, MOST_ITEMS))
    for position, folder in enumerate(folders):
        if type(folder) is not type(Path()):  # a subclass's own code would run unguarded
            raise PluginError(f"it returned {_brief(folder)} at position {position}, not a Path; {wanted}")
        if not folder.is_dir():
            raise PluginError(f"it returned {folder}, which is not a folder; {wanted}")
    return folders


def _models(result: Any) -> dict[str, Mapping[str, object]]:
    """The result of ``attnplug_tiny_models``, as plain copies."""
    if not isinstance(result, Mapping):
        raise PluginError(f"it returned {_brief(result)}; return a dict of configs by name: {{'acme': {{…}}}}")
    models = {}
    for name, config in result.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise PluginError(f"tiny model {name!r} must be named by letters, digits, '_', '-' and '.'")
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            raise PluginError(
                f"tiny model {name!r} is {_brief(config)}; give the dict of its config.json, model_type too"
            )
        try:
            models[name] = json.loads(json.dumps(dict(config)))
        except (TypeError, ValueError) as error:
            raise PluginError(f"tiny model {name!r} holds what a config.json cannot: {error}") from error
    return models


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
