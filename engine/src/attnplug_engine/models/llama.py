"""Llama, and models that differ from it in a bias or a norm: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Block, Decoder, hidden_norm, norm_eps
from attnplug_engine.models.grouped_attention import GroupedAttention, HeadNorms
from attnplug_engine.models.layers import MLP, check_activation
from attnplug_engine.models.rope import Rope
from attnplug_engine.models.weights import Weights


def llama(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Llama: ``attention_bias`` is on all four projections, ``mlp_bias`` on all three."""
    bias = config.flag("attention_bias")
    return _decoder(weights, config, spec, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))


def mistral(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Mistral: Llama without biases; its window is in the layers' spec."""
    return _decoder(weights, config, spec)


def qwen2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen2: biases on q, k and v always, on the output never."""
    return _decoder(weights, config, spec, qkv_bias=True)


def qwen3(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen3: a norm on each head of queries and keys, before their rotation."""
    bias = config.flag("attention_bias")
    return _decoder(weights, config, spec, qkv_bias=bias, out_bias=bias, head_norms=True)


def _decoder(
    weights: Weights,
    config: Config,
    spec: ModelSpec,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> Decoder:
    check_activation(config)
    hidden, intermediate = config.integer("hidden_size"), config.integer("intermediate_size")
    norm, head_norm = hidden_norm(config), HeadNorms(norm_eps(config)) if head_norms else None

    def block(layer: LayerSpec) -> Block:
        own = weights.at(MODEL.layer(layer.layer_id))
        attention = GroupedAttention(
            own.at("self_attn"), layer, hidden, qkv_bias=qkv_bias, out_bias=out_bias, norms=head_norm
        )
        return Block(own, norm, attention, MLP(own.at("mlp"), hidden, intermediate, bias=mlp_bias))

    rope = Rope(config, spec.layers[0].head_dim, dtype=weights.dtype, device=weights.device)
    return Decoder(weights, config, norm, rope, [block(layer) for layer in spec.layers])
