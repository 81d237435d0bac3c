"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases and clipped gates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import Decoder
from attnplug_engine.models.experts import Experts, MixtureOfExperts, TopKRouter
from attnplug_engine.models.latent_attention import evens_then_odds
from attnplug_engine.models.layers import ClippedGate, MLPForm, frozen
from attnplug_engine.models.softmax_decoder import make_attention, softmax_decoder
from attnplug_engine.models.weights import Weights
from attnplug_engine.parallel.collectives import even_part, length, scaled

DEFAULTS: Mapping[str, object] = {
    "attention_bias": True,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
"""Defaults of transformers' config class for absent keys."""
ALIASES: Mapping[str, str] = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
"""Published names of keys."""


def gpt_oss(weights: Weights, config: Config, spec: ModelSpec) -> Decoder:
    """gpt-oss: sinks, windows in every other layer, experts with biases and clipped gates."""
    bias = config.flag("attention_bias")
    attention = make_attention(config, qkv_bias=bias, out_bias=bias)
    gate = ClippedGate(config.number("swiglu_limit"), config.number("swiglu_alpha"), offset=1.0)
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    count = config.integer("num_local_experts")

    def experts(weights: Weights, index: int) -> nn.Module:
        own = weights.at("mlp")
        router = TopKRouter(own.at("router"), config, count, biased=True)
        return MixtureOfExperts(
            router, StackedExperts(own.at("experts"), count, hidden, width, gate), adds=weights.parallel.rank == 0
        )

    return softmax_decoder(weights, config, spec, attention, experts)


class StackedExperts(Experts):
    """Experts with biases whose stored tensors hold all experts, transposed, with the columns of gate and up in turn:
    ``gate_up_proj [experts, hidden, 2 * width]``, ``down_proj [experts, width, hidden]``."""

    def __init__(self, weights: Weights, experts: int, hidden: int, width: int, gate: ClippedGate) -> None:
        nn.Module.__init__(self)
        own = even_part(width, weights.parallel, "expert columns")
        columns, order = scaled(own, 2), evens_then_odds(2 * length(own))
        empty = torch.empty(0, dtype=weights.dtype, device=weights.device)

        def expert(name: str, shape: tuple[int, ...], index: int, rows: slice | None = None) -> Tensor:
            return weights.take(name, experts, *shape, rows=slice(index, index + 1), columns=rows)[0]

        for index in range(experts):
            up = expert("gate_up_proj", (hidden, 2 * width), index)
            down = expert("down_proj", (width, hidden), index, own)
            if not index:  # once the shapes are known to be right
                self.gate_up = frozen(empty.new_empty(experts, 2 * length(own), hidden))
                self.down = frozen(empty.new_empty(experts, hidden, length(own)))
            self.gate_up[index].copy_(up.t()[columns][order])
            self.down[index].copy_(down.t())
        self.gate_up_bias = frozen(
            weights.take("gate_up_proj_bias", experts, 2 * width, columns=columns)[:, order].contiguous()
        )
        down_bias = weights.take("down_proj_bias", experts, hidden)
        # Only rank 0 has the bias, or the sum over ranks would count it once per rank.
        self.down_bias = frozen(down_bias if weights.parallel.rank == 0 else torch.zeros_like(down_bias))
        self._describe(MLPForm(("gate", "up"), gate, "down"), experts, (self.gate_up_bias, self.down_bias))
