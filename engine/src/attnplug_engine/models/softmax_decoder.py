"""Parts that decoders with softmax attention in every layer have in common: their attention, MLPs and blocks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Attention, Block, Decoder, MakeNorm, hidden_norm
from attnplug_engine.models.grouped_attention import GroupedAttention, HeadNorms
from attnplug_engine.models.layers import GATED, MLP, MLPForm, check_activation
from attnplug_engine.models.rope import Positions, Rope
from attnplug_engine.models.weights import Weights

MakeAttention = Callable[[Weights, LayerSpec], Attention]
"""Builds the attention of a layer, from the weights under ``self_attn``."""
MakeBlockMLP = Callable[[Weights, int], nn.Module]
"""Builds the MLP or experts of a layer by its index, from the weights of its block."""
MakeBlock = Callable[[Weights, MakeNorm, Attention, nn.Module], nn.Module]

SILU = ("hidden_act", "silu")
"""Config key of the activation, and its supported value."""


def softmax_decoder(
    weights: Weights,
    config: Config,
    spec: ModelSpec,
    attention: MakeAttention,
    mlp: MakeBlockMLP,
    *,
    norm: MakeNorm | None = None,
    block: MakeBlock = Block,
    rope: Positions | None = None,
    activation: tuple[str, str] = SILU,
    kind: Callable[..., Decoder] = Decoder,
) -> Decoder:
    """Build a decoder of equal blocks. By default they are Llama's: norms before attention and MLP, one rope."""
    check_activation(config, *activation)
    norm = norm or hidden_norm(config)

    def make(layer: LayerSpec) -> nn.Module:
        own = weights.at(MODEL.layer(layer.layer_id))
        return block(own, norm, attention(own.at("self_attn"), layer), mlp(own, layer.layer_id))

    return kind(weights, config, norm, rope or make_rope(weights, config, spec), [make(each) for each in spec.layers])


def make_rope(weights: Weights, config: Config, spec: ModelSpec, *, partial: bool = False) -> Rope:
    return Rope(config, spec.layers[0].head_dim, dtype=weights.dtype, device=weights.device, partial=partial)


def make_attention(
    config: Config,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norms: HeadNorms | None = None,
    row_eps: float | None = None,
    packed: str | None = None,
    rope: Callable[[LayerSpec], int] | None = None,
) -> MakeAttention:
    """Return a builder of ``GroupedAttention``. ``rope`` returns the index of a layer's rope among the model's."""
    hidden = config.integer("hidden_size")
    return lambda weights, layer: GroupedAttention(
        weights,
        layer,
        hidden,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        norms=norms,
        row_eps=row_eps,
        packed=packed,
        rope=None if rope is None else rope(layer),
    )


def make_mlp(config: Config, *, form: MLPForm = GATED, bias: bool = False) -> MakeBlockMLP:
    """Return a builder of dense MLPs."""
    hidden, intermediate = config.integer("hidden_size"), config.integer("intermediate_size")
    return lambda weights, index: MLP(weights.at("mlp"), hidden, intermediate, form=form, bias=bias)
