"""Modules that are tables of contents: each name is imported from where it is defined when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnplug.declare.version import CONTRACT_VERSION


def face(
    name: str,
    namespace: dict[str, Any],
    modules: Mapping[str, Sequence[str]],
    *,
    other: str,
    removed: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of module ``name``, which shows these names of our modules.

    A name that was ``removed``, or is shown by the ``other`` face, raises an ImportError that says what to write.
    """
    module_of = {shown: module for module, names in modules.items() for shown in names}
    gone = removed or {}

    def look_up(attribute: str) -> Any:
        if attribute in gone:  # an AttributeError's text would be lost: 'from … import' writes its own
            raise ImportError(f"{name}.{attribute} is gone since contract {CONTRACT_VERSION}: {gone[attribute]}")
        if attribute not in module_of:
            if not attribute.startswith("_") and attribute in importlib.import_module(other).__all__:
                raise ImportError(f"{attribute} is not in {name}: from {other} import {attribute}")
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        home = f"attnplug.{module_of[attribute]}"
        found = getattr(importlib.import_module(home), attribute, None)
        value = namespace[attribute] = found if found is not None else importlib.import_module(f"{home}.{attribute}")
        return value

    return look_up, lambda: sorted({*namespace, *module_of}), sorted(module_of)
