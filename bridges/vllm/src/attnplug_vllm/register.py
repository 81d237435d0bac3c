"""Entry point of ``vllm.general_plugins``. vLLM calls it in every process, and more than once."""

from __future__ import annotations

import sys

from attnplug.host import AttnplugError
from attnplug_vllm import backends
from attnplug_vllm.command_line import additional_config, check_command_line, options_of
from attnplug_vllm.host import refusal_message, render
from attnplug_vllm.selection import registry, version_refusals
from attnplug_vllm.settings import SECTION
from attnplug_vllm.specs import Machine


def register() -> None:
    """Register attnplug in vLLM's backend registry, as CUSTOM. The CPU platform ignores CUSTOM, so as its members too.

    A member that another backend had keeps resolving to that one unless a configuration requests attnplug.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = {"Custom": "CUSTOM"}
    if current_platform.is_cpu():
        members |= {"CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
    for attribute, name in members.items():
        member = AttentionBackendEnum.__members__.get(name)
        if member is None:  # this version of vLLM does not have it
            continue
        current = member.get_path() if member.is_overridden() or member.value else None
        if current == backends.path(attribute):
            continue
        backends.replaced[attribute] = current
        register_backend(member, backends.path(attribute))
    check(sys.argv)


def check(argv: list[str]) -> None:
    """Exit with a message and no traceback if attnplug cannot serve the command line."""
    if SECTION not in additional_config(options_of(argv)):
        return
    if reasons := version_refusals():
        raise SystemExit(refusal_message(reasons))
    try:
        machine = Machine.current()
        check_command_line(argv, registry(), machine.device, machine.sm)
    except AttnplugError as error:
        raise SystemExit(error.format(render)) from None
