"""Kimi-Linear: Kimi's delta attention, interleaved with latent attention without positions, and DeepSeek's experts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Attention, Block, Decoder, hidden_norm, norm_eps
from attnplug_engine.models.delta_attention import KimiDeltaAttention
from attnplug_engine.models.experts import MixtureOfExperts, SigmoidRouter, expert_layers
from attnplug_engine.models.latent_attention import LatentAttention
from attnplug_engine.models.layers import GATED_BY_NUMBER, MLP, check_activation
from attnplug_engine.models.rope import NoRope
from attnplug_engine.models.weights import Weights

DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
}
ALIASES: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
"""Published names, and those of transformers' attributes, mapped to DeepSeek's names."""

_EXPERTS = "block_sparse_moe"


def kimi_linear(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    check_activation(config)
    check_activation(config, "moe_router_activation_func", "sigmoid")
    if config.lookup("mla_use_nope") is False:
        raise config.wrong("mla_use_nope", "true: no model of this type has rotary positions")
    if config.lookup("moe_layer_freq") not in (None, 1):
        raise config.wrong("moe_layer_freq", "1: experts in every layer after the dense ones")
    norm, hidden, eps = hidden_norm(config), config.integer("hidden_size"), norm_eps(config)
    sparse = expert_layers(config)

    def attention(weights: Weights, layer: LayerSpec) -> Attention:
        if layer.kind.is_linear:
            return KimiDeltaAttention(weights, layer, hidden, eps)
        return LatentAttention(weights, layer, config, deinterleave=False)

    def mlp(weights: Weights, layer: LayerSpec) -> nn.Module:
        if sparse[layer.layer_id]:
            return MixtureOfExperts.deepseek(weights.at(_EXPERTS), config, SigmoidRouter, form=GATED_BY_NUMBER)
        # The published checkpoint stores a dense layer under "mlp"; transformers saves it under the experts' name.
        name = _EXPERTS if weights.holds(f"{_EXPERTS}.gate_proj.weight") else "mlp"
        return MLP(weights.at(name), hidden, config.integer("intermediate_size"))

    def block(layer: LayerSpec) -> Block:
        own = weights.at(MODEL.layer(layer.layer_id))
        return Block(own, norm, attention(own.at("self_attn"), layer), mlp(own, layer))

    return Decoder(weights, config, norm, NoRope(), [block(layer) for layer in spec.layers])
