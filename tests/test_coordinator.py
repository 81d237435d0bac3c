"""A coordinator reaches every backend that is built, those inside another one included (A10)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import attnplug_trtllm_mla.build as trtllm
from attnplug import BackendContext
from attnplug_testing.kernel_scene import KernelScene, mla
from mla_plugins import PLUGINS


def test_a_fallback_is_built_from_its_owners_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: coordinator, pools and all; only name, options and what its spec declares are its own."""
    given: list[BackendContext] = []
    monkeypatch.setattr(trtllm, "FlashInferMLABackend", given.append)
    plugin, seen = PLUGINS["torch_native"], []
    KernelScene(plugin.case(mla(((0, 1),))), "cpu", lambda context: seen.append(context) or plugin.build(context))
    owner = replace(seen[0], name="trtllm_mla", coordinator=object())
    trtllm.fallback(owner, 16)
    (own,) = given
    different = {f.name for f in fields(BackendContext) if getattr(own, f.name) is not getattr(owner, f.name)}
    assert different == {"name", "options", "declared"}
    assert own.name == "trtllm_mla/flashinfer_mla" and own.options.workspace_mib == 16
