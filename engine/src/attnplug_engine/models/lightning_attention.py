"""Lightning attention: a state that each head decays at its own rate, the same for every token.

MiniMax's and Ring's layers differ in all but the recurrence, so there are two classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug import ForwardBatch, LayerSpec
from attnplug.host import active_attention
from attnplug.linear import LinearInputs
from attnplug_engine.models.decoder import EPS, Attention
from attnplug_engine.models.layers import Linear, RMSNorm, frozen
from attnplug_engine.models.linear_attention import GatedColumnNorm, linear_part
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import length, scaled


def geometric_slopes(heads: int) -> Tensor:
    """Return slopes ``[heads]`` float32: ``2 ** (-8 (h + 1) / heads)``."""
    return (1 / 2 ** (8 / heads)) ** torch.arange(1, heads + 1).float()


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes: the same for a power of two; further heads have every other slope of twice as many
    heads."""
    power = 1 << (heads.bit_length() - 1)
    return torch.cat((geometric_slopes(power), geometric_slopes(2 * power)[::2][: heads - power]))


class LightningAttention(Attention):
    """MiniMax's layer: SiLU on queries, keys and values, no positions, no scale; one norm over all heads, then a gate.

    The stored projection has ``[q | k | v]`` of each head together. Here all queries come first, then all keys, all
    values, and the output gates.
    """

    def __init__(self, weights: Weights, layer: LayerSpec, hidden: int, layers: int) -> None:
        super().__init__()
        assert layer.linear is not None
        heads, width = layer.linear.heads, layer.linear.key_dim
        part = linear_part(layer, weights.parallel)
        self.layer = part.layer
        own = scaled(part.heads, width)
        order = torch.arange(3 * length(own)).unflatten(0, (-1, 3, width)).transpose(0, 1).flatten()
        qkv = WeightRows("qkv_proj", 3 * heads * width, scaled(part.heads, 3 * width), order)
        self.down = Linear.stacked(weights, [qkv, WeightRows("output_gate", heads * width, own)], hidden)
        # Later layers remember for longer; the constants are the authors'.
        factor = 1 - layer.layer_id / (layers - 1 + 1e-5) + 1e-5
        slopes = geometric_slopes(heads) * factor
        self.log_decay = frozen((-slopes[part.heads]).to(weights.device))
        # The class's own epsilon, not the config's, as in transformers.
        self.norm = GatedColumnNorm(weights.at("norm"), heads * width, EPS, own)
        self.out = Linear.row_parallel(weights.at("out_proj"), heads * width, hidden, own)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        heads, width = self.layer.num_heads, self.layer.head_dim
        qkv, gate = self.down(hidden, norm=norm).split((3 * heads * width, heads * width), dim=1)
        q, k, v = F.silu(qkv).unflatten(1, (3, heads, width)).unbind(1)
        attended = active_attention().attend_linear(LinearInputs(q, k, v, self.log_decay), self.layer, batch)
        return self.out(self.norm.gated(attended.flatten(1), gate), onto=onto)


class RotaryLightningAttention(Attention):
    """Ring's layer: rotary positions on part of each head, after head norms if ``use_qk_norm``; scaled.

    The stored projection has all queries, then all keys, then all values. Here the output gates follow. The output is
    normed in groups of heads.
    """

    def __init__(
        self,
        weights: Weights,
        layer: LayerSpec,
        hidden: int,
        layers: int,
        eps: float,
        *,
        norm_groups: int,
        head_norms: bool,
        silu: bool,
        qkv_bias: bool,
        out_bias: bool,
    ) -> None:
        super().__init__()
        assert layer.linear is not None
        heads, width = layer.linear.heads, layer.linear.key_dim
        part = linear_part(layer, weights.parallel)
        self.layer = part.layer
        own, total = scaled(part.heads, width), heads * width
        qkv = [
            WeightRows("query_key_value", 3 * total, slice(start + own.start, start + own.stop))
            for start in (0, total, 2 * total)
        ]
        bias = F.pad(weights.stack("bias", qkv), (0, length(own))) if qkv_bias else False  # the gate has no bias
        self.down = Linear.stacked(weights, [*qkv, WeightRows("g_proj", total, own)], hidden, bias=bias)
        self.q_norm = RMSNorm(weights.at("query_layernorm"), width, eps) if head_norms else None
        self.k_norm = RMSNorm(weights.at("key_layernorm"), width, eps) if head_norms else None
        self._silu = silu
        # ``layer_id - 1``, as in the authors' modeling_bailing_moe_v2_5.py (inclusionAI/Ring-V2.5), whose layers count
        # from 0. vLLM and SGLang leave out the - 1. AReaL, the authors' trainer, did so too: the loss of the published
        # weights was 7.8, and 0.567 with it. The authors divide by zero for one layer.
        slopes = alibi_slopes(heads) * (1 - (layer.layer_id - 1) / max(layers - 1, 1) + 1e-5)
        self.log_decay = frozen((-slopes[part.heads]).to(weights.device))
        self.norm = GatedColumnNorm(weights.at("g_norm"), total, eps, own, groups=norm_groups)
        self.out = Linear.row_parallel(weights.at("dense"), total, hidden, own, bias=out_bias)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        heads, width = self.layer.num_heads, self.layer.head_dim
        qkv, gate = self.down(hidden, norm=norm).split((3 * heads * width, heads * width), dim=1)
        qkv = F.silu(qkv) if self._silu else qkv
        q, k, v = qkv.unflatten(1, (3, heads, width)).unbind(1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        inputs = LinearInputs(rotation.apply(q), rotation.apply(k), v, self.log_decay)
        attended = active_attention().attend_linear(inputs, self.layer, batch).flatten(1)
        return self.out(self.norm.gated(attended, gate), onto=onto)
