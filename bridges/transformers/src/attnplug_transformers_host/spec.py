"""The declaration that the entry point names."""

from __future__ import annotations

from attnplug.host import HostSpec
from attnplug_transformers_host import VERSIONS, fit, refuse, render

HOST = HostSpec(
    title="transformers",
    distributions=("transformers",),
    versions=VERSIONS,
    render=render,
    fit=fit,
    refuse=refuse,
)
