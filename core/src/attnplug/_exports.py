"""Lazy exports of the public modules.

A public module has a stub, ``name.pyi``, that imports its names from the modules that define them. Type checkers read
the stub; at run time a name is imported when it is first used. So plugins load without torch.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of ``module``, as its stub lists its names."""
    namespace = vars(sys.modules[module])
    stub = Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
    home = {
        alias.name: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(home[name]), name)
        return value

    return load, lambda: sorted({*namespace, *home}), sorted(home)
