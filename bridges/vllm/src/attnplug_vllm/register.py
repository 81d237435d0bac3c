"""What vLLM calls when it loads plugins: in every process, and more than once (``vllm.general_plugins``)."""

from __future__ import annotations

import sys

from attnplug.host import AttnplugError
from attnplug_vllm import backends
from attnplug_vllm.choice import other_version, registry
from attnplug_vllm.config import SECTION
from attnplug_vllm.front_end import additional_config, check_command_line, options_of
from attnplug_vllm.host import render
from attnplug_vllm.specs import Machine
from attnplug_vllm.words import refused


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
    check(sys.argv)


def check(argv: list[str]) -> None:
    """End the program, with a message and no traceback, if its command line asks for what attnplug cannot do."""
    if SECTION not in additional_config(options_of(argv)):
        return
    if reasons := other_version():
        raise SystemExit(refused(reasons))
    try:
        machine = Machine.current()
        check_command_line(argv, registry(), machine.device, machine.sm)
    except AttnplugError as error:
        raise SystemExit(error.told(render)) from None
