"""Hook specifications, and the discovery and loading of plugins, each isolated from the others (D2).

Errors in code of other packages name the package at fault.

Each hook is called once per plugin, when the plugin is loaded. A plugin implements the ones it needs. The module that
implements them must import neither torch nor a kernel library, because ``attnplug backends`` loads every plugin. An
invalid result is reported with the plugin's distribution, and the whole plugin is left out. Example::

    @attnplug.hookimpl
    def attnplug_backends():
        return [BackendSpec(name="my_backend", factory="my_package.backend:MyBackend", ...)]

A plugin marks its hooks with pluggy's decorator, but pluggy neither loads nor calls them. Its loader stops at the first
broken plugin, skips a second one of the same name, never calls a misspelled hook and never fills an argument with a
default, all silently. Here each of these is an error, reported with the plugin's distribution, version and signature.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # 'signal' would take 2 ms to import
import contextlib
import difflib
import inspect
import io
import json
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NoReturn, TypeVar

import importlib_metadata as metadata
import pluggy
from importlib_metadata import EntryPoint

from attnplug.declare.device import DeviceSpec
from attnplug.declare.errors import AttnplugError, BackendError, PluginError, describe_error
from attnplug.declare.installed import requirement_refusal
from attnplug.declare.kv_format import KVFormat, WorkspaceKind
from attnplug.declare.spec import BackendSpec, Registered, Source, distribution_identity
from attnplug.declare.version import CONTRACT_VERSION


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Isolate the process from code of other packages. Exceptions propagate.

    - Output to stdout goes to stderr.
    - ``os._exit`` raises SystemExit. It would end the process without a word about the package that called it.
    - Entries removed from the import system are restored and reported by a PluginError, because otherwise nothing could
      be imported afterwards. Added entries stay, because a plugin's backend may need them later.
    - Closed standard streams, removed environment variables, warning filters, the current directory and handlers of
      SIGINT and SIGTERM are restored silently.
    """
    lists: dict[str, list[Any]] = {name: getattr(sys, name) for name in ("path", "meta_path", "path_hooks")}
    entries = {name: list(found) for name, found in lists.items()}
    raised: BaseException | None = None
    try:
        with _same_streams(), _same_settings(), warnings.catch_warnings():
            yield
    except BaseException as error:
        raised = error
    removed = []
    for name, before in entries.items():
        now = getattr(sys, name, None)
        if not isinstance(now, list) or any(entry not in now for entry in before):
            lists[name][:] = before
            setattr(sys, name, lists[name])
            removed.append(f"sys.{name}")
    if removed and not isinstance(raised, KeyboardInterrupt):
        then = "" if raised is None else f"; then: {describe_error(raised)}"
        raise PluginError(f"it removed entries from {' and '.join(removed)}, which were restored{then}") from raised
    if raised is not None:
        raise raised


class _Unclosable:
    """A stream that other packages can use, but not close."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close(self) -> None: ...


@contextlib.contextmanager
def _same_streams() -> Iterator[None]:
    """Redirect stdout to stderr. Reopen standard streams and their file descriptors if they are closed inside."""
    found = enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__))
    streams = {fd: stream for fd, stream in found if isinstance(stream, io.TextIOWrapper)}
    settings = {fd: (one.encoding, one.errors, None, one.line_buffering) for fd, one in streams.items()}
    copies: dict[int, int] = {}
    for fd in range(3):
        with contextlib.suppress(OSError):  # closed already
            copies[fd] = os.dup(fd)
    errors: Any = _Unclosable(sys.stderr)
    try:
        with contextlib.redirect_stdout(errors), contextlib.redirect_stderr(errors):
            yield
    finally:
        for fd, copy in copies.items():
            with contextlib.suppress(OSError):  # the copy has been closed, too
                os.dup2(copy, fd)
                os.close(copy)
        for fd, stream in streams.items():
            try:
                stream.writable()
            except ValueError:  # closed or detached; initialized in place, because others refer to the object
                file = open(fd, "wb" if fd else "rb", closefd=False)  # noqa: SIM115 - open as long as the process runs
                stream.__init__(file, *settings[fd])  # type: ignore[misc]


@contextlib.contextmanager
def _same_settings() -> Iterator[None]:
    """Restore removed variables, the current directory and signal handlers, and let ``os._exit`` raise SystemExit.

    A forked child process exits as it asks to.
    """
    variables = os.environ._data.copy()  # type: ignore[attr-defined]  # encoded; decoding them all would take 60 µs
    handlers = {number: _signal.getsignal(number) for number in (_signal.SIGINT, _signal.SIGTERM)}
    end, processes = os._exit, {os.getpid()}

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() in processes:
            raise SystemExit(f"os._exit({status})")
        end(status)

    os._exit = raise_exit
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # deleted
            undo.callback(os.chdir, os.getcwd())
        try:
            yield
        finally:
            processes.clear()  # a package that kept the function can exit later
            os._exit = end
            for name in variables.keys() - os.environ._data.keys():  # type: ignore[attr-defined]
                os.environ[os.fsdecode(name)] = os.fsdecode(variables[name])
            for number, handler in handlers.items():
                if handler is not None and _signal.getsignal(number) is not handler:
                    with contextlib.suppress(ValueError):  # not the main thread
                        _signal.signal(number, handler)


class BuildError(BackendError):
    """A selected backend could not be built. ``backend`` is its registration, with the plugin's distribution."""

    def __init__(self, backend: Registered, error: AttnplugError) -> None:
        super().__init__(f"backend {backend.spec.name} ({backend.source}): {error.message}", settings=error.settings)
        self.backend = backend
        self.exit_code = error.exit_code  # that of a UsageError if the backend refuses its options


@contextlib.contextmanager
def attributed_to(backend: Registered, failure: str) -> Iterator[None]:
    """Raise any exception of a plugin's code as a BuildError. Kernel libraries do anything."""
    try:
        with guarded():
            yield
    except (BuildError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, AttnplugError) or isinstance(error, PluginError):  # which do not know the backend
            raise BuildError(backend, BackendError(f"{failure}: {describe_error(error)}")) from error
        raise BuildError(backend, error) from error


PROJECT = "attnplug"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator of a plugin's hooks: ``@hookimpl`` above ``def attnplug_backends()``."""


@hookspec
def attnplug_backends() -> Iterable[BackendSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the specs of this plugin's backends.

    The factory named in a spec is imported only when the backend is built. Backend names are unique: if two plugins
    claim one, neither gets it, and the error names both. Core keeps its own names.
    """


@hookspec
def attnplug_kv_formats() -> Iterable[KVFormat]:  # type: ignore[empty-body] # a hookspec has none
    """Return the KV cache formats that this plugin provides. A host's setting ``kv_dtype`` requests one by name.

    ``torch_native`` serves every format by its codec. Backends with kernels claim formats by name. Names are unique, as
    those of backends are.
    """


@hookspec
def attnplug_workspace_kinds() -> Iterable[WorkspaceKind]:  # type: ignore[empty-body] # a hookspec has none
    """Return the kinds of workspace memory that this plugin's kernels need, beyond ``attnplug.SCRATCH``.

    Plugins with equal kinds share memory. One name with different contracts is an error that names both plugins.
    """


@hookspec
def attnplug_devices() -> Iterable[DeviceSpec]:  # type: ignore[empty-body] # a hookspec has none
    """Return the torch device types that this plugin supports. Their names are unique, as those of backends are."""


@hookspec
def attnplug_rankings() -> Iterable[Path]:  # type: ignore[empty-body] # a hookspec has none
    """Return folders with measured tables, by which ``auto`` ranks this plugin's backends or others.

    A folder is read when ``auto`` chooses, not when the plugin is loaded. It holds the files that ``attnplug tune``
    writes, named after the device: ``nvidia-h200.json``. If two plugins ship a table for the same backend, role, layer
    shape and device, neither is used and a warning names both files.
    """


@hookspec
def attnplug_tiny_models() -> Mapping[str, Mapping[str, object]]:  # type: ignore[empty-body] # a hookspec has none
    """Return Hugging Face configs of tiny models by name, as ``config.json`` would hold them.

    ``tiny:NAME`` is then a model with random weights, like core's own. The engine's tokens for it are ASCII characters,
    so ``vocab_size`` must be at least 128. Names are unique, as those of backends are.
    """


GROUP = "attnplug.plugins"
MAX_ITEMS = 1000
"""Maximum number of items that a hook may return. An endless generator must not hang ``attnplug backends``."""

Item = TypeVar("Item")


def canonical_name(distribution: str) -> str:
    """Normalize a distribution's name as pip does for comparison."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Items provided by one plugin, one field per hook: ``attnplug_backends`` fills ``backends``."""

    source: Source
    backends: Sequence[BackendSpec] = ()
    kv_formats: Sequence[KVFormat] = ()
    workspace_kinds: Sequence[WorkspaceKind] = ()
    devices: Sequence[DeviceSpec] = ()
    rankings: Sequence[Path] = ()
    tiny_models: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """A plugin, or one of its items, that cannot be used. ``name`` is the backend's name if known."""

    name: str
    source: Source
    error: str
    contract: str | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.source}): {self.error}"


def find_entry_points(group: str = GROUP) -> tuple[list[EntryPoint], list[Broken]]:
    """Find every entry point of a group, by default all plugins, and installations that cannot be read."""
    with contextlib.suppress(Exception):  # one damaged installation fails the whole call
        return list(metadata.entry_points(group=group)), []
    points: dict[tuple[str, str], EntryPoint] = {}
    broken: list[Broken] = []
    for distribution in metadata.distributions():
        name, version = distribution_identity(distribution)
        try:
            for point in distribution.entry_points.select(group=group):
                points.setdefault((name, point.name), point)  # the first one on sys.path is imported
        except Exception as error:
            source = Source("", "entry_points.txt", name, version)
            broken.append(Broken(name, source, f"its entry points cannot be read: {describe_error(error)}"))
    return list(points.values()), broken


def load_plugin(point: EntryPoint, source: Source, known: dict[str, Any]) -> Loaded | Broken:
    """Import a plugin and call its hooks. Raises only KeyboardInterrupt; any other fault is returned.

    ``known`` holds the plugins loaded so far, by distribution and entry point. This one is added to it.
    """
    try:
        with guarded():
            plugin = load_entry_point(point)
            hooks = _implementations(plugin, source)
            for name, other in known.items():
                if other is plugin:
                    raise PluginError(f"{source.target} is already loaded by entry point {name}; remove one of the two")
            known[f"{source.distribution}:{source.entry_point}"] = plugin
            results = {hook.removeprefix("attnplug_"): _call(hook, function) for hook, function in hooks.items()}
            if not any(results.values()):
                raise PluginError("it provides nothing: all of its hooks returned nothing")
            return Loaded(source, **results)
    except KeyboardInterrupt as error:
        # The interrupt is the user's, or raised by the plugin: Python cannot distinguish them.
        raise KeyboardInterrupt(f"while loading plugin {source.entry_point} ({source})") from error
    except BaseException as error:  # plugins raise anything: SystemExit, types of their own
        text = describe_error(error)
        # A plugin for a newer contract may fail before its ``contract`` is read, on a name or field that is not here.
        with contextlib.suppress(Exception):  # whatever reading damaged metadata raises
            requires = (point.dist and point.dist.requires) or ()
            unmet = map(requirement_refusal, (one for one in requires if re.match(r"attnplug(?![\w.-])", one)))
            text += "".join(
                f"; it {refusal.message}; run: {refusal.advice}" for refusal in unmet if refusal is not None
            )
        return Broken(source.entry_point, source, text)


def load_entry_point(point: EntryPoint) -> Any:
    """Import an entry point's target. Raises whatever the imported module raises, so call it ``guarded``."""
    if point.pattern.match(point.value) is None:
        raise PluginError(f"the entry point's target is {point.value!r}; write 'package.module'")
    # If native code crashes the process, all that a user sees is faulthandler's stack. A frame of it names the plugin.
    load = (lambda: point.load()).__code__.replace(co_name=f"loading {point.name} ({Source.of(point)})")
    return FunctionType(load, {}, closure=(CellType(point),))()


@contextlib.contextmanager
def attributed(kind: str, point: EntryPoint) -> Iterator[None]:
    """Run code of another package's entry point, guarded. Any error becomes a PluginError that names it."""
    source = Source.of(point)
    try:
        with guarded():
            yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while loading {kind} {point.name} ({source})") from error
    except BaseException as error:
        text = f"{kind} {point.name!r} ({source}, {point.value}) cannot be loaded: {describe_error(error)}"
        raise PluginError(text) from error


def _implementations(plugin: Any, source: Source) -> dict[str, Callable[[], Any]]:
    """Return a plugin's hook implementations by hook. Raises PluginError for mistakes that pluggy ignores."""
    if inspect.isclass(plugin):
        raise PluginError(f"{source.target} is a class; let the entry point name a module, or an instance of the class")
    found: dict[str, Callable[[], Any]] = {}
    for attribute in dir(plugin):
        options = _MANAGER.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in _READERS and callable(candidate := getattr(plugin, attribute)):
                where = _signature(candidate, attribute)
                raise PluginError(f"{where} is not marked as a hook; put @attnplug.hookimpl above it")
            continue
        hook, function = options.get("specname") or attribute, getattr(plugin, attribute)
        where = _signature(function)
        if hook not in _READERS:
            near = difflib.get_close_matches(hook, _READERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"hooks are {', '.join(_READERS)}"
            raise PluginError(f"{where} implements an unknown hook, which would never be called; {hint}")
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"{where} is a hook wrapper; a plugin may only return its own items")
        if names := ", ".join(inspect.signature(function).parameters):
            raise PluginError(f"{where}: {hook}() takes no arguments, so {names} would never be passed; remove it")
        if hook in found:
            raise PluginError(f"{_signature(found[hook])} and {where} both implement {hook}; merge them into one")
        found[hook] = function
    if not found:
        raise PluginError(
            f"{source.target} has no hookimpl; define attnplug_backends() there, marked @attnplug.hookimpl, "
            "returning a list of BackendSpec"
        )
    return found


def _call(hook: str, function: Callable[[], Any]) -> Any:
    """Call a hook and validate its result. Errors show the author's signature."""
    try:
        return _READERS[hook](function())
    except Exception as error:
        hint = ""
        if isinstance(error, TypeError) and any(cls in str(error) for cls in ("BackendSpec", "Capabilities")):
            hint = f" (this attnplug has contract {CONTRACT_VERSION}; a plugin for another one may use other fields)"
        raise PluginError(f"{_signature(function)}: {describe_error(error)}{hint}") from error


def _items(item: type[Item], result: Any, wanted: str = "") -> list[Item]:
    """Validate the result of a hook that returns a list. ``wanted`` describes its items, by default their class."""
    name = "Path" if issubclass(item, Path) else item.__name__  # its class depends on the platform
    if isinstance(result, item):
        raise PluginError(f"returned one {name}; return a list, even of one")
    if isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise PluginError(f"returned {_brief(result)}; return a list of {wanted or name}")
    items = list(islice(result, MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise PluginError(f"returned more than {MAX_ITEMS} items; the generator may be endless")
    for position, one in enumerate(items):
        if type(one) is not item:  # a subclass's own code would run unguarded
            raise PluginError(f"returned {_brief(one)} at position {position}, not a {name}")
    return items


def _folders(result: Any) -> list[Path]:
    """Validate the result of ``attnplug_rankings``."""
    folders = _items(type(Path()), result, "folders: [Path(__file__).parent / 'tables']")
    for folder in folders:
        if not folder.is_dir():
            raise PluginError(f"returned {folder}, which is not a folder")
    return folders


def _models(result: Any) -> dict[str, Mapping[str, object]]:
    """Validate the result of ``attnplug_tiny_models``. Returns plain copies."""
    if not isinstance(result, Mapping):
        raise PluginError(f"returned {_brief(result)}; return a dict of configs by name: {{'acme': {{…}}}}")
    models = {}
    for name, config in result.items():
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise PluginError(f"the name of tiny model {name!r} must consist of letters, digits, '_', '-' and '.'")
        if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
            raise PluginError(
                f"tiny model {name!r} is {_brief(config)}; return its config.json as a dict, with model_type"
            )
        try:
            models[name] = json.loads(json.dumps(dict(config)))
        except (TypeError, ValueError) as error:
            raise PluginError(f"tiny model {name!r} has a value that a config.json cannot have: {error}") from error
    return models


_MANAGER = pluggy.PluginManager(PROJECT)
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "attnplug_backends": partial(_items, BackendSpec),
    "attnplug_kv_formats": partial(_items, KVFormat),
    "attnplug_workspace_kinds": partial(_items, WorkspaceKind),
    "attnplug_devices": partial(_items, DeviceSpec),
    "attnplug_rankings": _folders,
    "attnplug_tiny_models": _models,
}
"""Functions that validate what a hook returned, by hook."""


def _brief(value: object) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def _signature(function: Callable[..., Any], name: str | None = None) -> str:
    """Format a function as ``def name(parameters) (file:line)`` for error messages."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    try:
        signature = str(inspect.signature(function))
    except (TypeError, ValueError):
        signature = "(…)"
    return f"def {name or getattr(function, '__name__', '?')}{signature}{place}"
