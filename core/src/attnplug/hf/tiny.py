"""Core's tiny models: Hugging Face configs of real architectures, small enough to run on any CPU within seconds.

Each is the ``config.json`` of a model of that type, so transformers builds the same model and serves as its oracle. The
exception is ``ring_linear``, which transformers does not have. ``initializer_range`` is large on purpose: with the
usual 0.02 random logits are nearly flat, and a wrong attention output would barely change them.
"""

from __future__ import annotations

from collections.abc import Mapping

TINY = "tiny:"
"""Prefix of a reference to a tiny model."""


def _tiny(model_type: str, architecture: str, /, **keys: object) -> dict[str, object]:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": 128,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.25,
        "dtype": "float32",
        **keys,
    }


_DENSE = {"intermediate_size": 96}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_DEEPSEEK = {
    **_DENSE,
    **_MLA,
    **_EXPERTS,
    "n_routed_experts": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
}
# An index that selects few of a short prompt's rows. With fewer heads, scores of exactly zero would be common.
_INDEX = {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 16}
_GDN = {
    **_DENSE,
    **_GQA,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"n_groups": 2, "conv_kernel": 4, "chunk_size": 16, "expand": 2}

_MODELS = (
    _tiny("llama", "LlamaForCausalLM", **_DENSE, **_GQA, num_hidden_layers=2, head_dim=16),
    _tiny("qwen3", "Qwen3ForCausalLM", **_DENSE, **_GQA, num_hidden_layers=2, head_dim=32),
    _tiny("deepseek_v2", "DeepseekV2ForCausalLM", **_DEEPSEEK, topk_method="greedy"),
    _tiny("deepseek_v3", "DeepseekV3ForCausalLM", **_DEEPSEEK, num_nextn_predict_layers=1),
    _tiny("deepseek_v32", "DeepseekV32ForCausalLM", **_DEEPSEEK, **_INDEX),
    _tiny(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        **{**_DEEPSEEK, "num_hidden_layers": 4},
        **_INDEX,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    _tiny(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.25,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        # Real models have windows of 128 tokens and entries of 4 and 128 tokens.
        sliding_window=8,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        **{**_INDEX, "index_topk": 4},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        swiglu_limit=2.0,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000.0,
                "partial_rotary_factor": 0.25,
                "factor": 16.0,
                "original_max_position_embeddings": 256,
                "attention_factor": 1.0,
            },
        },
        bos_token_id=0,
        eos_token_id=None,
    ),
    _tiny(
        "kimi_linear",
        "KimiLinearForCausalLM",
        **_DENSE,
        **_MLA,
        **_EXPERTS,
        num_hidden_layers=5,
        layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
        q_lora_rank=None,
        num_local_experts=4,
        linear_head_dim=16,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        # The defaults of these three are outside a vocabulary of 128.
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    ),
    _tiny(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        **_GDN,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    _tiny("qwen3_5_text", "Qwen3_5ForCausalLM", **_GDN),
    _tiny(
        "minimax",
        "MiniMaxForCausalLM",
        **_DENSE,
        **_GQA,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=16,
    ),
    _tiny(
        "ring_linear",
        "BailingMoeV2_5ForCausalLM",
        **_DENSE,
        **_MLA,
        **_EXPERTS,
        num_hidden_layers=4,
        layer_group_size=4,
        first_k_dense_replace=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        num_experts=4,
        routed_scaling_factor=2.5,
        group_norm_size=2,
        use_qk_norm=True,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    ),
    _tiny("mamba2", "Mamba2ForCausalLM", **_MAMBA, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16),
    _tiny(
        "nemotron_h",
        "NemotronHForCausalLM",
        **_DENSE,
        **_GQA,
        **_MAMBA,
        **_EXPERTS,
        layers_block_type=["mamba", "moe", "mamba", "attention", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
        use_mamba_kernels=False,
    ),
)

TINY_CONFIGS: Mapping[str, Mapping[str, object]] = {str(config["model_type"]): config for config in _MODELS}
"""Configs by model type. Core's plugin registers them, like the tiny models of other plugins."""
