"""Every public name is documented: tensors by their shapes, everything else by an example."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import attnplug

STUBS = sorted(path.stem for path in Path(attnplug.__file__).parent.glob("*.pyi"))
MODULES = ["attnplug" if stub == "__init__" else f"attnplug.{stub}" for stub in STUBS]
PUBLIC = [(module, name) for module in MODULES for name in import_module(module).__all__]
SHAPE = r"``\[\w[^\]`]*\]``"
EXAMPLE = r"::\n|>>> |``[^`]*\w\([^`]*\)[^`]*``|``[^`]*\"[^`]*``|→"


@cache
def definitions(module: str) -> dict[str, tuple[ast.stmt, ast.stmt | None]]:
    """Return the top-level definitions of a module by name, each with the statement behind it."""
    path = import_module(module).__file__
    body = ast.parse(Path(str(path)).read_text(encoding="utf-8")).body
    found: dict[str, tuple[ast.stmt, ast.stmt | None]] = {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node, behind
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: (node, behind) for target in targets if isinstance(target, ast.Name)}
    return found


def home(module: str, name: str) -> str:
    """Return the module that defines a public name, which the stub imports it from."""
    stub = Path(str(import_module(module).__file__)).with_suffix(".pyi")
    (found,) = re.findall(rf"^from (\S+) import {name} as {name}$", stub.read_text(), re.MULTILINE)
    return found


def texts(node: ast.stmt | None) -> Iterator[str]:
    """Yield the docstrings below a definition: of the class, its methods and its fields."""
    for each in () if node is None else ast.walk(node):
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            yield each.value.value


def documentation(module: str, name: str) -> tuple[str, str]:
    """Return the docstring of a name, and all docstrings below it."""
    node, behind = definitions(home(module, name))[name]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return ast.get_docstring(node) or "", "\n".join(texts(node))
    own = next(texts(behind), "") if isinstance(behind, ast.Expr) else ""
    return own, own


def explains_itself(value: Any) -> bool:
    """Return True for enumerations, whose members are the examples, and for exceptions, which callers only catch."""
    return inspect.isclass(value) and issubclass(value, Enum | BaseException)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring_with_shapes_or_an_example(module: str) -> None:
    """D4: the names are the contract."""
    bare, plain = [], []
    for name in import_module(module).__all__:
        own, everything = documentation(module, name)
        if not own:
            bare.append(name)
        elif not re.search(f"{SHAPE}|{EXAMPLE}", everything) and not explains_itself(
            getattr(import_module(module), name)
        ):
            plain.append(name)
    assert (bare, plain) == ([], []), "without a docstring; without shapes or an example"


def test_public_names_are_found() -> None:
    assert {"attnplug", "attnplug.host", "attnplug.kernels", "attnplug.linear"} < set(MODULES)
    assert len(PUBLIC) > 100
