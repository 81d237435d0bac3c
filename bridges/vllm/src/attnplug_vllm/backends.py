"""The classes that vLLM finds by name: ``register`` puts paths to them into vLLM's registry.

Which class a name stands for is decided when vLLM looks it up, by the configuration that is current then: one for MHA
and another for MLA, and the backend that had the place before where the configuration does not ask for attnplug.

To ask is to name CUSTOM. vLLM remembers a class by the name that was asked for, so engines that follow each other in a
process get a class each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnplug_vllm.choice import Refused
from attnplug_vllm.config import CUSTOM, SECTION, without_custom

_NAMES = {"Custom": CUSTOM, "CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
"""Our names, and whose place they take in ``AttentionBackendEnum``."""
before: dict[str, str | None] = {}
"""The path that each place had before, by our name."""


def path(name: str) -> str:
    return f"{__name__}.{name}"


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = get_current_vllm_config_or_none()
    other = before.get(name)
    if other is not None and (config is None or not asks(config, name)):
        return resolve_obj_by_qualname(other)
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        return resolve_obj_by_qualname("attnplug_vllm.mla.AttnplugMLABackend")
    return resolve_obj_by_qualname("attnplug_vllm.mha.AttnplugBackend")


def asks(config: Any, name: str) -> bool:
    """Whether a configuration asks for attnplug at a place that was another one's."""
    has_section = isinstance(config.additional_config, Mapping) and SECTION in config.additional_config
    if name == "Custom":
        return has_section
    attention = config.attention_config
    named = [attention.backend, *(getattr(attention, "backend_per_kind", None) or {}).values()]
    names = [backend.name for backend in named if backend is not None]
    if CUSTOM in names:
        return has_section or before.get("Custom") is None
    if has_section and config.speculative_config is None:  # with one, these may be the layers of a draft
        raise Refused(without_custom(names))
    return False
