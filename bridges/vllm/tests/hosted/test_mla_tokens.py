"""The same greedy tokens as vLLM's own backend and as transformers give, in float32, for MLA."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import pytest
import torch

from attnplug import DType
from attnplug.host import load_model
from attnplug_testing.errors import naming
from attnplug_testing.measured import measured_twins
from attnplug_vllm import selection
from engines import AGAIN, PROMPTS, asking, engine, generate, planned, prompts_of, runner, tokens, use_context_ranks
from mla_models import OPTIONS, MLAModels

OURS = {"AttnplugCPUMLAImpl"}
BOTH = asking(prefill="torch_native")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> MLAModels:
    return MLAModels(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """vLLM leaves chunked prefill and the prefix cache on for MLA with AMX. Nothing of it runs here, in float32."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def impls(llm: Any) -> set[str]:
    """The classes that run the layers of attention."""
    layers = runner(llm).compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")}


def builder_of(llm: Any) -> Any:
    (builder,) = (group.get_metadata_builder() for groups in runner(llm).attn_groups for group in groups)
    return builder


def test_vllms_own_backend_is_left_alone_and_agrees_with_transformers(deepseek):
    """The plugin is installed but not requested."""
    with engine(deepseek.path("dense"), {**OPTIONS["dense"], "attention_backend": "CPU_MLA"}) as llm:
        assert impls(llm) == {"CPUMLAImpl"}
        assert tokens(llm, PROMPTS) == deepseek.expected("dense", PROMPTS)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="of CPUs, vLLM chunks MLA on x86 alone")
def test_chunks_of_64_in_blocks_of_16_and_prefix_hits(deepseek, monkeypatch):
    """C1: new tokens, then chunks of cached context, merged by vLLM; both kinds of call are ours."""
    from attnplug_vllm.mla_prefill import RaggedPrefill

    chunked: list[int] = []
    call = RaggedPrefill.context_chunk
    monkeypatch.setattr(
        RaggedPrefill, "context_chunk", lambda self, index, *rest: (chunked.append(index), call(self, index, *rest))[1]
    )
    options = {**OPTIONS["dense"], **BOTH, "block_size": 16, "max_num_batched_tokens": 64}
    with engine(deepseek.path("dense"), options) as llm:
        seen = planned(monkeypatch)
        assert impls(llm) == OURS
        assert tokens(llm, PROMPTS) == deepseek.expected("dense", PROMPTS)
        assert set(seen) == {"decode"} and chunked
        found = generate(llm, AGAIN)
        assert [list(one.outputs[0].token_ids) for one in found] == deepseek.expected("dense", AGAIN)
        assert max(one.num_cached_tokens for one in found) >= 256


def test_vllms_own_prefill_stays_unless_one_is_named_and_decode_goes_by_batch(deepseek, monkeypatch, tmp_path):
    """With a table for this machine, long requests are decoded by another backend than short ones."""
    (layer, *_) = load_model(deepseek.path("dense")).layers
    twins = measured_twins(monkeypatch, tmp_path, layer, DType.FLOAT32)
    monkeypatch.setattr(selection, "registry", lambda: twins)
    makers = planned(monkeypatch, lambda batch: batch.plan.attention.planner_names()[0])
    options = {**OPTIONS["dense"], **asking("auto"), "block_size": 64, "enforce_eager": False}
    with engine(deepseek.path("dense"), options) as llm:
        assert impls(llm) == OURS and runner(llm).compilation_config.mode != 0
        assert type(builder_of(llm)._prefill_backend).__module__.startswith("vllm.")
        expected = deepseek.expected("dense", PROMPTS)
        makers.clear()
        assert tokens(llm, PROMPTS) == expected
        assert set(makers) == {"beta"}
        makers.clear()
        assert tokens(llm, PROMPTS[:1]) == expected[:1]  # 5 tokens, and 24 new ones
        assert makers == sorted(makers) and set(makers) == {"alpha", "beta"}


def test_a_mixture_of_experts(deepseek):
    """vLLM routes such a config in another way than transformers, so it is compared with itself."""
    path, some = deepseek.path("moe"), PROMPTS[:6]
    with engine(path, {**OPTIONS["moe"], "attention_backend": "CPU_MLA"}) as llm:
        expected = tokens(llm, some)
    with engine(path, {**OPTIONS["moe"], **BOTH, "block_size": 32, "max_num_batched_tokens": 96}) as llm:
        assert impls(llm) == OURS
        assert tokens(llm, some) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (asking(prefill="torch_native", backend="flashmla"), "'flashmla'"),
        ({**asking(), "kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla has the rows of sparse MLA"),
        (
            {**BOTH, "attention_config": {"backend": "CUSTOM", "mla_prefill_backend": "FLASH_ATTN"}},
            "mla_prefill_backend FLASH_ATTN",
        ),
    ],
    ids=["name", "cache", "prefill"],
)
def test_what_cannot_be_is_refused_before_weights_are_loaded(deepseek, changes, reason, tmp_path):
    """D3: there are none."""
    shutil.copy(f"{deepseek.path('dense')}/config.json", tmp_path)
    if "attention_config" in changes:
        changes = {key: value for key, value in changes.items() if key != "attention_backend"}
    with pytest.raises(ValueError, check=naming(reason)), engine(str(tmp_path), {**OPTIONS["dense"], **changes}):
        pass


def test_two_tensor_parallel_ranks_in_processes_of_their_own_verify_drafts(deepseek, monkeypatch):
    """Uniform batches of four tokens per request, and batches with shorter drafts. Runs in separate processes: numba
    makes the drafts, and vLLM does not start an engine after it was imported."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    given = [*PROMPTS[:4], *(prompt * 6 for prompt in prompts_of(6, 7, 8, seed=7))]
    options = {**OPTIONS["dense"], **BOTH, "block_size": 16, "tensor_parallel_size": 2, "speculative_config": drafts}
    with engine(deepseek.path("dense"), options) as llm:
        assert tokens(llm, given) == deepseek.expected("dense", given)


def test_two_ranks_that_share_the_rows_of_a_request(deepseek, monkeypatch):
    """Decode context parallelism: each rank has every other latent row, and vLLM merges partial results."""
    options = {**OPTIONS["dense"], **asking(), **use_context_ranks(monkeypatch)}
    with engine(deepseek.path("dense"), options) as llm:
        assert tokens(llm, PROMPTS) == deepseek.expected("dense", PROMPTS)
