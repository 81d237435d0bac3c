"""Attributes that vLLM's backend registry points to, resolved when vLLM looks them up.

The current configuration decides what a name resolves to: the MHA class, a class of MLA, or the previously registered
backend if the configuration does not request attnplug. A configuration requests attnplug by naming CUSTOM.

vLLM caches a class by the requested name, so consecutive engines in one process get a class each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnplug_vllm.selection import Refused
from attnplug_vllm.settings import CUSTOM, SECTION, missing_custom

_NAMES = {"Custom": CUSTOM, "CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
"""Attributes of this module, and the ``AttentionBackendEnum`` members that point to them."""
replaced: dict[str, str | None] = {}
"""Path that a member had before, by attribute."""


def path(name: str) -> str:
    """Qualified name of an attribute, as vLLM's registry stores it."""
    return f"{__name__}.{name}"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = get_current_vllm_config_or_none()
    previous = replaced.get(name)
    if previous is not None and (config is None or not requests_attnplug(config, name)):
        return resolve_obj_by_qualname(previous)
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        if hasattr(config.model_config.hf_text_config, "index_topk"):
            return resolve_obj_by_qualname("attnplug_vllm.sparse_mla.AttnplugSparseMLABackend")
        return resolve_obj_by_qualname("attnplug_vllm.mla.AttnplugMLABackend")
    return resolve_obj_by_qualname("attnplug_vllm.mha.AttnplugBackend")


def requests_attnplug(config: Any, name: str) -> bool:
    """Return True if a configuration requests attnplug for a member that another backend had before.

    Raises :class:`Refused` if it has attnplug's section but names other backends.
    """
    has_section = isinstance(config.additional_config, Mapping) and SECTION in config.additional_config
    if name == "Custom":
        return has_section
    attention = config.attention_config
    named = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    names = [backend.name for backend in named if backend is not None]
    if CUSTOM in names:
        return has_section or replaced.get("Custom") is None
    if has_section and config.speculative_config is None:  # with one, these may be draft layers
        raise Refused(missing_custom(names))
    return False
