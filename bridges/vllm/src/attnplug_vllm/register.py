"""Entry point of ``vllm.general_plugins``. vLLM calls it in every process, and more than once."""

from __future__ import annotations

import logging
import sys
from importlib import metadata

from attnplug.host import AttnplugError
from attnplug_vllm import backends
from attnplug_vllm.command_line import check_command_line, options_of, requests_attnplug
from attnplug_vllm.host import HOST, index_is_ours, refusal_message, render
from attnplug_vllm.kv_formats import registry
from attnplug_vllm.selection import version_refusals
from attnplug_vllm.settings import CUSTOM
from attnplug_vllm.specs import Machine

GROUP = "vllm.general_plugins"
"""vLLM's entry-point group, in which plugins register backends."""


def register() -> None:
    """Register attnplug in vLLM's backend registry, as CUSTOM. The CPU platform ignores CUSTOM, so as its members too.

    A member that another backend had keeps resolving to that one unless a configuration requests attnplug.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    members = {"Custom": "CUSTOM"}
    if current_platform.is_cpu():
        members |= {"CPUAttention": "CPU_ATTN", "CPUMLA": "CPU_MLA", "AMXMLA": "AMX_MLA"}
        logging.getLogger("vllm.platforms.cpu").addFilter(_is_true)
    for attribute, name in members.items():
        member = AttentionBackendEnum.__members__.get(name)
        if member is None:  # this version of vLLM does not have it
            continue
        current = member.get_path() if member.is_overridden() or member.value else None
        if current == backends.path(attribute):
            continue
        backends.replaced[attribute] = current
        register_backend(member, backends.path(attribute))
    if current_platform.is_cuda() and index_is_ours(Machine.current().sm, HOST.installed()):
        from attnplug_vllm.indexer import replace_layer

        replace_layer()
    check(sys.argv)


def _is_true(record: logging.LogRecord) -> bool:
    """Drop "Cannot use CUSTOM backend on CPU" if attnplug serves the configuration. The bridge logs its backends."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if not str(record.msg).startswith("Cannot use ") or CUSTOM not in record.getMessage() or config is None:
        return True
    return not backends.requests_attnplug(config, "CPUAttention")


def check(argv: list[str]) -> None:
    """Exit with a message and no traceback if attnplug cannot serve the command line."""
    if not requests_attnplug(options_of(argv), custom_is_ours=not _others()):
        return
    if reasons := version_refusals():
        raise SystemExit(refusal_message(reasons))
    try:
        machine = Machine.current()
        check_command_line(argv, registry(), machine.device, machine.sm)
    except AttnplugError as error:
        raise SystemExit(error.format(render)) from None


def _others() -> bool:
    """Return True if other packages may register CUSTOM for themselves. vLLM loads plugins in no fixed order."""
    ours = {"attnplug-vllm", *HOST.distributions}
    return any(point.dist is None or point.dist.name not in ours for point in metadata.entry_points(group=GROUP))
