"""gpt-oss: attention with sinks, windows in every other layer, and experts with biases and clipped gates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from attnplug import ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.models.decoder import Decoder
from attnplug_engine.models.experts import Experts, MixtureOfExperts, QuantizedExperts, TopKRouter, expert_columns
from attnplug_engine.models.latent_attention import evens_then_odds
from attnplug_engine.models.layers import ClippedGate, MLPForm, frozen
from attnplug_engine.models.softmax_decoder import make_attention, softmax_decoder
from attnplug_engine.models.weights import Weights
from attnplug_engine.parallel.collectives import length, scaled

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
    """Experts with biases. Stored tensors hold all experts, with gate and up rows interleaved.

    In MXFP4 they are ``gate_up_proj_blocks [experts, 2 * width, hidden / 32, 16]`` and ``down_proj_blocks [experts,
    hidden, width / 32, 16]`` with their ``_scales``. Otherwise they are transposed: ``gate_up_proj [experts, hidden,
    2 * width]``, ``down_proj [experts, width, hidden]``.
    """

    def __init__(self, weights: Weights, experts: int, hidden: int, width: int, gate: ClippedGate) -> None:
        nn.Module.__init__(self)
        scheme = weights.expert_stack_scheme("gate_up_proj")
        own = expert_columns(weights, scheme, width)
        rows, order = scaled(own, 2), evens_then_odds(2 * length(own))
        self.gate_up_bias = frozen(
            weights.take("gate_up_proj_bias", experts, 2 * width, columns=rows)[:, order].contiguous()
        )
        down_bias = weights.take("down_proj_bias", experts, hidden)
        # Only rank 0 has the bias, or the sum over ranks would count it once per rank.
        self.down_bias = frozen(down_bias if weights.parallel.rank == 0 else torch.zeros_like(down_bias))
        self._describe(MLPForm(("gate", "up"), gate, "down"), experts, (self.gate_up_bias, self.down_bias))
        if scheme is not None:
            part = own if weights.parallel.size > 1 else None
            gate_up = weights.expert_stack("gate_up_proj", experts, 2 * width, hidden, rows=rows, order=order)
            down = weights.expert_stack("down_proj", experts, hidden, width, columns=part)
            self.quantized = QuantizedExperts(gate_up, down)
            return

        def transposed(name: str, shape: tuple[int, int], columns: slice | None = None) -> Iterator[Tensor]:
            """Yield each expert's part of a tensor ``[experts, *shape]``, transposed."""
            for index in range(experts):
                part = weights.take(name, experts, *shape, rows=slice(index, index + 1), columns=columns)
                yield part[0].t()

        self.gate_up = _stacked(
            experts, (part[rows][order] for part in transposed("gate_up_proj", (hidden, 2 * width)))
        )
        self.down = _stacked(experts, transposed("down_proj", (width, hidden), own))


def _stacked(experts: int, parts: Iterator[Tensor]) -> nn.Parameter:
    """Stack each expert's part. Memory is allocated once the shape of the first part is known to be right."""
    first = next(parts)
    stack = torch.empty(experts, *first.shape, dtype=first.dtype, device=first.device)
    stack[0].copy_(first)
    for index, part in enumerate(parts, 1):
        stack[index].copy_(part)
    return frozen(stack)
