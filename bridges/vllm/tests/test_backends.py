"""Classes that vLLM's registry resolves to if another backend was registered before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attnplug_testing.errors import naming
from attnplug_vllm import backends
from attnplug_vllm.backends import requests_attnplug
from attnplug_vllm.selection import Refused
from vllm_stage import config

CUSTOM, CPU_ATTN = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="CPU_ATTN")
SECTION = {"attnplug": {"backend": "torch_native"}}
DRAFTS = SimpleNamespace(num_speculative_tokens=2)


@pytest.fixture(autouse=True)
def places(monkeypatch):
    monkeypatch.setattr(backends, "replaced", {"Custom": None, "CPUAttention": "vllm.CPUAttentionBackend"})


def test_custom_alone_asks_also_where_vllm_ignores_it():
    assert requests_attnplug(config(attention_config__backend=CUSTOM), "CPUAttention")
    assert requests_attnplug(config({"attnplugin": {}}, attention_config__backend=CUSTOM), "CPUAttention")


def test_custom_for_one_kind_of_layer_asks():
    assert requests_attnplug(
        config(SECTION, attention_config__backend_per_kind={"full_attention": CUSTOM}), "CPUAttention"
    )


def test_who_does_not_ask_gets_vllms_own():
    assert not requests_attnplug(config(), "CPUAttention")
    assert not requests_attnplug(config(attention_config__backend=CPU_ATTN), "CPUAttention")
    assert not requests_attnplug(config(additional_config=object()), "CPUAttention")


def test_a_plugin_that_had_custom_before_keeps_it_for_those_who_do_not_mention_attnplug(monkeypatch):
    monkeypatch.setitem(backends.replaced, "Custom", "other.Backend")
    for name in ("Custom", "CPUAttention"):
        assert not requests_attnplug(config(attention_config__backend=CUSTOM), name)
        assert requests_attnplug(config(SECTION, attention_config__backend=CUSTOM), name)


@pytest.mark.parametrize(("backend", "named"), [(None, []), (CPU_ATTN, ["CPU_ATTN"])])
def test_attnplug_without_custom_is_refused(backend, named):
    """D3: otherwise one of the two settings would be ignored."""
    with pytest.raises(Refused, check=naming(*named, "--attention-backend CUSTOM")):
        requests_attnplug(config(SECTION, attention_config__backend=backend), "CPUAttention")


def test_layers_of_a_draft_run_on_what_the_draft_names():
    assert not requests_attnplug(config(SECTION, speculative_config=DRAFTS), "CPUAttention")
    assert requests_attnplug(
        config(SECTION, speculative_config=DRAFTS, attention_config__backend=CUSTOM), "CPUAttention"
    )
