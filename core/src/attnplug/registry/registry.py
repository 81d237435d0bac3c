"""Registry of everything that installed plugins provide (D1, D2), and models by reference.

Entry points are the only list of names.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from importlib_metadata import EntryPoint

from attnplug.declare.device import DeviceSpec, Processor
from attnplug.declare.errors import (
    PluginError,
    PluginWarning,
    Refusal,
    RefusalCode,
    Setting,
    UsageError,
    describe_error,
)
from attnplug.declare.installed import factory_refusal
from attnplug.declare.kv_format import BUILT_IN, KVFormat, WorkspaceKind
from attnplug.declare.model import ModelSpec
from attnplug.declare.problem import DType
from attnplug.declare.reading import of_type
from attnplug.declare.spec import Provided, Registered, Source
from attnplug.declare.version import contract_problem
from attnplug.hf.config_keys import TINY, TINY_CONFIGS, ModelConfigError
from attnplug.machine.hardware import CPU, CUDA
from attnplug.registry.loading import Broken, Loaded, canonical_name, find_entry_points, guarded, load_plugin

Claim = TypeVar("Claim", bound=Registered | Provided[Any])

SLOW_SECONDS = 1.0
"""Load time above which a plugin is reported. Loading should take milliseconds."""
ALLOW_VARIABLE = "ATTNPLUG_PLUGINS"
STRICT_VARIABLE = "ATTNPLUG_STRICT"
_CORE = Source("torch_native", "attnplug.torch_native.plugin", "attnplug", "")
CORE_DEVICES = {spec.name: Provided(spec, _CORE) for spec in (CPU, CUDA)}
_MORE = "; 'attnplug plugins' reports the broken plugins, which may provide more"


@dataclass(frozen=True, slots=True)
class Registry:
    """Installed plugins: selectable backends and other items by name, broken plugins, and blocked ones.

    Load it once and pass it on::

        registry = load_registry()
        registry.get("torch_native").spec.capabilities
    """

    backends: Mapping[str, Registered]
    broken: tuple[Broken, ...] = ()
    blocked: tuple[Source, ...] = ()
    unmatched: tuple[str, ...] = ()
    """Names in ``ATTNPLUG_PLUGINS`` that match no installed plugin."""
    slow: Mapping[Source, float] = field(default_factory=dict)
    """Seconds that each slow plugin took to load."""
    strict: bool = False
    """``ATTNPLUG_STRICT`` is set, so any fault of a plugin is an error."""
    kv_formats: Mapping[str, Provided[KVFormat]] = field(default_factory=dict)
    workspace_kinds: Mapping[str, Provided[WorkspaceKind]] = field(default_factory=dict)
    devices: Mapping[str, Provided[DeviceSpec]] = field(default_factory=CORE_DEVICES.copy)
    table_folders: tuple[Provided[Path], ...] = ()
    """Folders of measured tables."""
    tiny_models: Mapping[str, Provided[Mapping[str, object]]] = field(default_factory=dict)

    def get(self, name: str) -> Registered:
        """Return the backend named ``name``.

        Raises PluginError if its plugin is broken, and UsageError, with similar names, if it is blocked or unknown.
        """
        if name in self.backends:
            return self.backends[name]
        if faults := [broken for broken in self.broken if name in (broken.name, broken.source.entry_point)]:
            raise PluginError(f"backend {name!r} is installed but broken:\n" + "\n".join(f"  {f}" for f in faults))
        if barred := [source for source in self.blocked if name == source.entry_point]:
            raise UsageError(
                f"backend {name!r} ({barred[0]}) is blocked because {ALLOW_VARIABLE} does not list it; "
                f"add {barred[0].distribution} to it, or unset it"
            )
        lower = name.lower().replace("-", "_")
        near = [lower] if lower in self.backends else difflib.get_close_matches(lower, self.backends, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise UsageError(
            f"there is no backend {name!r}{hint} Installed: {', '.join(sorted(self.backends)) or 'none'}; "
            "'attnplug backends' reports broken and blocked ones"
        )

    def device(self, name: str) -> DeviceSpec:
        """Return the device type named ``name``. Raises UsageError, with the installed ones, if there is none."""
        if name not in self.devices:
            faults = "".join(f"; {fault}" for fault in self.broken if fault.name == f"device {name}")
            text = f"`{Setting.DEVICE}` {name!r} is no device type; use {', '.join(self.devices)}, without an index"
            raise UsageError(text + (faults or (_MORE if self.broken else "")))
        return self.devices[name].value

    def processors(self, device: str | None) -> tuple[Processor, ...]:
        """Return this machine's devices of one type. If the plugin cannot list them, warn and return none (D2)."""
        if (found := self.devices.get(device or "")) is None:
            return ()
        try:
            with guarded():
                return tuple(of_type("detect", one, Processor, "a Processor") for one in found.value.detect())
        except (Exception, SystemExit) as error:
            text = f"device {device} ({found.source}) is not detected: {describe_error(error)}"
            warnings.warn(text, PluginWarning, stacklevel=2)
            return ()

    def kv_format(self, name: str, setting: str = Setting.KV_DTYPE, holds: str | None = None) -> KVFormat:
        """Return the KV format that a user's spelling names. With ``holds``, it must hold rows of this kind.

        Raises PluginError if several plugins claim the name, and UsageError with the known names if none does.
        """
        known = BUILT_IN | {each: provided.value for each, provided in self.kv_formats.items()}
        found = known.get(name) or known.get(DType.spelled(name) or "")
        if found is not None and (holds is None or holds in found.holds):
            return found
        if faults := [str(broken) for broken in self.broken if broken.name == f"KV format {name}"]:
            raise PluginError(f"`{setting}` {name}: {faults[0]}", settings=[setting])
        names = ", ".join(sorted(each for each, format in known.items() if holds is None or holds in format.holds))
        text = f"`{setting}` {name!r} is not a KV format{f' of {holds} rows' if holds else ''}; use one of {names}"
        raise UsageError(text + (_MORE if self.broken else ""), settings=[setting])

    def raise_if_check_failed(self, refusals: Iterable[tuple[Registered, Sequence[Refusal]]]) -> None:
        """In strict mode, raise a PluginError that lists every backend whose own check raised an exception."""
        if self.strict:
            failed = [(own, one) for own, found in refusals for one in found if one.code == RefusalCode.CHECK_FAILED]
            _raise_faults(dict.fromkeys(f"{own.spec.name} ({own.source}): {one}" for own, one in failed))


def load_registry(
    plugins: Iterable[EntryPoint] | None = None, environment: Mapping[str, str] | None = None
) -> Registry:
    """Load every plugin: ``load_registry().backends["torch_native"]``. By default all installed, with ``os.environ``.

    A broken plugin is recorded in ``Registry.broken``. In strict mode it is a PluginError that lists all broken ones.
    """
    environment = os.environ if environment is None else environment
    points, broken = find_entry_points() if plugins is None else (list(plugins), [])
    sources = ((point, Source.of(point)) for point in points)
    found = sorted(sources, key=lambda each: (each[1].distribution, each[0].name))
    allowed, blocked, unmatched = found, list[Source](), tuple[str, ...]()
    if (setting := environment.get(ALLOW_VARIABLE)) is not None:
        wanted = {canonical_name(name): name.strip() for name in setting.split(",") if name.strip()}
        names = {source: {canonical_name(source.distribution), canonical_name(point.name)} for point, source in found}
        blocked = [source for source, own in names.items() if not source.embedded and own.isdisjoint(wanted)]
        unmatched = tuple(sorted(text for name, text in wanted.items() if name not in set().union(*names.values())))
        allowed = [plugin for plugin in found if plugin[1] not in blocked]
    loaded: list[Loaded] = []
    known: dict[str, Any] = {}
    slow: dict[Source, float] = {}
    for point, source in allowed:
        started = monotonic()
        outcome = load_plugin(point, source, known)
        seconds = monotonic() - started
        if isinstance(outcome, Loaded):
            loaded.append(outcome)
        else:
            broken.append(outcome)
        if seconds > SLOW_SECONDS and not source.embedded:
            slow[source] = seconds
    models = [(name, Provided(config, each.source)) for each in loaded for name, config in each.tiny_models.items()]
    devices = [(spec.name, Provided(spec, plugin.source)) for plugin in loaded for spec in plugin.devices]
    formats = [(format.name, Provided(format, plugin.source)) for plugin in loaded for format in plugin.kv_formats]
    backends: list[tuple[str, Registered]] = []
    for spec, source in ((spec, plugin.source) for plugin in loaded for spec in plugin.backends):
        if (problem := contract_problem(spec.contract, source.distribution)) is None:
            backends.append((spec.name, Registered(spec, source)))
        else:
            broken.append(Broken(spec.name, source, problem, str(spec.contract)[:20]))
    # Plugins that declare equal kinds share one; core's own has priority, because the last one is kept.
    core_last = sorted(loaded, key=lambda plugin: plugin.source.embedded)
    kinds = {kind: Provided(kind, plugin.source) for plugin in core_last for kind in plugin.workspace_kinds}
    kind_title = "the workspace kind {!r} (zeroed by one, not by the other)"
    named_kinds = [(kind.name, provided) for kind, provided in kinds.items()]
    registry = Registry(
        backends=_unique("the name {!r}", "{}", backends, broken),
        kv_formats=_unique("the KV format {!r}", "KV format {}", formats, broken),
        workspace_kinds=_unique(kind_title, "workspace kind {}", named_kinds, broken),
        devices=_unique("the device {!r}", "device {}", devices, broken),
        table_folders=tuple(Provided(folder, plugin.source) for plugin in loaded for folder in plugin.rankings),
        tiny_models=_unique("the name 'tiny:{}'", "tiny:{}", models, broken),
        broken=tuple(broken),
        blocked=tuple(blocked),
        unmatched=unmatched,
        slow=slow,
        strict=(environment.get(STRICT_VARIABLE) or "").strip().lower() not in ("", "0", "false", "no", "off"),
    )
    if registry.strict:
        faults = [str(fault) for fault in registry.broken]
        faults += [f"{ALLOW_VARIABLE} lists {name!r}, which matches no installed plugin" for name in unmatched]
        missing = [(own, factory_refusal(own.spec.factory)) for own in registry.backends.values()]
        faults += [f"{own.spec.name} ({own.source}): {refusal}" for own, refusal in missing if refusal is not None]
        _raise_faults(faults)
    return registry


@lru_cache
def installed_format(name: str) -> KVFormat:
    """Return core's or a plugin's KV format: ``installed_format("nvfp4")``. Raises as ``Registry.kv_format``."""
    return BUILT_IN[name] if name in BUILT_IN else load_registry().kv_format(name)


def _raise_faults(faults: Collection[str]) -> None:
    if faults:
        raise PluginError(f"{STRICT_VARIABLE} is set and plugins are broken:\n" + "\n".join(f"  {f}" for f in faults))


def _unique(title: str, label: str, claims: Iterable[tuple[str, Claim]], broken: list[Broken]) -> dict[str, Claim]:
    """Return the items by name. If several have one name, core keeps its own, and the others go to ``broken`` (D2).

    ``title`` and ``label`` are format strings for the name: in the error's text, and as the name of the broken item.
    """
    by_name: dict[str, list[Claim]] = {}
    for name, claim in claims:
        by_name.setdefault(name, []).append(claim)
    unique: dict[str, Claim] = {}
    for name, claimants in sorted(by_name.items()):
        embedded = [claimant for claimant in claimants if claimant.source.embedded]
        keeper = next((group[0] for group in (embedded, claimants) if len(group) == 1), None)
        if keeper is not None:
            unique[name] = keeper
        owners = [f"{claimant.source} (entry point {claimant.source.entry_point})" for claimant in claimants]
        error = f"{title.format(name)} is claimed by {' and '.join(owners)}"
        if len(set(owners)) == 1:
            used = f"{title.format(name)} is used {len(owners)} times by {owners[0]}"
            error = f"{used}, so none of them is available; keep one"
        elif keeper is not None:
            error += "; attnplug's own keeps it; uninstall the other, or give it another name"
        else:
            error += f", so neither is used; uninstall one, or name the one to keep in {ALLOW_VARIABLE}"
        for one in claimants:
            if one is not keeper:
                contract = one.spec.contract if isinstance(one, Registered) else None
                broken.append(Broken(label.format(name), one.source, error, contract))
    return unique


def load_model(reference: str, registry: Registry | None = None) -> ModelSpec:
    """Read a model's config. ``reference`` is ``tiny:NAME``, a ``config.json`` or the folder that contains one.

    Raises ModelConfigError for anything that cannot be read. ``registry`` defaults to the installed plugins. Example::

        load_model("tiny:deepseek_v3").layers[0].mla
    """
    from attnplug.hf.model_config import model_from_config, read_model  # not at the top: start-up without it is faster

    if reference.startswith(TINY):
        return model_from_config(tiny_config(reference, registry), reference)
    return read_model(reference)


def tiny_config(reference: str, registry: Registry | None = None) -> Mapping[str, object]:
    """Return the config of ``tiny:NAME``. Raises ModelConfigError with the known names."""
    name = reference.removeprefix(TINY)
    if registry is None:
        if name in TINY_CONFIGS:  # core keeps its names, so no plugin needs to be loaded
            return TINY_CONFIGS[name]
        registry = load_registry()
    if name in registry.tiny_models:
        return registry.tiny_models[name].value
    if faults := [str(fault) for fault in registry.broken if fault.name == reference]:
        raise PluginError(f"the model {reference!r} cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))
    near = difflib.get_close_matches(name, registry.tiny_models, n=2)
    meant = f"did you mean {' or '.join(TINY + match for match in near)}? " if near else ""
    known = ", ".join(TINY + known for known in registry.tiny_models) + (_MORE if registry.broken else "")
    raise ModelConfigError(f"{reference!r} is not a built-in model; {meant}known: {known}", reference)
