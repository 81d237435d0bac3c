"""The classes that vLLM finds by name: ``register`` puts paths to them into vLLM's registry.

Which class a name stands for is decided when vLLM looks it up, by the configuration that is current then: one for MHA
and another for MLA, and the backend that had the place before where the configuration does not ask for attnplug.
"""

from __future__ import annotations

from typing import Any

from attnplug_vllm.config import SECTION

_NAMES = {"Custom": "CUSTOM", "CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
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
    asked = config is not None and SECTION in (config.additional_config or ())
    other = before.get(name)
    if not asked and other is not None:
        return resolve_obj_by_qualname(other)
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        return resolve_obj_by_qualname("attnplug_vllm.mla.AttnplugMLABackend")
    return resolve_obj_by_qualname("attnplug_vllm.mha.AttnplugBackend")
