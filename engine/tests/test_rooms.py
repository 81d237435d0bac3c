"""The package's layout: a folder imports only from folders below it, and import chains stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attnplug_engine

ROOT = Path(attnplug_engine.__file__).parent
TOP = ""
ROOMS = (
    "cli",
    "recording",
    TOP,
    "serving",
    "speculation",
    "graphs",
    "execution",
    "scheduling",
    "memory",
    "models",
    "quantization",
    "kernels",
    "text",
    "checkpoints",
    "parallel",
    "settings",
)
"""From top to bottom, as in the README. ``TOP`` are the modules that a user of the package meets."""
PUBLIC = {"completion", "engine", "options", "prepare", "request"}
VALUES = {"attnplug_engine.options", "attnplug_engine.request"}
"""Plain values that every room may use: they import nothing of the package but settings and one another."""
MOST_LEVELS = 12

MODULES = {
    ".".join(("attnplug_engine", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


def room(module: str) -> str:
    name = module.removeprefix("attnplug_engine").removeprefix(".")
    return name.split(".")[0] if "." in name or name in ROOMS else TOP


def statements(tree: ast.AST, *, inside: bool) -> Iterator[ast.AST]:
    """Statements of a module, those ``inside`` of functions included; not those for type checking alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        if inside or not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from statements(node, inside=inside)


def imported(path: Path, *, inside: bool = False) -> Iterator[str]:
    """Modules of the package that ``path`` imports: when it is imported itself, or ``inside`` of functions as well."""
    for node in statements(ast.parse(path.read_text()), inside=inside):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "attnplug_engine":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


GRAPH = {name: {other for other in imported(path) if other != "attnplug_engine"} for name, path in MODULES.items()}


def test_the_top_level_has_what_a_user_meets_and_every_folder_is_a_room() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", *PUBLIC}
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ROOMS) - {TOP}


def test_imports_point_down() -> None:
    level = {name: number for number, name in enumerate(ROOMS)}
    upward = [
        f"{module} imports {other}"
        for module, path in MODULES.items()
        for other in imported(path, inside=True)
        if other not in (*VALUES, "attnplug_engine") and level[room(other)] < level[room(module)]
    ]
    assert not upward
    used = {other for module in VALUES for other in imported(MODULES[module], inside=True)} - VALUES
    assert {room(other) for other in used} <= {"settings"}, used


def test_no_import_chain_is_longer_than_twelve_levels() -> None:
    @cache
    def chain(module: str) -> tuple[str, ...]:
        return (module, *max((chain(other) for other in GRAPH[module]), key=len, default=()))

    longest = max(map(chain, GRAPH), key=len)
    assert len(longest) <= MOST_LEVELS, " → ".join(longest)
