"""Softmax attention over KV heads: MHA, GQA or MQA, with one product for q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from attnplug import ForwardBatch, ForwardExtras, LayerSpec
from attnplug.host import active_attention
from attnplug_engine import kernels
from attnplug_engine.models.decoder import Attention
from attnplug_engine.models.layers import ColumnNorm, FastModule, Linear, RMSNorm, frozen
from attnplug_engine.models.rope import LayerRotations, Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, kv_head_part, length, scaled, shifted


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """A norm on each head of queries and keys, before their rotation (Qwen3)."""

    eps: float
    zero_centred: bool = False

    def make(self, weights: Weights, width: int) -> RMSNorm:
        return RMSNorm(weights, width, self.eps, zero_centred=self.zero_centred)


class RowNorms(FastModule):
    """A norm on the queries of all heads together, and one on the keys, before their rotation (Olmo 2).

    Under tensor parallelism each norm costs a reduction of one number per token.
    """

    def __init__(self, weights: Weights, layer: LayerSpec, eps: float) -> None:
        super().__init__()
        parallel, dim = weights.parallel, layer.head_dim
        heads = even_part(layer.num_heads, parallel, "attention heads")
        kv_heads = even_part(layer.num_kv_heads, parallel, "KV heads, whose keys are normed together,")
        self.q = ColumnNorm(weights.at("q_norm"), layer.num_heads * dim, eps, scaled(heads, dim))
        self.k = ColumnNorm(weights.at("k_norm"), layer.num_kv_heads * dim, eps, scaled(kv_heads, dim))

    def apply_(self, qkv: Tensor, heads: int, kv_heads: int) -> None:
        """Norm the queries and keys of ``qkv [tokens, heads + 2 * kv_heads, dim]`` in place."""
        for norm, part in ((self.q, qkv[:, :heads]), (self.k, qkv[:, heads : heads + kv_heads])):
            part.copy_(norm(part.flatten(1)).view(part.shape))


class GroupedAttention(Attention):
    """MHA, GQA or MQA with rotary positions.

    ``gated``: ``q_proj`` gives each head its query and then a gate, whose sigmoid scales the head's output
    (Qwen3-Next). Rows are reordered once, so that all queries come first, then all gates. ``inputs`` is the input width
    if it differs from the hidden size (EAGLE-3). ``packed`` names a stored projection with the rows of q, k and v
    (Phi-3). ``row_eps`` is the eps of norms over all heads together (Olmo 2). ``rope`` selects one of a model's ropes,
    see ``LayerRopes``. If the layer has sinks, they are stored as ``sinks [heads]``.
    """

    def __init__(
        self,
        weights: Weights,
        layer: LayerSpec,
        hidden: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norms: HeadNorms | None = None,
        row_eps: float | None = None,
        gated: bool = False,
        inputs: int | None = None,
        packed: str | None = None,
        rope: int | None = None,
    ) -> None:
        super().__init__()
        heads = even_part(layer.num_heads, weights.parallel, "attention heads")
        kv_heads = kv_head_part(layer.num_kv_heads, weights.parallel)
        self.layer = layer.for_rank(weights.parallel.size)
        self.take_kv_scales(weights, layer.layer_id)
        key, value = layer.head_dim, layer.v_head_dim
        width = 2 * key if gated else key
        query_order = _queries_then_gates(length(heads), key) if gated else None
        parts = [
            WeightRows("q_proj", layer.num_heads * width, scaled(heads, width), query_order),
            WeightRows("k_proj", layer.num_kv_heads * key, scaled(kv_heads, key)),
            WeightRows("v_proj", layer.num_kv_heads * value, scaled(kv_heads, value)),
        ]
        if packed is not None:
            *starts, total = accumulate((part.total for part in parts), initial=0)
            each = zip(parts, starts, strict=True)
            parts = [WeightRows(packed, total, shifted(part.own, start)) for part, start in each]
        self.qkv = Linear.stacked(weights, parts, inputs or hidden, bias=qkv_bias)
        self.out = Linear.row_parallel(
            weights.at("o_proj"), layer.num_heads * value, hidden, scaled(heads, value), bias=out_bias
        )
        self.q_norm = None if norms is None else norms.make(weights.at("q_norm"), key)
        self.k_norm = None if norms is None else norms.make(weights.at("k_norm"), key)
        self._norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        self.row_norms = None if row_eps is None else RowNorms(weights, layer, row_eps)
        self._gates = length(heads) if gated else 0
        self._rope = rope
        self.sinks, self._extras = None, None
        if layer.sinks:
            self.sinks = frozen(weights.take("sinks", layer.num_heads, rows=heads, exact=True))
            self._extras = ForwardExtras(sinks=self.sinks)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        layer = self.layer
        heads, kv_heads, gates = layer.num_heads, layer.num_kv_heads, self._gates
        qkv = self.qkv(hidden, norm=norm).view(hidden.shape[0], heads + gates + 2 * kv_heads, layer.head_dim)
        if self._rope is not None:
            assert isinstance(rotation, LayerRotations)
            rotation = rotation.ropes[self._rope]
        if self.row_norms is not None:
            self.row_norms.apply_(qkv, heads, kv_heads)
        q, k = rotation.heads(qkv, heads, gates, kv_heads, self._norms)
        v = qkv[:, -kv_heads:]
        attended = active_attention().attend(q, k, v, layer, batch, extras=self._extras).flatten(1)
        if gates:
            attended = _gated(attended, qkv[:, heads : heads + gates].flatten(1))
        return self.out(attended, onto=onto)

    __call__ = forward  # as in Linear


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    if kernels.usable(x):
        from attnplug_engine.kernels.linear_gates import sigmoid_gate

        return sigmoid_gate(x, gate)
    return x * gate.sigmoid()


def _queries_then_gates(heads: int, width: int) -> Tensor:
    rows = torch.arange(2 * heads * width).unflatten(0, (heads, 2, width))
    return cast(Tensor, rows.transpose(0, 1).flatten())
