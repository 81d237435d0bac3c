"""Host description that ``attnplug explain --host vllm`` reads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from attnplug import CacheLayout, DType, Problem, RefusalCode, Role, Setting
from attnplug.host import HostSpec
from attnplug.registry.hosts import load_host
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_testing.specs import GDN, MHA, MLA, model
from attnplug_vllm.host import (
    HOST,
    INDEX_BY_HOST,
    Feature,
    fit,
    refuse,
    refused_mla_prefill,
    render,
    unsupported_feature,
)


def test_every_setting_of_ours_has_a_word_or_none():
    words = {setting: render(setting) for setting in Setting}
    assert words[Setting.PAGE_SIZE] == "--block-size" and words[Setting.KV_DTYPE] == "--kv-cache-dtype"
    assert words[Setting.CUDA_GRAPH] == "--compilation-config.cudagraph_mode"
    assert words[Setting.ATTENTION_BACKEND] == "--additional-config.attnplug.backend"
    variables = {"VLLM_BATCH_INVARIANT"}
    assert all(word is None or word.startswith("--") or word in variables for word in words.values())


def test_every_refusal_of_the_bridge_names_an_option_of_vllm(monkeypatch):
    """D3: of vLLM's own, or the bridge's key of one."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    entries = replace(MLA, sliding_window=64, compressed=CompressedDims(4))
    problems = (
        Problem(model(GDN)),
        Problem(model(MLA), kv_dtype="fp8_ds_mla"),
        Problem(model(entries)),
        Problem(model(MHA), page_size=24),
    )
    formats = (Problem(model(layer), kv_dtype=name) for layer, name in ((MHA, "acme"), (MLA, "nvfp4")))
    reasons = [reason for problem in (*problems, *formats) for reason in refuse(problem)]
    reasons += [*map(unsupported_feature, Feature), unsupported_feature("ALiBi slopes (the model's)")]
    reasons += refused_mla_prefill("FLASH_ATTN", 2)
    assert len(reasons) > 15
    for reason in reasons:
        assert "--" in reason.format(render) or "VLLM_" in reason.format(render), reason
    assert all(render(Setting(name)) for name in ("device", "sm", "layout"))


def test_an_option_of_a_backend_is_spelled_as_a_key_of_the_configuration():
    assert render("triton_mha.splits") == "--additional-config.attnplug.options.triton_mha.splits"


def test_keys_and_values_share_rows_so_the_layout_is_strided():
    assert fit(Problem(model(MHA))).layout is CacheLayout.STRIDED
    assert fit(Problem(model(MLA))).layout is None


def test_lengths_are_exact_unless_vllm_speculates():
    assert fit(Problem(model(MHA))).exact_lengths
    fitted = fit(Problem(model(MHA), speculative_tokens=3))
    assert not fitted.exact_lengths and Role.DRAFT not in fitted.roles(), "vLLM chooses what drafts"


def test_vllm_prefills_mla_itself():
    assert fit(Problem(model(MLA))).roles() == (Role.DECODE,)
    assert fit(Problem(model(MHA))).roles() == (Role.PREFILL, Role.DECODE)


def test_sparse_models_are_refused_on_a_cpu_as_by_vllm():
    sparse = model(replace(MLA, indexer=IndexerDims(4, 64, 64)))
    (reason,) = refuse(fit(Problem(sparse, device="cpu")))
    assert (reason.code, reason.value, reason.allowed) == (RefusalCode.FEATURE, "cpu", "cuda")
    assert not list(refuse(fit(Problem(sparse, device="cuda", sm=90))))


def test_graphs_are_wanted_on_a_gpu():
    assert [fit(Problem(model(MHA), device=device)).wants_graphs for device in ("cpu", "cuda")] == [False, True]


def test_linear_layers_are_left_to_vllm():
    fitted = fit(Problem(model(MHA, GDN)))
    assert fitted.model is not None and fitted.model.layers == (replace(MHA, layer_id=0),)
    assert not list(refuse(Problem(model(MHA, GDN))))


def test_a_model_of_linear_layers_alone_is_refused():
    (reason,) = refuse(Problem(model(GDN)))
    assert "all layers are linear (gdn)" in reason.message


def test_vllms_indexer_selects_the_rows_of_sparse_layers_and_backends_prefill_them():
    fitted = fit(Problem(model(replace(MLA, indexer=IndexerDims(4, 64, 64)))))
    assert fitted.model is not None and fitted.model.is_sparse and not fitted.model.index_layers
    assert fitted.roles() == (Role.PREFILL, Role.DECODE)
    assert not list(refuse(fitted))


def sparse_problem(monkeypatch: pytest.MonkeyPatch, sm: int | None, version: str | None, **given: Any) -> Problem:
    """Problem of a sparse model, with this version of vLLM installed."""
    monkeypatch.setattr(HostSpec, "installed", lambda self: version)
    return Problem(model(replace(MLA, indexer=IndexerDims(4, 64, 64))), device="cuda", sm=sm, **given)


@pytest.mark.parametrize(("sm", "refused"), [(80, True), (89, True), (90, False), (120, False), (None, False)])
@pytest.mark.parametrize("version", ["0.32.0", None])
def test_gpus_on_which_vllms_indexer_does_not_run_are_refused_by_number(monkeypatch, version, sm, refused):
    """If it cannot be replaced: these versions call its kernels."""
    problem = sparse_problem(monkeypatch, sm, version)
    assert [(reason.code, reason.value) for reason in refuse(problem)] == [(RefusalCode.SM, sm)] * refused
    (layer,) = fit(problem).model.layers
    assert layer.indexer.shares == INDEX_BY_HOST and fit(problem).index_dtype is None


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_our_index_replaces_vllms_on_other_gpus(monkeypatch, sm):
    """A10: from keys in fp8, as vLLM's cache has them."""
    problem = sparse_problem(monkeypatch, sm, "0.26.0", dtype=DType.FLOAT16)
    assert not list(refuse(problem))
    fitted = fit(problem)
    (layer,) = fitted.model.layers
    assert layer.indexer.shares is None and fitted.index_dtype == DType.FLOAT8_E4M3
    dense = fit(replace(problem, model=model(MLA)))
    assert dense.index_dtype is None
    (reason,) = refuse(replace(problem, speculative_tokens=3))
    assert reason.code == RefusalCode.FEATURE


@pytest.mark.parametrize(("sm", "refused"), [(80, True), (86, True), (89, False), (120, False)])
def test_queries_that_vllm_cannot_quantize_are_refused_with_its_option(monkeypatch, sm, refused):
    problem = sparse_problem(monkeypatch, sm, "0.26.0", dtype=DType.BFLOAT16)
    assert [(reason.code, reason.setting) for reason in refuse(problem)] == [(RefusalCode.DTYPE, "dtype")] * refused


def test_compressed_entries_are_refused():
    (reason,) = refuse(Problem(model(replace(MLA, sliding_window=64, compressed=CompressedDims(4)))))
    assert reason.code == RefusalCode.FEATURE


@pytest.mark.parametrize("sparse", [True, False])
def test_the_packed_rows_of_sparse_mla_are_for_sparse_mla(sparse):
    """E2"""
    layer = replace(MLA, indexer=IndexerDims(4, 64, 64) if sparse else None)
    assert len(list(refuse(Problem(model(layer), kv_dtype="fp8_ds_mla")))) == (not sparse)


def test_blocks_are_multiples_of_16():
    (reason,) = refuse(Problem(model(MHA), page_size=24))
    assert reason.format(render) == "page size 24 is not supported, only multiples of 16 (change --block-size)"
    assert not list(refuse(Problem(model(MHA), page_size=48)))


@pytest.mark.parametrize(
    ("version", "known"), [("0.26.0", True), ("0.32.1+cpu", True), ("0.25.1", False), ("0.34.0", False)]
)
def test_versions_outside_the_range_are_refused_by_number(version, known):
    reason = HOST.version_refusal(version)
    assert (reason is None) is known
    if reason is not None:
        printed = reason.format(render)
        assert version in printed and HOST.versions in printed and "pip install" in printed


def test_it_is_read_without_torch_and_without_vllm():
    code = "import sys, attnplug_vllm.host; sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_is_found_by_its_entry_point():
    found, bridge = load_host("vllm")
    assert found is HOST and bridge.distribution == "attnplug-vllm"


def test_a_kv_format_that_vllm_has_no_pages_for_is_refused() -> None:
    """E2"""
    (reason,) = refuse(Problem(model(MHA), kv_dtype="acme_int4"))
    assert (reason.code, reason.value, reason.setting) == ("kv_dtype", "acme_int4", "kv_dtype")
    assert {"float16", "nvfp4"} <= set(reason.allowed)
    assert not list(refuse(Problem(model(MHA), kv_dtype="float8_e4m3fn")))
    assert not list(refuse(Problem(model(MHA), kv_dtype="fp8_per_token_head")))


def test_latent_rows_have_no_format_of_a_plugin() -> None:
    """E2: vLLM writes and gathers them itself."""
    (reason,) = refuse(Problem(model(MLA), kv_dtype="fp8_per_token_head"))
    assert (reason.code, reason.value, reason.setting) == ("kv_dtype", "fp8_per_token_head", "kv_dtype")


@pytest.mark.parametrize("sm", [80, 89, 120])
def test_sparse_models_need_attnplug_sparse_where_vllms_index_does_not_run(monkeypatch, sm):
    problem = sparse_problem(monkeypatch, sm, "0.26.0", dtype=DType.FLOAT16)
    assert not list(refuse(problem))
    monkeypatch.setattr("attnplug_vllm.host.find_spec", lambda name: None)
    (reason,) = refuse(problem)
    assert reason.code is RefusalCode.SM and "attnplug-sparse" in reason.format(render)
