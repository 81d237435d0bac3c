"""Signatures of functions in source files, for libraries that cannot be imported where the tests run."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path


def source_signature(file: Path, name: str) -> inspect.Signature:
    """The signature of a module's function, or of a class's method as ``Class.method``, its defaults left as text."""
    body = ast.parse(file.read_text()).body
    *owners, last = name.split(".")
    for owner in owners:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == last)
    return _signature(function.args)


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


def _parameter(argument: ast.arg, default: ast.expr | None, kind: inspect._ParameterKind) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    return inspect.Parameter(argument.arg, kind, default=empty if default is None else ast.unparse(default))
