"""What SGLang calls in every process: our backends become choices of its options.

SGLang logs what a plugin raises and goes on without it. So nothing is refused here: what cannot be used is registered
all the same, and says why when it is asked for, at the check of the arguments and, at the latest, when it is built.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from attnplug import ExtendPath
from attnplug.host import load_registry
from attnplug_sglang.host import AUTO, PREFIX, refuse_version

_registered = set[str]()


def register() -> None:
    """Make every installed backend a choice ``attnplug:NAME``, and ``attnplug:auto``."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    backends = load_registry().backends
    full = {
        name: ExtendPath.CHUNKED in backend.spec.capabilities.mla_extend
        for name, backend in backends.items()
        if any(not kind.is_linear for kind in backend.spec.capabilities.kinds)
    }
    chunked = [PREFIX + name for name, can in {**full, AUTO: any(full.values())}.items() if can]
    names = [PREFIX + name for name in (*sorted(full), AUTO) if PREFIX + name not in _registered]
    add_attention_backend_choices(names)
    for name in names:
        register_attention_backend(name)(partial(_build, name))
    _allow_chunks([name for name in chunked if name not in _registered])
    if names:
        _check_arguments_early()
    _registered.update(names)


def _allow_chunks(names: list[str]) -> None:
    """SGLang turns its chunked prefix cache off for backends that are not on a list of its own."""
    try:
        from sglang.srt.server_args import add_chunked_prefix_cache_attention_backend as allow
    except ImportError:  # SGLang 0.5.14 has it here
        from sglang.srt.model_executor.model_runner import add_chunked_prefix_cache_attention_backend as allow
    for name in names:
        allow(name)


def _check_arguments_early() -> None:
    """Have SGLang's front end refuse what cannot be served, before it starts a process or loads weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.server_args.ServerArgs.check_server_args", check_arguments, HookType.BEFORE)


def check_arguments(arguments: Any, *rest: Any, **more: Any) -> None:
    """Refuse, in one message, arguments with one of our names that cannot be served."""
    from attnplug_sglang.front import refuse_arguments

    refuse_arguments(arguments)


def _build(name: str, runner: Any) -> Any:
    refuse_version(name)
    from attnplug_sglang.build import build

    return build(name, runner)
