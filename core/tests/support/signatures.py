"""Signatures of a library that lies unpacked on disk, read without importing it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from inspect import Parameter
from pathlib import Path


def unpacked(library: str, version: str) -> Path | None:
    """Where ``make test`` put a version of a library beside the installed one; ``None`` if it did not."""
    folder = Path(sys.prefix) / library / version
    return folder if folder.is_dir() else None


def installed(package: str) -> Path:
    """The folder that holds an installed package's folder, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent.parent


def read_signature(path: Path, function: str) -> inspect.Signature:
    """The signature of a module's function. Defaults are there, but not what they are."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    given = found.args
    assert given.vararg is None and given.kwarg is None and not given.posonlyargs
    without = len(given.args) - len(given.defaults)
    parameters = [
        Parameter(arg.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if at < without else ...)
        for at, arg in enumerate(given.args)
    ] + [
        Parameter(arg.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else ...)
        for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return inspect.Signature(parameters)
