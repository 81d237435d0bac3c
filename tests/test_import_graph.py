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
FACES = {"attnplug", "attnplug.host"}


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
        if name not in (package.name, "attnplug.host")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


INTERNAL = ("attnplug", "attnplug_testing")  # pins core's exact version, and is never published


@pytest.mark.parametrize(
    "package", [path for path in PACKAGES if path.name not in INTERNAL], ids=lambda path: path.name
)
def test_nobody_imports_deeper_than_a_face(package):
    for path in package.rglob("*.py"):
        deep = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - FACES
        assert not deep, f"{path.relative_to(ROOT)} imports {sorted(deep)}"


def test_nor_do_benchmarks_examples_and_documents():
    for folder in ("benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            deep = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - FACES
            assert not deep, f"{path.relative_to(ROOT)} imports {sorted(deep)}"
