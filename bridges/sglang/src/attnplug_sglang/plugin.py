"""SGLang's plugin entry point, called in every process: registers installed backends as choices of its options.

SGLang logs what a plugin raises and continues without the plugin. So nothing is refused here: a backend that cannot be
used is registered too. It is refused when the arguments are checked or, at the latest, when it is built.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attnplug import ExtendPath
from attnplug.host import load_registry
from attnplug_sglang.host import AUTO, PREFIX, check_version

_registered = set[str]()


def register() -> None:
    """Register every installed backend as ``attnplug:NAME``, and ``attnplug:auto``."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    backends = load_registry().backends
    full = {
        name: ExtendPath.CHUNKED in backend.spec.capabilities.mla_extend
        for name, backend in backends.items()
        if any(not kind.is_linear for kind in backend.spec.capabilities.kinds)
    }
    claimed = {name: backend.spec.capabilities.invariant for name, backend in backends.items()}
    chunked = [PREFIX + name for name, can in {**full, AUTO: any(full.values())}.items() if can]
    names = [PREFIX + name for name in (*sorted(full), AUTO) if PREFIX + name not in _registered]
    add_attention_backend_choices(names)
    # All of them: a backend that does not claim invariance is refused later, with the reason. The radix cache requires
    # ``chunks``: a hit changes which rows are prefilled.
    add_deterministic_attention_backend_choices(names)
    add_radix_supported_deterministic_attention_backend_choices(
        [name for name in names if name != PREFIX + AUTO and "chunks" in claimed[name.removeprefix(PREFIX)]]
    )
    for name in names:
        register_attention_backend(name)(partial(_build, name))
    _allow_chunked_prefix([name for name in chunked if name not in _registered])
    if names:
        _check_arguments_early()
    _registered.update(names)


def _allow_chunked_prefix(names: list[str]) -> None:
    """Add backends to SGLang's list of those that support the chunked prefix cache; it is off for all others."""
    try:
        from sglang.srt.server_args import add_chunked_prefix_cache_attention_backend as allow
    except ImportError:  # SGLang 0.5.14
        from sglang.srt.model_executor.model_runner import add_chunked_prefix_cache_attention_backend as allow
    for name in names:
        allow(name)


def _check_arguments_early() -> None:
    """Hook into SGLang's argument check, which runs before it starts a process or loads weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", check_arguments, HookType.BEFORE)


def check_arguments(arguments: Any, *rest: Any, **more: Any) -> None:
    """Raise one error for arguments that name an attnplug backend which cannot serve."""
    from attnplug_sglang.server_args import check_server_args

    check_server_args(arguments)


def _build(name: str, runner: Any) -> Any:
    check_version(name)
    from attnplug_sglang.build import build

    return build(name, runner)
