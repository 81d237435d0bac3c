"""Lazy exports of the public modules.

A public module has a stub, ``name.pyi``, that imports its names from the modules that define them. Type checkers read
the stub; at run time a name is imported when it is first used. So a plugin's entry point, and ``attnplug backends``,
load without torch. Nothing is imported here at the top: an interrupt before the command's ``main`` shows a traceback.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def lazy_exports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of ``module``, as its stub lists its names; ``__all__`` is one of them."""
    namespace = vars(sys.modules[module])
    home: dict[str, str] = {}

    def read_stub() -> dict[str, str]:
        if not home:
            import ast
            from pathlib import Path

            stub = Path(namespace["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")
            for node in ast.parse(stub).body:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    home.update({alias.name: node.module for alias in node.names})
        return home

    def load(name: str) -> Any:
        import importlib

        if name == "__all__":
            return sorted(read_stub())
        if name not in read_stub():
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(home[name]), name)
        return value

    return load, lambda: sorted({*namespace, "__all__", *read_stub()})
