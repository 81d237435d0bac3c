"""Signatures of a library's functions, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Any


def unpacked(library: str, version: str) -> Path | None:
    """Return the folder of a version that ``make test`` unpacked next to the installed one, or ``None``."""
    folder = Path(sys.prefix) / library / version
    return folder if folder.is_dir() else None


def installed(package: str) -> Path:
    """Return the folder that holds an installed package's folder, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent.parent


@cache  # parsing a module of 200 KB takes 0.2 s, and every scene needs it
def read_signature(path: Path, function: str) -> inspect.Signature:
    """Return the signature of a module's function, or of a method as ``CLASS.METHOD``.

    Of overloads it is the last one, which has the code. Every default is ``...``.
    """
    body = ast.parse(path.read_text()).body
    *outer, name = function.split(".")
    for owner in outer:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    *_, found = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return _signature(found.args)


def _signature(arguments: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parameters = []
    for number, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
        only = number < len(arguments.posonlyargs)
        parameters.append(_parameter(argument, default, kinds.POSITIONAL_ONLY if only else kinds.POSITIONAL_OR_KEYWORD))
    if arguments.vararg is not None:
        parameters.append(_parameter(arguments.vararg, None, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(_parameter(argument, default, kinds.KEYWORD_ONLY))
    if arguments.kwarg is not None:
        parameters.append(_parameter(arguments.kwarg, None, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=empty if default is None else ...)
