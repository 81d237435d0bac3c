"""Gemma 2 and 3: norms before and after attention and MLP, sliding windows, scaled embeddings, capped logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config, ModelConfigError
from attnplug_engine.models.decoder import Decoder, OutputNormBlock, ScaledDecoder, hidden_norm, norm_eps
from attnplug_engine.models.grouped_attention import HeadNorms
from attnplug_engine.models.layers import GATED_BY_GELU
from attnplug_engine.models.rope import LayerRopes, Rope
from attnplug_engine.models.softmax_decoder import make_attention, make_mlp, make_rope, softmax_decoder
from attnplug_engine.models.weights import Weights

# Defaults of transformers' config classes for absent keys: gemma-3-4b-it's config has few others.
DEFAULTS: Mapping[str, object] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
DEFAULTS_3: Mapping[str, object] = {
    **DEFAULTS,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
}
_THETAS = {"full_attention": ("rope_theta", 1e6), "sliding_attention": ("rope_local_base_freq", 1e4)}
"""Config key of a layer type's rope base outside of the rope section, and its default."""


def gemma2(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Gemma 2: norms before and after attention and MLP, caps on scores and logits, windows in every other layer."""
    return _decoder(weights, config, spec)


def gemma3_text(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """Gemma 3's text model: Gemma 2 with norms on queries and keys, without caps. Sliding layers have another rope."""
    ropes = [_rope(weights, config, spec, kind) for kind in _THETAS]
    return _decoder(weights, config, spec, HeadNorms(norm_eps(config), zero_centred=True), LayerRopes(*ropes))


def _decoder(
    weights: Weights, config: Config, spec: ModelSpec, norms: HeadNorms | None = None, ropes: LayerRopes | None = None
) -> Decoder:
    bias = config.flag("attention_bias")
    attention = make_attention(
        config,
        qkv_bias=bias,
        out_bias=bias,
        norms=norms,
        rope=None if ropes is None else lambda layer: 0 if layer.sliding_window is None else 1,
    )
    # Rounded to the model's dtype, as in transformers: 55.5 instead of 55.4256 in bfloat16 for a width of 3072.
    embedding_factor = torch.tensor(config.integer("hidden_size") ** 0.5, dtype=weights.dtype).item()
    logit_cap = config.optional_number("final_logit_softcapping")
    return softmax_decoder(
        weights,
        config,
        spec,
        attention,
        make_mlp(config, form=GATED_BY_GELU),
        norm=hidden_norm(config, zero_centred=True),
        block=partial(OutputNormBlock, norms_input=True),
        rope=ropes,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        kind=partial(ScaledDecoder, embedding_factor=embedding_factor, logit_cap=logit_cap),
    )


def _rope(weights: Weights, config: Config, spec: ModelSpec, kind: str) -> Rope:
    """Return the rope of one layer type. Errors name the key in that type's section."""
    own = _rope_config(config, kind)
    try:
        return make_rope(weights, own, spec)
    except ModelConfigError as error:
        key = (error.key or "").replace("rope_parameters.", f"rope_parameters.{kind}.")
        raise ModelConfigError(error.message.replace(repr(error.key), repr(key)), error.source, key) from error


def _rope_config(config: Config, kind: str) -> Config:
    """Return a config with the rope keys of one layer type only. ``rope_scaling`` is for full layers."""
    given, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    if given is not None and given.values and not given.values.keys() <= _THETAS.keys():
        raise config.wrong("rope_parameters", f"an object with the keys {', '.join(map(repr, _THETAS))}")
    own = None if given is None else given.section(kind)
    values, name = {} if own is None else dict(own.values), "rope_parameters"
    if kind == "full_attention" and scaling is not None:
        values, name = {**values, **scaling.values}, "rope_scaling"
    key, default = _THETAS[kind]
    outside = config.optional_number(key)
    values.setdefault("rope_theta", default if outside is None else outside)
    return replace(config, values={name: values, "max_position_embeddings": config.lookup("max_position_embeddings")})
