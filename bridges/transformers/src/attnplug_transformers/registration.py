"""Registration of attnplug backends as attention implementations of transformers."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug.host import BackendRequest, load_registry
from attnplug_transformers.attention import AttentionFunction
from attnplug_transformers.errors import BridgeError, OwnAttentionError, UnknownNameError
from attnplug_transformers.masks import step_mask
from attnplug_transformers_host import HOST

PREFIX = "attnplug:"


def paged_name(name: str) -> str:
    """Name of an implementation in continuous batching.

    Up to 5.18 it has the prefix ``paged|``. Later versions accept, besides their own names, only those with "flash" in
    them; "flash" followed by 2 or 3 would select their own kernels.
    """
    return f"paged|{name}" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else f"{name}:flash"


def check_version() -> None:
    """Raise :class:`BridgeError` if the installed version of transformers is not supported."""
    found = HOST.installed()
    refusal = None if found is None else HOST.version_refusal(found)
    if refusal is not None:
        raise BridgeError(refusal.format(HOST.render))


def register(name: str, request: BackendRequest) -> str:
    """Register a backend request as ``attn_implementation="attnplug:NAME"`` and return that string.

    transformers treats any name with "flash" in it as its own, so such a name is spelled in capitals. Example::

        name = register("mine", BackendRequest("auto", roles={Role.DECODE: "triton_mha"}))  # "attnplug:mine"
    """
    if name != name.strip() or not name or set(name) & set("/|:"):
        raise BridgeError(f"{name!r} is not a valid name for transformers; use letters, digits, '_', '-' and '.'")
    full = PREFIX + (name.upper() if "flash" in name else name)
    attention = AttentionFunction(request)
    AttentionInterface.register(full, attention)
    AttentionMaskInterface.register(full, step_mask)
    AttentionInterface.register(paged_name(full), attention)  # no mask function: continuous batching passes lengths
    return full


def register_installed() -> None:
    """Register every installed backend by its name, and ``auto``."""
    for name in ("auto", *load_registry().backends):
        register(name, BackendRequest(name))


def check_names() -> None:
    """Add to transformers' check of ``attn_implementation``: refuse unknown ``attnplug:`` names, and models that would
    not use a known one.

    Its own message lists only its own names, and it has no hook for others. Hence this wraps a public method.
    """
    check = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, *rest: Any, **named: Any) -> Any:
        raise_if_unknown(requested_attention)
        raise_if_own_attention(type(self), requested_attention)
        return check(self, requested_attention, *rest, **named)

    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]


def raise_if_unknown(requested: str | None) -> None:
    """Raise :class:`UnknownNameError` for an ``attnplug:`` name that is not registered."""
    name = (requested or "").removeprefix("paged|")
    known = [key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if key.startswith(PREFIX) and ":flash" not in key]
    if not name.startswith(PREFIX) or requested in ALL_ATTENTION_FUNCTIONS.valid_keys():
        return
    by_case = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), by_case, n=1)
    hint = f' Did you mean "{by_case[near[0]]}"?' if near else ""
    raise UnknownNameError(
        f'attn_implementation="{requested}" is unknown.{hint} attnplug has {", ".join(known)}; '
        "attnplug_transformers.register adds names, and 'attnplug backends' reports plugins that failed to load"
    )


def raise_if_own_attention(model: type[PreTrainedModel], requested: str | None) -> None:
    """Raise :class:`OwnAttentionError` for a model that generates and has attention outside of transformers' interface.

    transformers finds it in the source of the model's module. It would run its own attention, over our masks. Parts of
    a model that do not generate, such as vision towers, may have any attention.
    """
    if not (requested or "").removeprefix("paged|").startswith(PREFIX) or not model.can_generate():
        return
    bases = (base for base in model.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel)
    if not any(base._can_set_attn_implementation() for base in bases):
        raise OwnAttentionError(
            f'{model.__name__} was requested with attn_implementation="{requested}", but it has attention of its own, '
            "which does not call transformers' AttentionInterface; load it with attn_implementation='eager'"
        )


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Context in which ``generate_batch`` and continuous batching use the model's attnplug attention.

    Since 5.19, continuous batching accepts only names that a model cannot be loaded with. Inside the context the
    configurations of the model and its language model have such a name; other parts keep theirs. Example::

        with continuous_batching(model):
            outputs = model.generate_batch(prompts)
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    previous = text._attn_implementation
    if not isinstance(previous, str) or not previous.removeprefix("paged|").startswith(PREFIX):
        raise BridgeError(
            f"the model runs with attn_implementation={previous!r}; set it first: "
            f"model.set_attn_implementation('{PREFIX}auto')"
        )
    name = paged_name(previous.removeprefix("paged|"))
    parts = [(part, part._attn_implementation) for part in _parts(config)]
    try:
        _set([(part, name if part is config or part is text else own) for part, own in parts])
        yield model
    finally:
        _set(parts)


def _parts(config: Any) -> Iterator[Any]:
    """A configuration, then those of its parts."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _set(implementations: list[tuple[Any, str | None]]) -> None:
    """Set implementations of configurations. A configuration comes before its parts, to which it passes its own on."""
    for config, name in implementations:
        config._attn_implementation = name
