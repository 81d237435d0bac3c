"""EAGLE and EAGLE-2: Llama layers over a token's embedding and the target's last hidden state before it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import Block, LoadedModel, hidden_norm
from attnplug_engine.models.grouped_attention import GroupedAttention
from attnplug_engine.models.layers import MLP, Linear, Projection, check_activation, embedded
from attnplug_engine.models.rope import Rope
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.speculation.drafts.model import LAST, DraftModel
from attnplug_engine.speculation.drafts.shared import own_embedding, own_head


class EagleDraft(DraftModel):
    """EAGLE draft. The first layer has no norm before its attention, and there is no norm behind the last layer."""

    hidden_inputs = LAST

    def __init__(self, weights: Weights, config: Config, spec: ModelSpec, target: LoadedModel) -> None:
        hidden = config.integer("hidden_size")
        super().__init__(spec.for_rank(weights.parallel.size), hidden)
        check_activation(config)
        norm = hidden_norm(config)
        self.embedding = own_embedding(weights, target)
        self.join = joined(weights, 2 * hidden, hidden)
        self.rope = Rope(config, spec.layers[0].head_dim, dtype=weights.dtype, device=weights.device)

        def block(layer: LayerSpec) -> Block:
            own = weights.at(f"layers.{layer.layer_id}")
            attention, mlp = llama_attention(own, config, layer), llama_mlp(own, config)
            return Block(own, norm, attention, mlp, norms_input=layer.layer_id > 0)

        self.layers = nn.ModuleList([block(layer) for layer in spec.layers])
        self.head = own_head(weights, "lm_head.weight", target)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor | None, batch: ForwardBatch, step: int = 0
    ) -> Tensor:
        assert hidden is not None
        rows = self.join(torch.cat((embedded(input_ids, self.embedding), hidden), dim=-1))
        rotation = self.rope.at(positions)
        for layer in self.layers:
            rows = layer(rows, rotation, batch)
        return rows

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        return cast(Tensor, self.head(hidden))


def joined(weights: Weights, inputs: int, hidden: int) -> Projection:
    """Load the projection ``fc`` of joined states; some checkpoints have a bias for it."""
    rows = [WeightRows("fc", hidden, slice(0, hidden))]
    return Linear.stacked(weights, rows, inputs, bias=weights.holds("fc.bias"))


def llama_attention(
    weights: Weights, config: Config, layer: LayerSpec, *, inputs: int | None = None
) -> GroupedAttention:
    """Build Llama's attention from a layer's weights; ``qkv_bias`` for drafts of Qwen2."""
    bias, hidden = config.flag("attention_bias"), config.integer("hidden_size")
    qkv_bias = bias or config.flag("qkv_bias")
    return GroupedAttention(weights.at("self_attn"), layer, hidden, qkv_bias=qkv_bias, out_bias=bias, inputs=inputs)


def llama_mlp(weights: Weights, config: Config) -> MLP:
    hidden, intermediate = config.integer("hidden_size"), config.integer("intermediate_size")
    return MLP(weights.at("mlp"), hidden, intermediate, bias=config.flag("mlp_bias"))
