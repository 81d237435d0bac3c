"""Fabricated plugins: plugin objects, their entry points, and a fixture that loads one between good ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from importlib_metadata import EntryPoint

from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl
from attnplug.declare.installed import installed_version
from attnplug.declare.version import CONTRACT_VERSION
from attnplug.host import load_registry
from attnplug.registry.loading import GROUP, Broken, find_entry_points

CAPABILITIES = Capabilities(
    kinds=frozenset({AttentionKind.MHA}), devices=frozenset({"cpu"}), dtypes=frozenset({DType.FLOAT32})
)


class Distribution(NamedTuple):
    """The part of an entry point's distribution that a registry reads."""

    name: str | None
    version: str | None
    requires: tuple[str, ...] = ()

    def read_text(self, file: str) -> str | None:
        lines = [("Name", self.name), ("Version", self.version)]
        return "".join(f"{key}: {value}\n" for key, value in lines if value is not None) if file == "METADATA" else None


def entry_point(
    name: str, target: str, distribution: str | None, version: str | None, requires: tuple[str, ...] = ()
) -> EntryPoint:
    """Return the entry point of a plugin as an installed distribution would have it."""
    owner = Distribution(distribution, version, requires)
    made: EntryPoint = EntryPoint(name, target, GROUP)._for(owner)  # type: ignore[no-untyped-call]
    return made


EMBEDDED = entry_point("torch_native", "attnplug.torch_native.plugin", "attnplug", installed_version("attnplug"))
"""Core's own plugin, as its installation has it."""


def spec(name: str = "fast", **changes: Any) -> BackendSpec:
    fields = {
        "name": name,
        "summary": "a backend of a test",
        "contract": CONTRACT_VERSION,
        "factory": "attnplug:nothing",
        "capabilities": CAPABILITIES,
    }
    return BackendSpec(**{**fields, **changes})


def module(**members: object) -> ModuleType:
    plugin = ModuleType("plugin")
    vars(plugin).update(members)
    return plugin


def bringing(*specs: BackendSpec) -> ModuleType:
    """Return a valid plugin with these backends."""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return list(specs)

    return module(attnplug_backends=attnplug_backends)


def also(plugin: ModuleType, **returned: object) -> ModuleType:
    """Add hooks to a plugin, each with its return value: ``also(plugin, attnplug_tiny_models={})``."""
    for hook, result in returned.items():
        setattr(plugin, hook, _returning(hook, result))
    return plugin


def _returning(hook: str, result: object) -> Callable[[], object]:
    @hookimpl(specname=hook)
    def implementation() -> object:
        return result

    return implementation


Install = Callable[..., EntryPoint]


@pytest.fixture(autouse=True)
def core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide our own plugins. A test finds core and what the test itself installs."""

    def find() -> tuple[list[EntryPoint], list[Broken]]:
        points, broken = find_entry_points()
        return [point for point in points if not point.value.startswith("attnplug_")], broken

    monkeypatch.setattr("attnplug.registry.registry.find_entry_points", find)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that fabricates the entry point of a plugin object."""

    def make(
        plugin: object, name: str = "fast", distribution: str | None = "fast-attention", version: str | None = "1.2.3"
    ) -> EntryPoint:
        home = f"plugin_{name}_of_{distribution}".replace("-", "_").replace(".", "_")
        monkeypatch.setitem(sys.modules, home, module(plugin=plugin))
        return entry_point(name, f"{home}:plugin", distribution, version)

    return make


@pytest.fixture
def install_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that fabricates the entry point of a module with given source."""
    monkeypatch.syspath_prepend(tmp_path)
    made: list[str] = []

    def make(source: str, requires: tuple[str, ...] = ()) -> EntryPoint:
        home = f"plugin_source_{len(made)}"
        (tmp_path / f"{home}.py").write_text(source)
        made.append(home)
        return entry_point("fast", home, "fast-attention", "1.2.3", requires)

    yield make
    for home in made:
        sys.modules.pop(home, None)


@pytest.fixture
def only_fault(install: Install) -> Callable[[EntryPoint], Broken]:
    """Load a bad plugin between two good ones and return its one fault; both good ones must load (D2)."""

    def load(point: EntryPoint) -> Broken:
        before = install(bringing(spec("before")), "before", "a-first")
        behind = install(bringing(spec("behind")), "behind", "z-last")
        registry = load_registry([before, point, behind], {})
        assert set(registry.backends) == {"before", "behind"}
        (fault,) = registry.broken
        assert (fault.source.distribution, fault.source.version) == ("fast-attention", "1.2.3")
        assert "fast-attention 1.2.3" in str(fault)
        return fault

    return load


def place(function: Callable[..., Any]) -> str:
    """Source location of a function, as error messages give it."""
    function = getattr(function, "__func__", function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
