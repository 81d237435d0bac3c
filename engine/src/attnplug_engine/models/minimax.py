"""MiniMax: Lightning attention interleaved with softmax attention, experts in every layer, residuals from normed
states."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import MODEL, Attention, Decoder, MakeNorm, hidden_norm
from attnplug_engine.models.experts import MixtureOfExperts
from attnplug_engine.models.grouped_attention import GroupedAttention
from attnplug_engine.models.layers import check_activation
from attnplug_engine.models.lightning_attention import LightningAttention
from attnplug_engine.models.rope import Rope, Rotation
from attnplug_engine.models.weights import Weights

DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    **{f"{part}_{factor}_factor": 1.0 for part in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")},
}
ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts"}
COMPUTED = (r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$",)
"""Tensors that transformers stores although the config determines them."""


def minimax(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    check_activation(config)
    norm, hidden, layers = hidden_norm(config), config.integer("hidden_size"), config.layer_count()

    def block(layer: LayerSpec) -> NormedSumBlock:
        own = weights.at(MODEL.layer(layer.layer_id))
        linear = layer.kind.is_linear
        attention = (
            LightningAttention(own.at("self_attn"), layer, hidden, layers)
            if linear
            else GroupedAttention(own.at("self_attn"), layer, hidden)
        )
        factors = (_factors(config, "linear_attn" if linear else "full_attn"), _factors(config, "mlp"))
        experts = MixtureOfExperts.mixtral(own.at("block_sparse_moe"), config)
        return NormedSumBlock(own, norm, attention, experts, factors)

    head_dim = spec.layers[0].head_dim
    rope = Rope(config, head_dim, dtype=weights.dtype, device=weights.device)
    return Decoder(weights, config, norm, rope, [block(layer) for layer in spec.layers])


class NormedSumBlock(nn.Module):
    """Attention and MLP with residuals from the normed input instead of the input, both weighted.

    ``factors`` of attention and of the MLP: that of the norm, and that of the term added to it.
    """

    def __init__(
        self,
        weights: Weights,
        norm: MakeNorm,
        attention: Attention,
        mlp: nn.Module,
        factors: tuple[tuple[float, float], tuple[float, float]],
    ) -> None:
        super().__init__()
        self.input_norm = norm(weights.at("input_layernorm"))
        self.attention = attention
        self.mlp_norm = norm(weights.at("post_attention_layernorm"))
        self.mlp = mlp
        self._factors = factors
        self._parallel = weights.parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        (attention_kept, attention_added), (mlp_kept, mlp_added) = self._factors
        hidden = self.input_norm(hidden)
        attended = self._parallel.all_reduce(self.attention(hidden, rotation, batch))
        hidden = self.mlp_norm(attended.mul_(attention_added).add_(hidden, alpha=attention_kept))
        return self._parallel.all_reduce(self.mlp(hidden)).mul_(mlp_added).add_(hidden, alpha=mlp_kept)


def _factors(config: Config, part: str) -> tuple[float, float]:
    return config.number(f"{part}_alpha_factor"), config.number(f"{part}_beta_factor")
