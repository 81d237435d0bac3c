"""Reasons as vLLM's users read them."""

from __future__ import annotations

from collections.abc import Iterable

from attnplug import Refusal
from attnplug_vllm.host import render


def refused(reasons: Iterable[Refusal]) -> str:
    """All of some reasons, in one message."""
    return "attnplug cannot serve this in vLLM:\n" + "\n".join(f"  - {reason.told(render)}" for reason in reasons)
