"""Variants of interpreted Triton kernels that a compiler would specialise on their arguments (E1)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def recorded_variants() -> Iterator[dict[str, set[tuple[Any, ...]]]]:
    """Record launches inside the block: for each kernel, the distinct variants that Triton would compile.

    As Triton does, an integer argument is specialised if it is 1 or a multiple of 16, and a tensor by its alignment to
    16 bytes.
    """
    from triton.runtime.interpreter import InterpretedFunction

    found: dict[str, set[tuple[Any, ...]]] = {}
    real: Callable[..., Any] = InterpretedFunction.__getitem__

    def launcher(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch, signature = real(kernel, grid), inspect.signature(kernel.fn)
        plain = _named(kernel, signature, "do_not_specialize")
        unaligned = plain | _named(kernel, signature, "do_not_specialize_on_alignment")

        def record(*arguments: Any, **named: Any) -> Any:
            given = {name: value for name, value in named.items() if name in signature.parameters}
            key: list[tuple[str, object]] = []
            for name, value in signature.bind(*arguments, **given).arguments.items():
                if isinstance(value, torch.Tensor):
                    key.append((name, name in unaligned or value.data_ptr() % 16 == 0))
                elif "constexpr" in str(signature.parameters[name].annotation):
                    key.append((name, value))
                elif isinstance(value, int):
                    key.append((name, name in plain or (value == 1, name not in unaligned and value % 16 == 0)))
            found.setdefault(kernel.fn.__name__, set()).add(tuple(key))
            return launch(*arguments, **named)

        return record

    InterpretedFunction.__getitem__ = launcher
    try:
        yield found
    finally:
        InterpretedFunction.__getitem__ = real


def _named(kernel: Any, signature: inspect.Signature, option: str) -> set[str]:
    names = list(signature.parameters)
    return {names[each] if isinstance(each, int) else each for each in kernel.kwargs.get(option) or ()}
