"""Models of ``decode_h200.py``, and lower bounds of the bytes and operations of their steps.

Two dense models of 1.1B parameters, and two mixtures of experts: the published layers of DeepSeek-V2-Lite and
Qwen3-Next-80B, fewer of them and with fewer experts, so that each has about 3B parameters. All have a vocabulary of
32000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

BYTES_PER_SECOND = 4.2e12
"""Peak read bandwidth of an H200; copies reach 4.26e12, reads and writes together."""
TFLOPS = 707
"""Rate of a plain bf16 matmul of 8192³ on an H200."""
_ITEM = 2  # bytes of a bf16 number
_STATE_ITEM = 4  # recurrent states are float32

_SHARED = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, Config] = {
    "llama": {
        **_SHARED,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
    },
    "mla": {  # no layer has experts; config classes require their sizes
        **_SHARED,
        **_LATENT,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 16,
        "first_k_dense_replace": 16,
        "intermediate_size": 8192,
        "q_lora_rank": 1536,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
    },
    "moe": {  # DeepSeek-V2-Lite: 10 of its 27 layers, 32 of its 64 experts
        **_SHARED,
        **_LATENT,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_hidden_layers": 10,
        "first_k_dense_replace": 1,
        "intermediate_size": 10944,
        "q_lora_rank": None,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "hybrid": {  # Qwen3-Next-80B-A3B: 12 of its 48 layers, 64 of its 512 experts
        **_SHARED,
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 12,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 64,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
    },
}
DENSE = ("llama", "mla")
_SMALLER = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "q_lora_rank": 24,
    "n_routed_experts": 8,
    "num_experts": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "dtype": "float32",
}


def smaller(config: Config) -> Config:
    """Tiny model of the same kind for a CPU."""
    layers = 4 if "layer_types" in config else 2
    made = {**config, **{key: value for key, value in _SMALLER.items() if config.get(key) is not None}}
    made["num_hidden_layers"] = layers
    if "layer_types" in config:
        made["layer_types"] = config["layer_types"][:layers]
    if "head_dim" in config:
        made["head_dim"] = 16
    made["num_key_value_heads"] = 4 if "kv_lora_rank" in config else 2
    return made


def _is_linear(config: Config, layer: int) -> bool:
    return "layer_types" in config and config["layer_types"][layer] == "linear_attention"


def _attention(config: Config, layer: int) -> int:
    """Parameters of a layer's attention; norms are left out, here and elsewhere."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if _is_linear(config, layer):
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        convolution = (2 * keys + values) * config["linear_conv_kernel_dim"]
        return hidden * (2 * keys + 3 * values + 2 * config["linear_num_value_heads"]) + convolution
    if "kv_lora_rank" in config:
        latent, nope, rope = (config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
        value, rank = config["v_head_dim"], config["q_lora_rank"]
        queries = heads * (nope + rope)
        query = hidden * queries if rank is None else rank * (hidden + queries)
        return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    width, groups = config["head_dim"], config["num_key_value_heads"]
    gated = 2 if "layer_types" in config else 1  # Qwen3-Next's queries come with a gate of the same size
    return hidden * width * (gated * heads + 2 * groups) + heads * width * hidden


def _experts(config: Config, layer: int) -> int:
    """Number of routed experts of a layer; 0 if its MLP is dense."""
    if "num_experts" in config:
        return int(config["num_experts"])
    sparse = "n_routed_experts" in config and layer >= config["first_k_dense_replace"]
    return int(config["n_routed_experts"]) if sparse else 0


def has_experts(config: Config) -> bool:
    """Return True if a layer is a mixture of experts."""
    return any(_experts(config, layer) for layer in range(config["num_hidden_layers"]))


def distinct_experts(experts: int, per_token: int, batch: int) -> float:
    """Expected number of distinct experts of ``batch`` tokens with uniform routing."""
    return experts * (1 - (1 - per_token / experts) ** batch) if experts else 0.0


def _mlp(config: Config, layer: int, batch: int | None) -> float:
    """Parameters of a layer's MLP that a step of ``batch`` tokens reads; all of them for ``None``."""
    hidden, experts = config["hidden_size"], _experts(config, layer)
    if not experts:
        return 3 * hidden * config["intermediate_size"]
    width = config["moe_intermediate_size"]
    read = experts if batch is None else distinct_experts(experts, config["num_experts_per_tok"], batch)
    if "shared_expert_intermediate_size" in config:
        shared = 3 * hidden * config["shared_expert_intermediate_size"] + hidden
    else:
        shared = 3 * hidden * width * config["n_shared_experts"]
    return hidden * experts + 3 * hidden * width * read + shared


def parameters(config: Config, *, batch: int | None = None, ends: int = 2) -> float:
    """Parameters of a model, or those that a decode step of ``batch`` tokens reads.

    ``ends`` counts embedding and head: a decode step reads only the head, a prefill almost nothing of both.
    """
    layers = range(config["num_hidden_layers"])
    inside = sum(_attention(config, layer) + _mlp(config, layer, batch) for layer in layers)
    return inside + ends * config["vocab_size"] * config["hidden_size"]


def cache_bytes(config: Config, batch: int, context: int) -> float:
    """Bytes of cached rows that a decode step reads, and of states that it reads and writes."""
    row, state = 0, 0
    for layer in range(config["num_hidden_layers"]):
        if _is_linear(config, layer):
            keys, values = config["linear_key_head_dim"], config["linear_value_head_dim"]
            state += 2 * _STATE_ITEM * config["linear_num_value_heads"] * keys * values
        elif "kv_lora_rank" in config:
            row += config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            row += 2 * config["num_key_value_heads"] * config["head_dim"]
    return batch * (context * row * _ITEM + state)


def limit_us(config: Config, batch: int, context: int) -> float:
    """Lower bound of a decode step's time: bytes to read over the peak bandwidth."""
    moved = _ITEM * parameters(config, batch=batch, ends=1) + cache_bytes(config, batch, context)
    return 1e6 * moved / BYTES_PER_SECOND


def prefill_flops(config: Config, tokens: int) -> float:
    """Operations of a dense model's prefill of one prompt: matmuls and causal attention, one row through the head."""
    if "kv_lora_rank" in config:
        width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"]
    else:
        width = 2 * config["head_dim"]
    attention = config["num_hidden_layers"] * config["num_attention_heads"] * width * tokens**2
    return 2 * tokens * parameters(config, ends=0) + attention
