"""Llama, and dense models that differ from it in biases, norms, ropes or factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config, rope_section, rope_type, rope_type_key
from attnplug.hf.model_layers import rotary_layers
from attnplug_engine.models.decoder import Decoder, OutputNormBlock, ScaledBlock, ScaledDecoder, norm_eps
from attnplug_engine.models.grouped_attention import HeadNorms
from attnplug_engine.models.layers import GATED_PACKED
from attnplug_engine.models.rope import LONGROPE, LayerRopes, NoRope
from attnplug_engine.models.softmax_decoder import make_attention, make_mlp, make_rope, softmax_decoder
from attnplug_engine.models.weights import Weights

# Defaults of transformers' config classes for absent keys.
GRANITE_DEFAULTS: Mapping[str, object] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
SMOLLM3_DEFAULTS: Mapping[str, object] = {"rope_theta": 2_000_000.0, "tie_word_embeddings": True}
OLMO2_DEFAULTS: Mapping[str, object] = {"rms_norm_eps": 1e-5}
PHI3_DEFAULTS: Mapping[str, object] = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}


def llama(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Llama: ``attention_bias`` is on all four projections, ``mlp_bias`` on all three."""
    bias, mlp = config.flag("attention_bias"), make_mlp(config, bias=config.flag("mlp_bias"))
    return softmax_decoder(weights, config, spec, make_attention(config, qkv_bias=bias, out_bias=bias), mlp)


def mistral(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Mistral: Llama without biases, with a window in every layer."""
    return softmax_decoder(weights, config, spec, make_attention(config), make_mlp(config))


def qwen2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen2: biases on q, k and v always, on the output never."""
    return softmax_decoder(weights, config, spec, make_attention(config, qkv_bias=True), make_mlp(config))


def qwen3(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Qwen3: a norm on each head of queries and keys, before their rotation."""
    bias, norms = config.flag("attention_bias"), HeadNorms(norm_eps(config))
    attention = make_attention(config, qkv_bias=bias, out_bias=bias, norms=norms)
    return softmax_decoder(weights, config, spec, attention, make_mlp(config))


def granite(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Granite: factors on embeddings, on scores, on logits and on what a block adds."""
    bias, mlp = config.flag("attention_bias"), make_mlp(config, bias=config.flag("mlp_bias"))
    attention = make_attention(config, qkv_bias=bias, out_bias=bias)
    block = partial(ScaledBlock, weight=config.number("residual_multiplier"))
    embedding_factor, logit_factor = config.number("embedding_multiplier"), 1.0 / config.number("logits_scaling")
    kind = partial(ScaledDecoder, embedding_factor=embedding_factor, logit_factor=logit_factor)
    return softmax_decoder(weights, config, spec, attention, mlp, block=block, kind=kind)


def smollm3(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """SmolLM3: some layers, by default every fourth, have no rotary positions."""
    bias, mlp, rotary = (
        config.flag("attention_bias"),
        make_mlp(config, bias=config.flag("mlp_bias")),
        rotary_layers(config),
    )
    attention = make_attention(
        config, qkv_bias=bias, out_bias=bias, rope=lambda layer: 0 if rotary[layer.layer_id] else 1
    )
    rope = LayerRopes(make_rope(weights, config, spec), NoRope())
    return softmax_decoder(weights, config, spec, attention, mlp, rope=rope)


def olmo2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Olmo 2: norms on outputs instead of inputs, and on the queries and the keys of all heads together."""
    bias = config.flag("attention_bias")
    attention = make_attention(config, qkv_bias=bias, out_bias=bias, row_eps=norm_eps(config))
    return softmax_decoder(weights, config, spec, attention, make_mlp(config), block=OutputNormBlock)


def phi3(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Phi-3: packed projections, and rotary positions on a part of each head."""
    section = rope_section(config)
    if rope_type(section) not in ("default", *LONGROPE):
        raise section.wrong(rope_type_key(section), "'default' or 'longrope' for model type 'phi3'")
    if rope_type(section) in LONGROPE:
        key = section.path.rstrip(".").rpartition(".")[2]
        named = {**section.values, "rope_type": "longrope"}
        config = replace(config, values={**config.values, key: named})
    attention, mlp = make_attention(config, packed="qkv_proj"), make_mlp(config, form=GATED_PACKED)
    return softmax_decoder(weights, config, spec, attention, mlp, rope=make_rope(weights, config, spec, partial=True))
