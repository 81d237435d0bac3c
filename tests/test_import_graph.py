"""Imports between packages: no cycles, and third parties' code imports only public modules."""

from __future__ import annotations

from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from import_statements import imports_of

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("*/src/*/__init__.py")) + sorted(
    path.parent for path in ROOT.glob("*/*/src/*/__init__.py")
)
TOGETHER = {"attnplug", "attnplug_conformance", "attnplug_engine", "attnplug_testing", "attnplug_tune"}
"""Released together with core, whose exact version they pin. They may import its internals."""
AUTHOR = {"attnplug", "attnplug.kernels", "attnplug.linear", "attnplug.sparse", "attnplug.tables"}
"""Public modules for authors of backends."""
PUBLIC = {*AUTHOR, "attnplug.host"}


def modules_of(package: Path) -> dict[str, Path]:
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_there_is_no_import_cycle(package):
    """Includes imports inside functions or for type checking. A package that is a table of contents is left out."""
    modules = modules_of(package)
    relative = [name for name, path in modules.items() if any(each.startswith(".") for each in imports_of(path))]
    assert not relative, "imports are absolute"
    graph = {
        name: {imported for imported in imports_of(path) if imported in modules and imported != package.name}
        for name, path in modules.items()
        if name not in (package.name, *PUBLIC)
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


@pytest.mark.parametrize(
    "package", [path for path in PACKAGES if path.name not in TOGETHER], ids=lambda path: path.name
)
def test_plugins_and_bridges_import_only_public_modules(package):
    """They represent third parties. ``attnplug.host`` is for bridges only."""
    allowed = AUTHOR if "plugins" in package.relative_to(ROOT).parts else PUBLIC
    for path in package.rglob("*.py"):
        other = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - allowed
        assert not other, f"{path.relative_to(ROOT)} imports {sorted(other)}"


def test_examples_import_only_public_modules():
    for path in (ROOT / "examples").rglob("*.py"):
        other = {name for name in imports_of(path) if name.split(".")[0] == "attnplug"} - PUBLIC
        assert not other, f"{path.relative_to(ROOT)} imports {sorted(other)}"
