"""Architectures against transformers on the same checkpoint, at odd sizes: chunked prefill, prefix hits, preemption."""

from __future__ import annotations

import json

import pytest
import torch
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug import UsageError
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model, load_spec
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_engine.request import SamplingParams
from attnplug_testing.errors import having, naming
from attnplug_testing.rounded_oracle import watched_logits

NEW_TOKENS = 9
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}
"""GQA ratio 3; with a head_dim of its own, heads * head_dim differs from the hidden size."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.3 * index for index in range(6)],
    "long_factor": [9.0] * 6,
}
CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "granite": (
        {**HEADS, "attention_bias": True, "tie_word_embeddings": True},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 36, "mlp_bias": True},
    ),
    "smollm3": (
        {**HEADS, "use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1, 1, 0]},
        {"no_rope_layer_interval": 3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ({**HEADS, "attention_bias": True}, {"num_key_value_heads": 1, "rope_parameters": LLAMA3}),
    "phi3": (
        {**HEADS, "sliding_window": 5, "partial_rotary_factor": 0.75},
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "hidden_size": 48,
            "partial_rotary_factor": 0.75,
            "sliding_window": None,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
        },
    ),
    "gemma2": (
        {**HEADS, "head_dim": 20, "sliding_window": 5, "query_pre_attn_scalar": 24},
        {"num_key_value_heads": 1, "attention_bias": True, "attn_logit_softcapping": None, "num_hidden_layers": 2},
    ),
    "gemma3_text": (
        {
            **HEADS,
            "head_dim": 20,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        {"num_key_value_heads": 4, "attention_bias": True, "final_logit_softcapping": 3.0, "layer_types": None,
         "sliding_window_pattern": 2},
    ),
    "mixtral": (
        {**HEADS, "head_dim": 20, "sliding_window": 5, "num_local_experts": 3},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "num_experts_per_tok": 1, "rope_theta": 100.0},
    ),
    "qwen2_moe": (
        {**HEADS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "norm_topk_prob": True},
        {"num_hidden_layers": 3, "decoder_sparse_step": 2, "qkv_bias": False, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": (
        {**HEADS, "head_dim": 20, "use_sliding_window": True, "sliding_window": 5, "num_experts": 5},
        {"mlp_only_layers": [0], "attention_bias": True, "norm_topk_prob": False, "num_key_value_heads": 1},
    ),
    "glm4_moe": (
        {**HEADS, "head_dim": 20, "attention_bias": True, "n_routed_experts": 6, "n_group": 3, "topk_group": 2},
        {"use_qk_norm": False, "partial_rotary_factor": 0.25, "n_shared_experts": 2, "routed_scaling_factor": 2.5,
         "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "gpt_oss": (
        {**HEADS, "head_dim": 20, "sliding_window": 5, "num_local_experts": 3},
        {"num_key_value_heads": 4, "attention_bias": False, "swiglu_limit": 1.5, "num_hidden_layers": 3,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "kimi_k2": (
        {"num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 6, "q_lora_rank": None,
         "qk_nope_head_dim": 12, "v_head_dim": 20},
        {"n_group": 2, "topk_group": 1, "attention_bias": True, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
}  # fmt: skip
"""Two configurations of each architecture, as changes to its tiny model. Windows are smaller than a page."""


def prompts() -> list[list[int]]:
    """Different lengths; the second and third begin alike, so that one finds the other's pages."""
    random = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in (1, 25, 33, 14)]
    drawn[2][:20] = drawn[1][:20]
    return drawn


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [pytest.param(name, changes, id=f"{name}-{index}") for name in CASES for index, changes in enumerate(CASES[name])],
)
@pytest.mark.sample(len(CASES) // 2)
def test_tokens_and_logits_equal_those_of_transformers(model_type, changes, make_oracle):
    oracle = make_oracle(model_type, **changes)
    engine = Engine(str(oracle.folder), device="cpu", page_size=8, num_pages=8, chunked_prefill_size=7, ignore_eos=True)
    with watched_logits() as seen:
        completions = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    assert engine.scheduler.preemptions > 0 and engine.cache_statistics.hit_tokens >= 8
    for prompt, completion, number in zip(prompts(), completions, sorted(seen), strict=True):
        wanted = oracle.logits([*prompt, *completion.token_ids[:-1]])[len(prompt) - 1 :]
        assert_close(torch.stack(seen[number]), wanted, atol=2e-4, rtol=1e-4)
        assert completion.token_ids == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("model_type", CASES)
@pytest.mark.sample(4)
def test_two_ranks_give_the_logits_of_transformers(model_type, make_oracle, make_stage, sequences):
    oracle = make_oracle(model_type)

    def run(parallel):
        loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu", parallel=parallel)
        return make_stage(loaded, len(sequences)).run(sequences, 3)

    for found in in_ranks(2, run):
        for tokens, logits in zip(sequences, found, strict=True):
            assert_close(logits, oracle.logits(tokens), atol=2e-4, rtol=1e-4)


def test_ranks_that_would_share_keys_that_are_normed_together_are_refused():
    with pytest.raises(ParallelError, check=having(2, 4)) as caught:
        load_model("tiny:olmo2", dtype=torch.float32, device="cpu", parallel=Threads(4).rank(0))
    assert (caught.value.count, caught.value.size) == (2, 4)


def test_the_context_ends_where_cached_keys_would_need_another_rotation(make_oracle):
    """Longrope has other frequencies at all positions once a sequence is longer than the original length."""
    oracle = make_oracle("phi3", **CASES["phi3"][1])
    assert load_spec(str(oracle.folder)).context_length == 64
    engine = Engine(str(oracle.folder), device="cpu", page_size=8)
    assert len(engine.generate([[1] * 60], SamplingParams(max_tokens=9))[0].token_ids) == 4
    with pytest.raises(UsageError, check=naming(64, 63)):
        engine.generate([[1] * 64], SamplingParams(max_tokens=1))


def test_the_first_phi_3_calls_longrope_su(make_oracle):
    oracle = make_oracle("phi3", **CASES["phi3"][1])
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    scaling = {"type": "su", **{key: rope[key] for key in ("short_factor", "long_factor")}}
    outer = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    path.write_text(json.dumps({**config, **outer, "rope_scaling": scaling}))
    (completion,) = Engine(str(oracle.folder), device="cpu", ignore_eos=True).generate([[1, 2, 3]], max_tokens=4)
    assert completion.token_ids == oracle.logits([1, 2, 3, *completion.token_ids[:-1]])[2:].argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model_type", CASES)
def test_same_tokens_on_a_gpu(model_type, make_oracle):
    """In captured steps, with Triton kernels."""
    oracle = make_oracle(model_type)
    engine = Engine(str(oracle.folder), device="cuda", page_size=16, chunked_prefill_size=16, ignore_eos=True)
    for prompt, completion in zip(prompts(), engine.generate(prompts(), max_tokens=NEW_TOKENS), strict=True):
        wanted = oracle.logits([*prompt, *completion.token_ids[:-1]])[len(prompt) - 1 :]
        assert completion.token_ids == wanted.argmax(-1).tolist()
