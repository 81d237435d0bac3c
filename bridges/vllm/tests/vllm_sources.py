"""vLLM's sources at the ends of the range, read and not imported: classes, their methods, and names of modules."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from attnplug_testing.signatures import _signature

ROOT = Path(__file__).resolve().parents[3]
(_UNPACKED,) = re.findall(r"^VLLM := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
VERSIONS = _UNPACKED.split()
OURS = ROOT / "bridges" / "vllm" / "src" / "attnplug_vllm"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@dataclass(frozen=True)
class Sources:
    """One version, unpacked."""

    folder: Path

    @classmethod
    def of(cls, version: str) -> Sources:
        folder = ROOT / ".venv" / "vllm" / version
        if not folder.exists():
            pytest.skip(f"vLLM {version} is not unpacked; 'make .venv/installed-dev' does it")
        return cls(folder)

    def file(self, module: str) -> Path:
        path = self.folder / Path(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def names(self, module: str) -> set[str]:
        """Names at the top level of a module, including imports."""
        found: set[str] = set()
        for node in ast.walk(tree(self.file(module))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        return found

    def klass(self, module: str, name: str) -> Klass:
        return klass(self.file(module), name)


@dataclass(frozen=True)
class Klass:
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, inspect.Signature]:
        """Signatures, with neither ``self`` nor ``cls``."""
        return {node.name: _without_self(node) for node in self.node.body if isinstance(node, ast.FunctionDef)}

    @property
    def members(self) -> set[str]:
        """Methods, properties, fields, and what methods set on ``self``."""
        found = set(self.methods)
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
        return found


def klass(path: Path, name: str) -> Klass:
    (found,) = (node for node in tree(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    return Klass(found)


def ours(module: str, name: str) -> Klass:
    """A class of the bridge's, read as well: importing it needs vLLM."""
    return klass(OURS / f"{module}.py", name)


def _without_self(node: ast.FunctionDef) -> inspect.Signature:
    signature = _signature(node.args)
    static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in node.decorator_list)
    return signature if static else signature.replace(parameters=list(signature.parameters.values())[1:])


def takes_what_is_given(mine: inspect.Signature, theirs: inspect.Signature) -> None:
    """Raise TypeError unless ``mine`` accepts calls by ``theirs``: all arguments by name, all by position, required
    ones only.

    If ``mine`` has only ``**kwargs``, arguments are given by name only.
    """
    plain = [p for p in theirs.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if all(p.kind is p.VAR_KEYWORD for p in mine.parameters.values()) and plain:
        mine.bind(**{p.name: ... for p in plain})
        return
    mine.bind(*(... for _ in plain))
    mine.bind(**{p.name: ... for p in plain})
    mine.bind(*(... for p in plain if p.default is p.empty))
