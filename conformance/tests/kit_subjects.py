"""Backends of the kit's own tests, from the text of their modules."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import torch

from attnplug.declare.spec import Registered, Source
from attnplug_conformance.catalog import all_checks
from attnplug_conformance.new_command import files
from attnplug_conformance.subject import Subject

CHECKS = {check.name: check for check in all_checks()}


@cache
def text(good: str) -> str:
    """The module of a good backend. ``new_mla`` is the one that ``attnplug new --kind mla`` makes."""
    if good == "new_mla":
        made = files(good, "mla")
        plugin = made[f"src/{good}/plugin.py"].replace("@hookimpl\n", "")
        backend = made[f"src/{good}/backend.py"].replace("class NewMla(", "class Backend(")
        return f"{plugin}\n\nSPEC = attnplug_backends()[0]\n{backend}"
    return (Path(__file__).parent / "good" / f"{good}.py").read_text()


def subject(name: str, source: str) -> Subject:
    """A backend from the text of its module."""
    module = ModuleType(f"kit_{name.replace('-', '_')}")
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
    exec(compile(source, f"{name}.py", "exec"), module.__dict__)
    spec = replace(module.SPEC, factory=f"{module.__name__}:Backend")
    return Subject(Registered(spec, Source(name, "kit", name, "0")), torch.device("cpu"))
