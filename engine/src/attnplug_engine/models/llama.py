"""Llama, and the models that differ from it in a bias or a norm: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from torch import nn

from attnplug.config_keys import Config
from attnplug.model import LayerSpec, ModelSpec
from attnplug_engine.models.decoder import EPS, Decoder
from attnplug_engine.models.grouped_attention import GroupedAttention
from attnplug_engine.models.layers import GatedMLP, check_activation
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
    eps = config.optional_number("rms_norm_eps", least=0.0)
    norm_eps = (EPS if eps is None else eps) if head_norms else None

    def attention(weights: Weights, layer: LayerSpec) -> GroupedAttention:
        return GroupedAttention(weights, layer, hidden, qkv_bias=qkv_bias, out_bias=out_bias, norm_eps=norm_eps)

    def mlp(weights: Weights, layer: LayerSpec) -> nn.Module:
        return GatedMLP(weights, hidden, intermediate, bias=mlp_bias)

    rope = Rope(config, spec.layers[0].head_dim, dtype=weights.dtype, device=weights.device)
    return Decoder(weights, config, spec, rope, attention, mlp)
