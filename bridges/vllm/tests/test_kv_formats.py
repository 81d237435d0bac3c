"""KV cache formats by vLLM's names, and the size of their rows in vLLM's pages (E2)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from attnplug import UsageError
from attnplug_testing.errors import having
from attnplug_vllm import kv_formats
from attnplug_vllm.host import PLUGIN_FORMATS
from attnplug_vllm.kv_formats import cache_format, row_elements, wrong_page_size
from attnplug_vllm.specs import mha_layer
from vllm_sources import VERSIONS, Sources, tree
from vllm_stand_in import vllm

LAYER = mha_layer(0, heads=8, kv_heads=2, head_dim=64, scale=0.125)


@pytest.fixture(scope="module")
def loaded() -> Iterator[SimpleNamespace]:
    with vllm() as found:
        yield found


@dataclass(frozen=True)
class Spec:
    """Fields of vLLM's ``AttentionSpec`` that a backend reads and sets."""

    kv_quant_mode: SimpleNamespace
    head_size: int = 64
    head_size_v: int = 64
    state_content_bytes: int | None = None


def test_names_of_vllm_and_those_of_installed_formats():
    assert cache_format("auto", torch.bfloat16).name == "bfloat16"
    assert {cache_format(name, torch.float16).name for name in ("fp8", "fp8_e4m3")} == {"float8_e4m3fn"}
    assert cache_format("float16", torch.bfloat16).name == "float16"
    assert cache_format("fp8_per_token_head", torch.bfloat16).name == "fp8_per_token_head"


@pytest.mark.parametrize("name", ["fp8_e5m2", "int8_per_token_head"])
def test_a_name_that_no_package_provides_is_refused(name):
    with pytest.raises(UsageError, check=having(name, "nvfp4", settings=("kv_dtype",))):
        cache_format(name, torch.bfloat16)


def test_a_format_is_unknown_without_its_package(monkeypatch):
    monkeypatch.setattr(kv_formats, "plugin_formats", lambda: ())
    with pytest.raises(UsageError, check=having("nvfp4")):
        cache_format("nvfp4", torch.bfloat16)


def test_a_row_has_values_or_the_bytes_of_its_format():
    assert row_elements("fp8", 128) == row_elements("auto", 128) == 256
    assert row_elements("fp8_per_token_head", 128) == 2 * 132
    assert row_elements("nvfp4", 128, 64) == 72 + 36


def test_newer_versions_allocate_rows_of_the_formats_size(loaded):
    set_by_us = loaded.mha.AttnplugBackend.customize_spec(Spec(SimpleNamespace(name="FP8_PER_TOKEN_HEAD")))
    assert set_by_us.state_content_bytes == 2 * 68
    plain = Spec(SimpleNamespace(name="FP8_PER_TENSOR"))
    assert loaded.mha.AttnplugBackend.customize_spec(plain) is plain


def test_older_versions_allocate_what_they_compute(loaded):
    assert loaded.mha.AttnplugBackend.get_kv_cache_shape(3, 16, 2, 64, "fp8_per_token_head") == (3, 2, 16, 136)
    assert not wrong_page_size("fp8_per_token_head", LAYER) and not wrong_page_size("auto", LAYER)


def test_a_format_of_another_size_than_an_older_version_allocates_is_refused(loaded, monkeypatch):
    fp8 = kv_formats.registry().kv_format("fp8_per_token_head")
    monkeypatch.setattr(
        kv_formats, "registry", lambda: SimpleNamespace(kv_formats={"nvfp4": 0}, kv_format=lambda _: fp8)
    )
    (refusal,) = wrong_page_size("nvfp4", LAYER)
    assert (refusal.code, refusal.value, refusal.setting) == ("kv_dtype", "nvfp4", "kv_dtype")
    assert "144" in refusal.message and "272" in refusal.message


@pytest.mark.parametrize("version", VERSIONS)
def test_every_supported_version_accepts_the_names(version):
    sources = Sources.of(version)
    (names,) = (
        ast.literal_eval(node.value.slice)
        for node in tree(sources.file("vllm.config.cache")).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CacheDType"
    )
    assert set(PLUGIN_FORMATS) <= set(names)
    modes = sources.klass("vllm.v1.kv_cache_interface", "KVQuantMode").node.body
    members = {node.targets[0].id.lower() for node in modes if isinstance(node, ast.Assign)}
    assert set(PLUGIN_FORMATS) <= members, "customize_spec finds a format by the mode's name"
