"""Names by which transformers knows our attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug.host import BackendRequest, load_registry
from attnplug_transformers.attention import Attention
from attnplug_transformers.errors import BridgeError
from attnplug_transformers.masks import step_mask
from attnplug_transformers_host import HOST

PREFIX = "attnplug:"


def paged_name(name: str) -> str:
    """What a name of ours is called in continuous batching. Up to 5.18 that wants a prefix of its own. Since then it
    serves, besides its own names, only those with "flash" in them; a 2 or 3 after it would mean its own kernels."""
    return f"paged|{name}" if "paged|sdpa" in ALL_ATTENTION_FUNCTIONS.valid_keys() else f"{name}:flash"


def check_version() -> None:
    """Refuse a transformers that this package was not written for."""
    found = HOST.installed()
    refusal = None if found is None else HOST.version_refusal(found)
    if refusal is not None:
        raise BridgeError(refusal.told(HOST.render))


def register(name: str, request: BackendRequest) -> str:
    """Make a choice of backends available as ``attn_implementation="attnplug:NAME"``; returns that.

    transformers takes any name with "flash" in it for one of its own, so such a name is spelled in capitals.
    """
    if name != name.strip() or not name or set(name) & set("/|:"):
        raise BridgeError(f"{name!r} cannot be a name for transformers; use letters, digits, '_', '-' and '.'")
    full = PREFIX + (name.upper() if "flash" in name else name)
    attention = Attention(request)
    AttentionInterface.register(full, attention)
    AttentionMaskInterface.register(full, step_mask)
    AttentionInterface.register(paged_name(full), attention)  # without a mask: lengths are given
    return full


def register_installed() -> None:
    """Every installed backend by its name, and ``auto``."""
    for name in ("auto", *load_registry().backends):
        register(name, BackendRequest(name))


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let ``generate_batch`` and continuous batching run on the model's attnplug attention, for the code inside.

    Since 5.19, a model cannot be loaded by a name that continuous batching accepts: those are its own, and what it
    takes for flash attention. So the model goes by such a name meanwhile.
    """
    config: Any = model.config
    before = config._attn_implementation
    if not isinstance(before, str) or not before.removeprefix("paged|").startswith(PREFIX):
        raise BridgeError(
            f"the model runs with attn_implementation={before!r}; set it first: "
            f"model.set_attn_implementation('{PREFIX}auto')"
        )
    config._attn_implementation = paged_name(before.removeprefix("paged|"))
    try:
        yield model
    finally:
        config._attn_implementation = before
