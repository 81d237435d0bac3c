"""How the packages are wired: no cycles, and nobody imports deeper than a face."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("*/src/*/__init__.py")) + sorted(
    path.parent for path in ROOT.glob("*/*/src/*/__init__.py")
)
FOR_AUTHORS = {f"attnplug{name}" for name in ("", ".kernels", ".linear", ".sparse", ".tables")}
FACES = FOR_AUTHORS | {"attnplug.host"}


@cache
def imports_of(path: Path) -> set[str]:
    """Every module that a file imports or imports from, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {str(node.module)}
    return found


def modules_of(package: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_there_is_no_import_cycle(package):
    """Not even inside functions or for type checking. A package that is a table of contents is left out."""
    modules = modules_of(package)
    graph = {
        name: {imported for imported in imports_of(path) if imported in modules and imported != package.name}
        for name, path in modules.items()
        if name not in FACES | {package.name}
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


@pytest.mark.parametrize("package", [path for path in PACKAGES if path.name != "attnplug"], ids=lambda path: path.name)
def test_nobody_imports_deeper_than_a_face(package):
    for path in package.rglob("*.py"):
        deep = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - FACES
        assert not deep, f"{path.relative_to(ROOT)} imports {sorted(deep)}"


@pytest.mark.parametrize("plugin", sorted(ROOT.glob("plugins/*/src")), ids=lambda path: path.parent.name)
def test_a_plugin_imports_only_what_core_offers_to_authors(plugin: Path) -> None:
    """A plugin stands for a third party's package: it serves hosts and is none."""
    for path in plugin.rglob("*.py"):
        names = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if "attnplug.host.RawScene" in names:  # until it is exported by attnplug.tables
            continue
        internal = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - FOR_AUTHORS
        assert not internal, f"{path.relative_to(ROOT)} imports {sorted(internal)}"


def test_nor_do_benchmarks_examples_and_documents():
    for folder in ("benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            deep = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - FACES
            assert not deep, f"{path.relative_to(ROOT)} imports {sorted(deep)}"
