"""Qwen3-Next and Qwen3.5: Gated DeltaNet, with gated softmax attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Attention, Block, Decoder, hidden_norm, norm_eps
from attnplug_engine.models.delta_attention import GatedDeltaNet
from attnplug_engine.models.experts import MakeMLP, qwen_mlps
from attnplug_engine.models.grouped_attention import GroupedAttention, HeadNorms
from attnplug_engine.models.layers import MLP, check_activation
from attnplug_engine.models.rope import Rope
from attnplug_engine.models.weights import Weights

DEFAULTS: Mapping[str, object] = {"partial_rotary_factor": 0.25}
NEXT_DEFAULTS: Mapping[str, object] = {**DEFAULTS, "decoder_sparse_step": 1, "norm_topk_prob": True}
PREDICTION = (r"^mtp\.",)
"""Layers for multi-token prediction, which the decoder does not use."""


def qwen3_next(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen3-Next: Gated DeltaNet, gated attention, and experts. Projections of linear layers are stored by key head."""
    return _decoder(weights, config, spec, qwen_mlps(config, shared=True), grouped=True)


def qwen3_5(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen3.5's text model: as Qwen3-Next, without experts. All three positions of a token are equal."""
    return _decoder(weights, config, spec, _dense_mlp(config), grouped=False)


def next_prediction_block(weights: Weights, config: Config, layer: LayerSpec) -> Block:
    """Build Qwen3-Next's block of a layer for multi-token prediction: always softmax attention."""
    return _softmax_block(weights, config, layer, qwen_mlps(config, shared=True))


def prediction_block(weights: Weights, config: Config, layer: LayerSpec) -> Block:
    """Build Qwen3.5's block of a layer for multi-token prediction."""
    return _softmax_block(weights, config, layer, _dense_mlp(config))


def _dense_mlp(config: Config) -> MakeMLP:
    hidden, intermediate = config.integer("hidden_size"), config.integer("intermediate_size")
    return lambda weights, index: MLP(weights, hidden, intermediate)


def _softmax_block(weights: Weights, config: Config, layer: LayerSpec, mlp: MakeMLP) -> Block:
    attention = _softmax(weights.at("self_attn"), config, layer)
    norm = hidden_norm(config, zero_centred=True)
    return Block(weights, norm, attention, mlp(weights.at("mlp"), layer.layer_id))


def _softmax(weights: Weights, config: Config, layer: LayerSpec) -> GroupedAttention:
    hidden, bias = config.integer("hidden_size"), config.flag("attention_bias")
    norms = HeadNorms(norm_eps(config), zero_centred=True)
    return GroupedAttention(weights, layer, hidden, qkv_bias=bias, out_bias=bias, norms=norms, gated=True)


def _decoder(weights: Weights, config: Config, spec: ModelSpec, mlp: MakeMLP, *, grouped: bool) -> Decoder:
    check_activation(config)
    hidden, eps, norm = config.integer("hidden_size"), norm_eps(config), hidden_norm(config, zero_centred=True)

    def attention(weights: Weights, layer: LayerSpec) -> Attention:
        if layer.kind.is_linear:
            return GatedDeltaNet(weights.at("linear_attn"), layer, hidden, eps, grouped=grouped)
        return _softmax(weights.at("self_attn"), config, layer)

    def block(layer: LayerSpec) -> Block:
        own = weights.at(MODEL.layer(layer.layer_id))
        return Block(own, norm, attention(own, layer), mlp(own.at("mlp"), layer.layer_id))

    blocks = [block(layer) for layer in spec.layers]
    head_dim = config.integer("head_dim")
    rope = Rope(config, head_dim, dtype=weights.dtype, device=weights.device, partial=True)
    return Decoder(weights, config, norm, rope, blocks)
