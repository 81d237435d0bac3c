"""Ring-2.5 and Ling-2.5: Lightning attention with rotary positions, interleaved with latent attention, DeepSeek's
experts.

Their checkpoints have the model type ``bailing_hybrid``, like those of Ling-3, which is another model. So the type has
a name of its own here, which must be set in a checkpoint's config.json. transformers has no such model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import nn

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import Attention, Block, Decoder, Names, hidden_norm, norm_eps
from attnplug_engine.models.experts import MixtureOfExperts, SigmoidRouter
from attnplug_engine.models.latent_attention import LatentAttention
from attnplug_engine.models.layers import MLP, check_activation
from attnplug_engine.models.lightning_attention import RotaryLightningAttention
from attnplug_engine.models.rope import Rope
from attnplug_engine.models.weights import Weights

DEFAULTS: Mapping[str, object] = {
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "group_norm_size": 1,
    "n_group": 1,
    "topk_group": 1,
}
ALIASES: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "linear_silu": "use_linear_silu",
}
PREDICTION = (r"^model\.mtp\.",)
NAMES = Names("model", "word_embeddings", "norm")


def ring_linear(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    check_activation(config)
    check_activation(config, "score_function", "sigmoid")
    if config.lookup("linear_rope") is False:
        raise config.wrong("linear_rope", "true")
    width = config.integer("moe_intermediate_size")
    if (config.optional_integer("moe_shared_expert_intermediate_size") or width) != width:
        raise config.wrong("moe_shared_expert_intermediate_size", f"moe_intermediate_size, which is {width}")
    norm, hidden, eps = hidden_norm(config), config.integer("hidden_size"), norm_eps(config)
    layers, first_sparse = config.layer_count(), config.integer("first_k_dense_replace", least=0)
    norm_groups = config.integer("group_norm_size")
    normed = config.integer("num_attention_heads") * config.integer("head_dim")
    if normed % norm_groups:
        raise config.wrong("group_norm_size", f"a divisor of num_attention_heads * head_dim, which is {normed}")
    router = partial(SigmoidRouter, bias="expert_bias")

    def attention(weights: Weights, layer: LayerSpec) -> Attention:
        if not layer.kind.is_linear:
            return LatentAttention(weights, layer, config, deinterleave=True, eps=eps, out="dense")
        return RotaryLightningAttention(
            weights,
            layer,
            hidden,
            layers,
            eps,
            norm_groups=norm_groups,
            head_norms=config.flag("use_qk_norm"),
            silu=config.flag("use_linear_silu"),
            qkv_bias=config.flag("use_bias") or config.flag("use_qkv_bias"),
            out_bias=config.flag("use_bias"),
        )

    def mlp(weights: Weights, layer: LayerSpec) -> nn.Module:
        if layer.layer_id >= first_sparse:
            return MixtureOfExperts.deepseek(weights, config, router)
        return MLP(weights, hidden, config.integer("intermediate_size"))

    def block(layer: LayerSpec) -> Block:
        own = weights.at(NAMES.layer(layer.layer_id))
        return Block(own, norm, attention(own.at("attention"), layer), mlp(own.at("mlp"), layer))

    rope = Rope(config, config.integer("head_dim"), dtype=weights.dtype, device=weights.device, partial=True)
    # One rotation serves both kinds of layers: of a latent row, only the rotary part is passed to it.
    if rope.width != config.integer("qk_rope_head_dim"):
        raise config.wrong("qk_rope_head_dim", f"the part of head_dim that is rotated, which is {rope.width}")
    return Decoder(weights, config, norm, rope, [block(layer) for layer in spec.layers], NAMES)
