"""Softmax attention with experts in place of MLPs: Mixtral, Qwen2-MoE, Qwen3-MoE, GLM-4.5."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import Decoder, norm_eps
from attnplug_engine.models.experts import MixtureOfExperts, SigmoidRouter, expert_layers, qwen_mlps
from attnplug_engine.models.grouped_attention import HeadNorms
from attnplug_engine.models.softmax_decoder import make_attention, make_mlp, make_rope, softmax_decoder
from attnplug_engine.models.weights import Weights

# Defaults of transformers' config classes for absent keys.
MIXTRAL_DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL_ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts"}
QWEN2_DEFAULTS: Mapping[str, object] = {
    "decoder_sparse_step": 1,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
}
QWEN3_DEFAULTS: Mapping[str, object] = {
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
QWEN3_ALIASES: Mapping[str, str] = {"num_local_experts": "num_experts"}
GLM_DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
GLM_ALIASES: Mapping[str, str] = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}


def mixtral(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Mixtral: Mistral with experts in every layer."""

    def experts(weights: Weights, index: int) -> nn.Module:
        return MixtureOfExperts.mixtral(weights.at("block_sparse_moe"), config)

    return softmax_decoder(weights, config, spec, make_attention(config), experts)


def qwen2_moe(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen2-MoE: Qwen2 with experts and a gated shared expert."""
    if any(layer.sliding_window for layer in spec.layers) and not config.flag("use_sliding_window"):
        raise config.wrong("layer_types", "without sliding layers, as 'use_sliding_window' is not true")
    mlp, attention = qwen_mlps(config, shared=True), make_attention(config, qkv_bias=config.flag("qkv_bias"))
    return softmax_decoder(weights, config, spec, attention, lambda weights, index: mlp(weights.at("mlp"), index))


def qwen3_moe(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen3-MoE: Qwen3 with experts."""
    mlp, bias = qwen_mlps(config, shared=False), config.flag("attention_bias")
    attention = make_attention(config, qkv_bias=bias, out_bias=bias, norms=HeadNorms(norm_eps(config)))
    return softmax_decoder(weights, config, spec, attention, lambda weights, index: mlp(weights.at("mlp"), index))


def glm4_moe(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """GLM-4.5: DeepSeek-V3's experts behind the first dense layers; rotary positions on a part of each head."""
    norms = HeadNorms(norm_eps(config)) if config.flag("use_qk_norm") else None
    attention = make_attention(config, qkv_bias=config.flag("attention_bias"), norms=norms)
    dense, has_experts = make_mlp(config), expert_layers(config)

    def mlp(weights: Weights, index: int) -> nn.Module:
        if has_experts[index]:
            return MixtureOfExperts.deepseek(weights.at("mlp"), config, SigmoidRouter)
        return dense(weights, index)

    rope = make_rope(weights, config, spec, partial=True)
    return softmax_decoder(weights, config, spec, attention, mlp, rope=rope)
