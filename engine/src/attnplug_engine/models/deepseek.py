"""DeepSeek-V2, V3 and V3.2, and GLM-5: latent attention, dense or sparse, and experts behind the first dense layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Attention, Block, Decoder, hidden_norm
from attnplug_engine.models.experts import MixtureOfExperts, Router, SigmoidRouter, SoftmaxRouter, expert_layers
from attnplug_engine.models.latent_attention import LatentAttention
from attnplug_engine.models.layers import MLP, check_activation
from attnplug_engine.models.rope import HalfRotation, PairRotation, Rope
from attnplug_engine.models.sparse_attention import SparseLatentAttention, check_indexer
from attnplug_engine.models.weights import Weights

# Defaults of transformers' config classes for absent keys.
V2_DEFAULTS: Mapping[str, object] = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1536,
}
V3_DEFAULTS: Mapping[str, object] = {
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
V32_DEFAULTS: Mapping[str, object] = {**V3_DEFAULTS, "indexer_rope_interleave": False}
GLM_DEFAULTS: Mapping[str, object] = {
    **V3_DEFAULTS,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 2048,
    "rms_norm_eps": 1e-5,
    "indexer_rope_interleave": True,
}


def deepseek_v2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """DeepSeek-V2: softmax router; rotated pairs stay interleaved, in queries and in the cache."""
    _check_scoring(config, "softmax")
    return _decoder(weights, config, spec, SoftmaxRouter, rotation=PairRotation, mlp_bias=config.flag("mlp_bias"))


def deepseek_v3(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """DeepSeek-V3 and Kimi-K2: sigmoid router with a bias; rotated rows are evens, then odds."""
    _check_scoring(config, "sigmoid")
    if config.optional_text("topk_method") not in (None, "noaux_tc"):
        raise config.wrong("topk_method", "'noaux_tc'")
    return _decoder(weights, config, spec, SigmoidRouter, deinterleave=config.flag("rope_interleave"))


def deepseek_v32(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """DeepSeek-V3.2 and GLM-5: V3 with an indexer in each layer, or in some of them. Their rope is interleaved."""
    if config.lookup("rope_interleave") is False:
        raise config.wrong("rope_interleave", f"true for model type {config.model_type!r}")
    check_indexer(config)
    return deepseek_v3(weights, config, spec)


def prediction_block(weights: Weights, config: Config, layer: LayerSpec) -> Block:
    """Build V3's block of a layer for multi-token prediction. It follows the dense layers, so it has experts."""
    deinterleave = config.flag("rope_interleave")
    attention = LatentAttention(weights.at("self_attn"), layer, config, deinterleave=deinterleave)
    experts = MixtureOfExperts.deepseek(weights.at("mlp"), config, SigmoidRouter)
    return Block(weights, hidden_norm(config), attention, experts)


def _decoder(
    weights: Weights,
    config: Config,
    spec: ModelSpec,
    router: type[Router],
    *,
    rotation: type[HalfRotation] | type[PairRotation] = HalfRotation,
    deinterleave: bool = False,
    mlp_bias: bool = False,
) -> Decoder:
    check_activation(config)
    if config.lookup("moe_layer_freq") not in (None, 1):
        raise config.wrong("moe_layer_freq", "1: experts in every layer after the dense ones")
    has_experts = expert_layers(config)
    hidden = config.integer("hidden_size")

    norm = hidden_norm(config)

    def mlp(weights: Weights, layer: LayerSpec) -> nn.Module:
        if has_experts[layer.layer_id]:
            return MixtureOfExperts.deepseek(weights, config, router)
        return MLP(weights, hidden, config.integer("intermediate_size"), bias=mlp_bias)

    def attention(weights: Weights, layer: LayerSpec) -> Attention:
        if layer.indexer is None:
            return LatentAttention(weights, layer, config, deinterleave=deinterleave)
        index_interleave = config.flag("indexer_rope_interleave")
        return SparseLatentAttention(
            weights, layer, config, deinterleave=deinterleave, index_interleave=index_interleave
        )

    def block(layer: LayerSpec) -> Block:
        own = weights.at(MODEL.layer(layer.layer_id))
        return Block(own, norm, attention(own.at("self_attn"), layer), mlp(own.at("mlp"), layer))

    width = config.integer("qk_rope_head_dim")
    rope = Rope(config, width, dtype=weights.dtype, device=weights.device, rotation=rotation)
    return Decoder(weights, config, norm, rope, [block(layer) for layer in spec.layers])


def _check_scoring(config: Config, scoring: str) -> None:
    if (config.optional_text("scoring_func") or scoring) != scoring:
        raise config.wrong("scoring_func", f"{scoring!r} for model type {config.model_type!r}")
