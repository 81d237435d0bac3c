"""The same greedy tokens as vLLM's own backend and as transformers give, in float32, for MHA and GQA."""

from __future__ import annotations

import pytest
from vllm.v1.kv_cache_interface import KVCacheLayout

from attnplug_vllm.mha import AttnplugBackend
from attnplug_vllm.mla import AttnplugMLABackend
from engines import (
    AGAIN,
    PROMPTS,
    asking,
    engine,
    generate,
    impls,
    planned,
    prompts_of,
    rounded_per_token_head,
    runner,
    scheduler,
    tokens,
    use_context_ranks,
)

OURS = {"AttnplugImpl"}


@pytest.mark.parametrize("backend", [AttnplugBackend, AttnplugMLABackend])
def test_blocks_have_64_rows_unless_vllms_default_is_larger(backend):
    assert [backend.get_preferred_block_size(size) for size in (16, 128)] == [64, 128]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_vllms_own_backend_is_left_alone_and_agrees_with_transformers(models, name):
    """The plugin is installed but not requested."""
    with engine(models.path(name), {"block_size": 32}) as llm:
        assert impls(llm) == {"CPUAttentionBackendImpl"}
        assert tokens(llm, PROMPTS) == models.expected(name, PROMPTS)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_chunks_of_64_in_blocks_of_16_and_prefix_hits(models, name, monkeypatch):
    with engine(models.path(name), {**asking(), "block_size": 16, "max_num_batched_tokens": 64}) as llm:
        seen = planned(monkeypatch)
        assert impls(llm) == OURS
        assert tokens(llm, PROMPTS) == models.expected(name, PROMPTS)
        assert {"mixed", "decode"} <= set(seen)
        found = generate(llm, AGAIN)
        assert [list(one.outputs[0].token_ids) for one in found] == models.expected(name, AGAIN)
        assert max(one.num_cached_tokens for one in found) >= 256


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_whole_prompts_in_blocks_of_64_with_torch_compile(models, name):
    with engine(models.path(name), {**asking("auto"), "block_size": 64, "enforce_eager": False}) as llm:
        assert impls(llm) == OURS and runner(llm).compilation_config.mode != 0
        assert tokens(llm, PROMPTS) == models.expected(name, PROMPTS)


def test_windows_and_full_attention_are_two_groups_with_a_backend_each(models, monkeypatch, capfd):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with engine(models.path("gemma2"), {**asking(), "block_size": 16}) as llm:
        log = "".join(capfd.readouterr())
        (line,) = (line for line in log.splitlines() if "attnplug: " in line)
        assert line.count("prefill by torch_native (requested by --additional-config.attnplug.backend)") == 2
        assert "2 layers, window 48: " in line and "2 layers: " in line
        assert "Cannot use" not in log
        builders = [group.get_metadata_builder() for groups in runner(llm).attn_groups for group in groups]
        windows = [{layer.sliding_window for layer in builder._planner.group.model.layers} for builder in builders]
        assert sorted(windows, key=str) == [{48}, {None}]
        assert tokens(llm, PROMPTS) == models.expected("gemma2", PROMPTS)
        assert len({id(builder._planner.group.ready().backend) for builder in builders}) == 2


@pytest.mark.parametrize("layout", [layout.name for layout in KVCacheLayout])
def test_every_cache_layout_of_vllms(models, layout, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    some = PROMPTS[:5]
    with engine(models.path("llama"), {**asking(), "block_size": 16}) as llm:
        assert tokens(llm, some) == models.expected("llama", PROMPTS)[:5]


def test_preempted_requests_go_on_where_they_were(models, monkeypatch):
    with engine(
        models.path("llama"),
        {**asking(), "block_size": 16, "num_gpu_blocks_override": 44, "enable_prefix_caching": False},
    ) as llm:
        preempted, keep = [], scheduler(llm)._preempt_request
        monkeypatch.setattr(scheduler(llm), "_preempt_request", lambda *a, **k: (preempted.append(1), keep(*a, **k))[1])
        given = prompts_of(60, 61, 62, 63, 64, 65, 66, 67, seed=5)
        assert tokens(llm, given) == models.expected("llama", given)
        assert preempted


def test_one_backend_prefills_and_another_decodes(models, monkeypatch):
    from dataclasses import replace

    from attnplug_vllm import selection

    both = dict(selection.registry().backends)
    native = both["torch_native"]
    both["other"] = replace(native, spec=replace(native.spec, name="other"))
    with_other = replace(selection.registry(), backends=both)
    monkeypatch.setattr(selection, "registry", lambda: with_other)
    options = {**asking(prefill="torch_native", decode="other"), "block_size": 16, "max_num_batched_tokens": 64}
    with engine(models.path("llama"), options) as llm:
        seen = planned(monkeypatch)
        assert tokens(llm, PROMPTS) == models.expected("llama", PROMPTS)
        (builder,) = (group.get_metadata_builder() for groups in runner(llm).attn_groups for group in groups)
        assert builder._planner.group.ready().backend.backend_id.name == "split(torch_native, other)"
        assert builder.reorder_batch_threshold == 1 and {"decode", "extend"} <= set(seen)


def test_an_fp8_cache_is_nearly_as_good(models):
    with engine(models.path("llama"), {**asking(), "block_size": 16, "kv_cache_dtype": "fp8"}) as llm:
        found, expected = tokens(llm, PROMPTS), models.expected("llama", PROMPTS)
        same = sum(mine[0] == theirs[0] for mine, theirs in zip(found, expected, strict=True))
        assert same >= 6
        assert runner(llm).kv_caches[0].element_size() == 1


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC"])
def test_a_format_of_a_plugin_in_vllms_pages(models, layout, monkeypatch):
    """E2: e4m3 rows with a scale per token and head, by ``attnplug-kv-formats``, against keys and values that
    transformers rounds in the same way."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    options = {"block_size": 16, "kv_cache_dtype": "fp8_per_token_head", "max_num_batched_tokens": 64}
    with engine(models.path("llama"), {**asking(), **options}) as llm:
        assert impls(llm) == OURS
        assert runner(llm).kv_caches[0].shape[-1] == 2 * (32 + 4)
        assert tokens(llm, PROMPTS) == models.expected("llama", PROMPTS, rounded_per_token_head)
        assert models.expected("llama", PROMPTS, rounded_per_token_head) != models.expected("llama", PROMPTS)


def test_a_kv_connector_loads_what_another_engine_saved(models, tmp_path, monkeypatch):
    """Layers save their rows to files; a second engine attends to rows that it did not compute."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    options = {"block_size": 16, "kv_transfer_config": connector, "enable_prefix_caching": False}
    some = PROMPTS[4:6]
    for computed in (sum(map(len, some)), 2 * 16):
        with engine(models.path("llama"), {**asking(), **options}) as llm:
            rows = planned(monkeypatch, lambda batch: "" if batch.forward_mode == "decode" else batch.geometry.rows)
            assert impls(llm) == OURS
            assert tokens(llm, some) == models.expected("llama", PROMPTS)[4:6]
            assert sum(filter(None, rows)) <= computed
        assert list(tmp_path.iterdir())


def test_two_tensor_parallel_ranks_in_processes_of_their_own(models, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with engine(models.path("llama"), {**asking(), "block_size": 16, "tensor_parallel_size": 2}) as llm:
        assert tokens(llm, PROMPTS[:4]) == models.expected("llama", PROMPTS)[:4]


def test_two_ranks_that_share_the_rows_of_a_request(models, monkeypatch):
    """Decode context parallelism: each rank has every other row of the only KV head."""
    options = {**asking(), **use_context_ranks(monkeypatch), "max_num_batched_tokens": 64}
    with engine(models.path("llama_mqa"), options) as llm:
        assert tokens(llm, PROMPTS) == models.expected("llama_mqa", PROMPTS)
        found = generate(llm, AGAIN)
        assert [list(one.outputs[0].token_ids) for one in found] == models.expected("llama_mqa", AGAIN)
        assert max(one.num_cached_tokens for one in found) >= 256
