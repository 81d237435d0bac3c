"""Registration of attnplug backends as attention implementations of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug.host import BackendRequest, load_registry
from attnplug_transformers.attention import AttentionFunction
from attnplug_transformers.errors import BridgeError
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


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Context in which ``generate_batch`` and continuous batching use the model's attnplug attention.

    Since 5.19, continuous batching accepts only names that a model cannot be loaded with. Inside the context the
    model's configuration has such a name. Example::

        with continuous_batching(model):
            outputs = model.generate_batch(prompts)
    """
    config: Any = model.config
    previous = config._attn_implementation
    if not isinstance(previous, str) or not previous.removeprefix("paged|").startswith(PREFIX):
        raise BridgeError(
            f"the model runs with attn_implementation={previous!r}; set it first: "
            f"model.set_attn_implementation('{PREFIX}auto')"
        )
    config._attn_implementation = paged_name(previous.removeprefix("paged|"))
    try:
        yield model
    finally:
        config._attn_implementation = previous
