"""The delta rule: Gated DeltaNet (Qwen3-Next, Qwen3.5), and Kimi's, which has a decay per key channel."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, LayerSpec
from attnplug.host import active_attention
from attnplug.linear import DeltaInputs, DeltaWeights, LinearInputs
from attnplug_engine.models.decoder import Attention
from attnplug_engine.models.layers import Linear, RMSNorm
from attnplug_engine.models.linear_attention import (
    DecayGate,
    GatedHeadNorm,
    LinearPart,
    ShortConvolution,
    linear_part,
)
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import length, scaled


class DeltaRule(nn.Module):
    """A delta-rule layer between its projections: convolution, gates, recurrence and gated norm.

    A backend that can run all of it fused does so. Otherwise its parts run one by one.
    """

    def __init__(self, part: LinearPart, conv: ShortConvolution, decay: DecayGate, norm: GatedHeadNorm) -> None:
        super().__init__()
        self.conv, self.decay, self.norm = conv, decay, norm
        self._part = part
        self._weights = DeltaWeights(conv.weight, decay.rate, decay.dt_bias, norm.weight, norm.eps, norm.silu)

    def forward(self, rows: Tensor, decay: Tensor, beta: Tensor, gate: Tensor, batch: ForwardBatch) -> Tensor:
        """Run it on projected inputs: rows ``[tokens, q | k | v]``, decay ``[tokens, heads]`` or ``[tokens, heads,
        key_dim]``, beta ``[tokens, heads]``, gate ``[tokens, heads * value_dim]``. Returns the gate's shape."""
        part, dims, attention = self._part, self._part.dims, active_attention()
        gate = gate.unflatten(1, (-1, dims.value_dim))
        whole = attention.attend_delta(DeltaInputs(rows, decay, beta, gate, self._weights), part.layer, batch)
        if whole is not None:
            return whole
        q, k, v = self.conv(rows, batch).split((part.key_width, part.key_width, part.value_width), dim=1)
        log_decay, strength = self.decay(decay, beta)
        inputs = LinearInputs(
            q.unflatten(1, (-1, dims.key_dim)),
            k.unflatten(1, (-1, dims.key_dim)),
            v.unflatten(1, (-1, dims.value_dim)),
            log_decay=log_decay,
            beta=strength,
            normalize=True,
        )
        return cast(Tensor, self.norm(attention.attend_linear(inputs, part.layer, batch), gate))


class GatedDeltaNet(Attention):
    """GDN: one decay per head and token; queries and keys have fewer heads than values.

    ``grouped`` is the storage of the projections: two weights in which each key head has its query, key, values and
    gates together (Qwen3-Next), or one weight per purpose (Qwen3.5). Either way one product gives ``[q | k | v | z | b
    | a]`` here, of which ``[q | k | v]`` are the channels of the convolution.
    """

    def __init__(self, weights: Weights, layer: LayerSpec, hidden: int, eps: float, *, grouped: bool) -> None:
        super().__init__()
        assert layer.linear is not None
        dims = layer.linear
        self._part = part = linear_part(layer, weights.parallel)
        self.layer = part.layer
        projections = _grouped_rows(part, layer) if grouped else _plain_rows(part, layer)
        self.down = Linear.stacked(weights, projections, hidden)
        conv = ShortConvolution(weights, _channels(part, layer, "conv1d"), self.layer)
        decay = DecayGate(
            weights.take("A_log", dims.heads, rows=part.heads, exact=True),
            weights.take("dt_bias", dims.heads, rows=part.heads, exact=True),
        )
        self.rule = DeltaRule(part, conv, decay, GatedHeadNorm(weights.at("norm"), dims.value_dim, eps, silu=True))
        own = scaled(part.heads, dims.value_dim)
        self.out = Linear.row_parallel(weights.at("out_proj"), dims.heads * dims.value_dim, hidden, own)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        part, dims = self._part, self._part.dims
        widths = (dims.conv_channels, part.value_width, dims.heads, dims.heads)
        qkv, z, b, a = self.down(hidden, norm=norm).split(widths, dim=1)
        return self.out(self.rule(qkv, a, b, z, batch), onto=onto)


class KimiDeltaAttention(Attention):
    """KDA: a decay per key channel, from a low-rank projection; the output's gate comes from another one.

    One product of the input gives ``[q | k | v | b | f | g]``; f and g are the low-rank parts, replicated on every
    rank.
    """

    def __init__(self, weights: Weights, layer: LayerSpec, hidden: int, eps: float) -> None:
        super().__init__()
        assert layer.linear is not None
        dims = layer.linear
        width, total = dims.key_dim, dims.heads * dims.key_dim
        self._part = part = linear_part(layer, weights.parallel)
        self.layer = part.layer
        own = scaled(part.heads, width)
        projections = [WeightRows(name, total, own) for name in ("q_proj", "k_proj", "v_proj")]
        projections.append(WeightRows("b_proj", dims.heads, part.heads))
        projections += [WeightRows(name, width, slice(0, width)) for name in ("f_a_proj", "g_a_proj")]
        self.down = Linear.stacked(weights, projections, hidden)
        convolutions = [WeightRows(name, total, own) for name in ("q_conv1d", "k_conv1d", "v_conv1d")]
        conv = ShortConvolution(weights, convolutions, self.layer)
        self.decay_up = Linear.stacked(weights, [WeightRows("f_b_proj", total, own)], width)
        self.gate_up = Linear.stacked(weights, [WeightRows("g_b_proj", total, own)], width)
        a_log = weights.take("A_log", 1, 1, dims.heads, 1, exact=True)[0, 0, part.heads]
        dt_bias = weights.take("dt_bias", total, rows=own, exact=True)
        decay = DecayGate(a_log, dt_bias.unflatten(0, (-1, width)))
        self.rule = DeltaRule(part, conv, decay, GatedHeadNorm(weights.at("o_norm"), width, eps, silu=False))
        self.out = Linear.row_parallel(weights.at("o_proj"), total, hidden, own)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        dims, width = self._part.dims, self._part.dims.key_dim
        qkv, b, f, g = self.down(hidden, norm=norm).split((dims.conv_channels, dims.heads, width, width), dim=1)
        decay = self.decay_up(f).unflatten(1, (-1, width))
        return self.out(self.rule(qkv, decay, b, self.gate_up(g), batch), onto=onto)


def _channels(part: LinearPart, layer: LayerSpec, name: str) -> list[WeightRows]:
    """Return this rank's rows of a tensor that holds all queries, then all keys, then all values."""
    assert layer.linear is not None
    keys = layer.linear.key_heads * layer.linear.key_dim
    total = 2 * keys + layer.linear.heads * layer.linear.value_dim
    own_keys, own_values = scaled(part.key_heads, layer.linear.key_dim), scaled(part.heads, layer.linear.value_dim)
    starts = ((0, own_keys), (keys, own_keys), (2 * keys, own_values))
    return [WeightRows(name, total, slice(start + own.start, start + own.stop)) for start, own in starts]


def _plain_rows(part: LinearPart, layer: LayerSpec) -> list[WeightRows]:
    assert layer.linear is not None
    heads, value_dim = layer.linear.heads, layer.linear.value_dim
    return [
        *_channels(part, layer, "in_proj_qkv"),
        WeightRows("in_proj_z", heads * value_dim, scaled(part.heads, value_dim)),
        WeightRows("in_proj_b", heads, part.heads),
        WeightRows("in_proj_a", heads, part.heads),
    ]


def _grouped_rows(part: LinearPart, layer: LayerSpec) -> list[WeightRows]:
    """Return the rows of weights in which a key head has ``[q | k | its values | their gates]`` and ``[its b | its
    a]``."""
    assert layer.linear is not None
    dims = layer.linear
    per_key = dims.heads // dims.key_heads
    # This rank's value heads among those of its key heads: all of them, unless ranks share a key head.
    first = part.heads.start - part.key_heads.start * per_key
    values = slice(first, first + length(part.heads))

    def rows(name: str, widths: tuple[int, ...]) -> WeightRows:
        """Reorder rows by purpose, from rows by key head; only some values of the last two widths are taken."""
        group = sum(widths)
        numbers = torch.arange(length(part.key_heads) * group).unflatten(0, (-1, group)).split(widths, dim=1)
        *keys, first_values, last_values = numbers
        per_head = widths[-1] // per_key
        own = [each.reshape(-1, per_head)[values].flatten() for each in (first_values, last_values)]
        order = torch.cat([*(key.flatten() for key in keys), *own])
        return WeightRows(name, dims.key_heads * group, scaled(part.key_heads, group), order)

    value_width = per_key * dims.value_dim
    return [
        rows("in_proj_qkvz", (dims.key_dim, dims.key_dim, value_width, value_width)),
        rows("in_proj_ba", (per_key, per_key)),
    ]
