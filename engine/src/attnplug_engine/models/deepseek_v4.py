"""DeepSeek-V4: compressed attention, hyper-connections, and experts that are in part chosen by the token id."""

from __future__ import annotations

from collections.abc import Mapping

from attnplug import LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.compressed_attention import CompressedAttention, TwoRopes
from attnplug_engine.models.decoder import Names, hidden_norm
from attnplug_engine.models.hash_experts import HashExperts
from attnplug_engine.models.hyper_connections import HyperBlock, HyperDecoder
from attnplug_engine.models.layers import check_activation
from attnplug_engine.models.weights import Weights

DEFAULTS: Mapping[str, object] = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "o_groups": 8,
    "o_lora_rank": 1024,
}
"""Defaults of transformers' config class for absent keys."""

PREDICTION = (r"(^|\.)mtp\.",)
NAMES = Names("model", "embed_tokens", "norm", head="head.weight")


def deepseek_v4(weights: Weights, config: Config, spec: ModelSpec) -> HyperDecoder:
    check_activation(config)
    check_activation(config, "scoring_func", "sqrtsoftplus")
    if config.integer("n_shared_experts") != 1:
        raise config.wrong("n_shared_experts", "1")
    if config.lookup("norm_topk_prob") is False:
        raise config.wrong("norm_topk_prob", "true: shares add up to one")
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key):
            raise config.wrong(key, "false")
    norm, ropes, hashed = hidden_norm(config), TwoRopes(config, weights.device), _hashed(config)
    if any(layer.indexer is not None and layer.indexer.head_dim < ropes.width for layer in spec.layers):
        raise config.wrong("index_head_dim", f"at least {ropes.width}, the columns that are rotated")

    def block(layer: LayerSpec) -> HyperBlock:
        own = weights.at(NAMES.layer(layer.layer_id))
        attention = CompressedAttention(own.at("attn"), layer, config, ropes)
        experts = HashExperts(own.at("ffn"), config, hashed=hashed[layer.layer_id])
        return HyperBlock(own, config, norm, attention, experts)

    return HyperDecoder(weights, config, norm, ropes, [block(layer) for layer in spec.layers], NAMES)


def _hashed(config: Config) -> list[bool]:
    """Return, per layer, True if its experts are chosen by the token id: those that are listed so, or the first
    ones."""
    count = config.layer_count()
    listed = config.choices("mlp_layer_types", {"hash_moe": True, "moe": False})
    if listed is None:
        first = config.integer("num_hash_layers", least=0)
        return [index < first for index in range(count)]
    if len(listed) < count:
        raise config.error(f"has {len(listed)} entries; it must have one for each of the {count} layers",
                           "mlp_layer_types")  # fmt: skip
    return listed[:count]
