"""What vLLM calls when it loads plugins: in every process, and more than once (``vllm.general_plugins``)."""

from __future__ import annotations

from attnplug_vllm import backends


def register() -> None:
    """Put attnplug into vLLM's registry: at CUSTOM, and on the CPU, whose platform ignores CUSTOM, at its own members.

    A place that another plugin has keeps serving everyone who does not ask for attnplug.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    taken = {"Custom": "CUSTOM"}
    if current_platform.is_cpu():
        taken |= {"CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
    for ours, theirs in taken.items():
        member = AttentionBackendEnum.__members__.get(theirs)
        if member is None:  # a version without it
            continue
        found = member.get_path() if member.is_overridden() or member.value else None
        if found == backends.path(ours):
            continue
        backends.before[ours] = found
        register_backend(member, backends.path(ours))
