"""How Triton kernels run in tests. Called by the ``conftest.py`` of plugins that have some, before any is defined."""

from __future__ import annotations

import inspect
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


def settle_triton() -> None:
    """Without a GPU kernels are interpreted; on one, nobody else's are tuned.

    flash-linear-attention tries all of a kernel's configurations at its first use, for a minute. Any will do here.
    """
    if find_spec("triton") is None:  # core's tests run without it
        return
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _quicken_interpreter()
        return
    from triton.runtime.autotuner import Autotuner

    def first_configuration(self, *args, **kwargs):
        config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = first_configuration


def _quicken_interpreter() -> None:
    """Whenever one function of a kernel calls another, Triton's interpreter looks through all that triton.language has
    for what it replaces. Which names these are does not change, so they are looked for once.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in _builtins(package):
            if is_builtin(member := getattr(package, name)):  # not replaced yet
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


@cache
def _builtins(package: object) -> list[str]:
    """The names of what is replaced; first asked before anything is."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]
