"""Nemotron-H: each block is one of Mamba-2, attention without positions, an MLP with relu², or experts of such MLPs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import BACKBONE, Attention, Decoder, MixerBlock, TokenWise, hidden_norm
from attnplug_engine.models.experts import Experts, LatentExperts, MixtureOfExperts, SigmoidRouter
from attnplug_engine.models.grouped_attention import GroupedAttention
from attnplug_engine.models.layers import MLP, SQUARED, Linear, check_activation
from attnplug_engine.models.mamba import MambaMixer
from attnplug_engine.models.rope import NoRope
from attnplug_engine.models.weights import WeightRows, Weights

DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
ALIASES: Mapping[str, str] = {"layer_norm_epsilon": "rms_norm_eps"}
PREDICTION = (r"^mtp\.",)
"""Layers for multi-token prediction, which the decoder does not use."""

_MLP, _EXPERTS, _ATTENTION = "mlp", "moe", "attention"
_KINDS: Mapping[str | int, str] = {
    "mlp": _MLP,
    "moe": _EXPERTS,
    **dict.fromkeys(("mamba", "attention", "linear_attention", "full_attention"), _ATTENTION),
}
_LETTERS: Mapping[str | int, str] = {"M": _ATTENTION, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}


def nemotron_h(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    check_activation(config, "mlp_hidden_act", "relu2")
    check_activation(config, "mamba_hidden_act")
    norm, hidden = hidden_norm(config), config.integer("hidden_size")
    layers = {layer.layer_id: layer for layer in spec.layers}
    # transformers bounds the step of this model not by ``time_step_limit``, and not at all in its one-token path.
    limits = (config.number("time_step_min", least=0.0), math.inf)

    def mixer(weights: Weights, index: int, kind: str) -> Attention:
        if kind == _MLP:
            width, bias = config.integer("intermediate_size"), config.flag("mlp_bias")
            return TokenWise(MLP(weights, hidden, width, form=SQUARED, bias=bias))
        if kind == _EXPERTS:
            return TokenWise(_experts(weights, config, hidden))
        layer = layers[index]
        if layer.kind.is_linear:
            return MambaMixer(weights, layer, config, limits, norm_groups=config.integer("n_groups"))
        return GroupedAttention(weights, layer, hidden)

    def block(index: int, kind: str) -> MixerBlock:
        own = weights.at(BACKBONE.layer(index))
        return MixerBlock(own, norm, mixer(own.at("mixer"), index, kind))

    blocks = [block(index, kind) for index, kind in enumerate(_kinds(config))]
    return Decoder(weights, config, norm, NoRope(), blocks, BACKBONE)


def _kinds(config: Config) -> list[str]:
    """Return the kind of each block, from the list or from the older pattern string, which core has read already."""
    key, known = "layers_block_type", _KINDS
    if config.lookup(key) is None:
        key, known = "hybrid_override_pattern", _LETTERS
        config = replace(config, values={**config.values, key: list(config.optional_text(key) or "")})
    return config.choices(key, known) or []


def _experts(weights: Weights, config: Config, hidden: int) -> nn.Module:
    count, width = config.integer("n_routed_experts"), config.integer("moe_intermediate_size")
    latent, bias = config.optional_integer("moe_latent_size"), config.flag("mlp_bias")
    routed = Experts(weights.at("experts"), count, latent or hidden, width, form=SQUARED)
    experts: Experts | LatentExperts = routed
    if latent is not None:
        down = Linear.stacked(weights, [WeightRows("fc1_latent_proj", latent, slice(0, latent))], hidden, bias=bias)
        up = Linear.row_parallel(weights.at("fc2_latent_proj"), latent, hidden, slice(0, latent), bias=bias)
        experts = LatentExperts(down, routed, up)
    shared = config.integer("moe_shared_expert_intermediate_size")
    return MixtureOfExperts(
        SigmoidRouter(weights.at("gate"), config, count),
        experts,
        MLP(weights.at("shared_experts"), hidden, shared, form=SQUARED, bias=bias),
        adds=weights.parallel.rank == 0,
    )
