"""Sparse MLA over vLLM's own classes, driven directly: vLLM's CPU platform refuses to run sparse attention at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from attnplug_vllm import backends
from engines import VOCABULARY, asking
from vllm_stage import run_sparse_layers_on_cpu

HEADS, RANK, ROPE, BLOCK, TOPK, SCALE = 4, 512, 64, 64, 16, 0.1
NAME = "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration of a tiny DeepSeek-V3.2."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this version of transformers has no DeepSeek-V3.2")
    config = transformers.DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        kv_lora_rank=RANK,
        q_lora_rank=32,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=TOPK,
        max_position_embeddings=1024,
        architectures=["DeepseekV32ForCausalLM"],
    )
    folder = tmp_path_factory.mktemp("deepseek_v32")
    config.save_pretrained(folder)
    return folder


def engine_config(model: Path) -> VllmConfig:
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 8}
    config = EngineArgs(model=str(model), **options, **asking("torch_sparse")).create_engine_config()
    config.cache_config.block_size = BLOCK
    return config


@contextmanager
def one_rank(config: VllmConfig, folder: Path) -> Iterator[None]:
    """The current configuration, with process groups of one rank."""
    cleanup_dist_env_and_memory()  # an engine that was refused in another test leaves its groups
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(backend="gloo")
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def batch(lengths: list[tuple[int, int]]) -> CommonAttentionMetadata:
    """Metadata of requests with (rows before, new tokens), in blocks of their own."""
    new = torch.tensor([count for _, count in lengths], dtype=torch.int32)
    total = torch.tensor([before + count for before, count in lengths], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)])
    table = torch.arange(1, 1 + 8 * len(lengths), dtype=torch.int32).view(len(lengths), 8)
    slots = [
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (before, count) in enumerate(lengths)
        for position in range(before, before + count)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=total,
        num_reqs=len(lengths),
        num_actual_tokens=int(new.sum()),
        max_query_len=int(new.max()),
        max_seq_len=int(total.max()),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
        causal=True,
        seq_lens_cpu_upper_bound=total.clone(),
    )


def layer_of(impl: Any, cache: Tensor) -> Any:
    return SimpleNamespace(
        impl=impl,
        kv_cache_dtype="auto",
        kv_cache=cache,
        layer_name=NAME,
        _k_scale_float=1.0,
        prefill_backend=None,  # as where no backend of vLLM's prefills: all tokens attend to selected rows
    )


@pytest.mark.parametrize("lengths", [[(100, 1), (30, 1)], [(100, 1), (0, 70), (3, 2)]])
def test_builder_and_layer_run_on_vllms_own_metadata(model, lengths, tmp_path, monkeypatch):
    """A10: decode, and decode with prefill, against float64."""
    run_sparse_layers_on_cpu(monkeypatch)
    config = engine_config(model)
    with one_rank(config, tmp_path):
        backend = backends.Custom
        assert backend.is_sparse() and backend.is_mla()
        buffer = torch.full((256, TOPK), -1, dtype=torch.int32)
        impl = backend.get_impl_cls()(
            num_heads=HEADS,
            head_size=RANK + ROPE,
            scale=SCALE,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=32,
            kv_lora_rank=RANK,
            qk_nope_head_dim=32,
            qk_rope_head_dim=ROPE,
            qk_head_dim=32 + ROPE,
            v_head_dim=32,
            kv_b_proj=None,
            indexer=SimpleNamespace(topk_indices_buffer=buffer),
        )
        cache = torch.randn(8 * len(lengths) + 1, BLOCK, RANK + ROPE)
        layer = layer_of(impl, cache)
        config.compilation_config.static_forward_context[NAME] = layer
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.float32)
        builder = backend.get_builder_cls()(spec, [NAME], config, CPU)
        given = batch(lengths)
        q, want, row = torch.randn(given.num_actual_tokens, HEADS, RANK + ROPE), [], 0
        flat = cache.view(-1, RANK + ROPE).double()
        for request, (before, count) in enumerate(lengths):
            for position in range(before, before + count):
                chosen = torch.randperm(position + 1)[:TOPK]
                buffer[row, : len(chosen)] = chosen.int()
                slots = given.block_table_tensor[request, chosen // BLOCK].long() * BLOCK + chosen % BLOCK
                keys = flat[slots]
                want.append(torch.softmax(q[row].double() @ keys.T * SCALE, -1) @ keys[:, :RANK])
                row += 1
        step = builder.build(0, given)
        out, lse = impl.forward_mqa((q[..., :RANK], q[..., RANK:]), cache, step, layer)
    assert lse is None
    torch.testing.assert_close(out.double(), torch.stack(want), atol=1e-4, rtol=1e-4)
    assert step.num_decodes + step.num_prefills == len(lengths)
