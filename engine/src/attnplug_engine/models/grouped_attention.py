"""Softmax attention over K and V heads, as in Llama, Mistral and Qwen: one product for q, k and v."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import Tensor

from attnplug.batch import ForwardBatch
from attnplug.context import active_backend
from attnplug.model import LayerSpec
from attnplug_engine.models.decoder import Attention
from attnplug_engine.models.layers import Linear, RMSNorm
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import Rows, Weights
from attnplug_engine.parallel import even_part, kv_head_part, length, scaled


class GroupedAttention(Attention):
    """MHA, GQA or MQA with rotary positions; ``norm_eps`` gives queries and keys a norm of each head (Qwen3)."""

    def __init__(
        self,
        weights: Weights,
        layer: LayerSpec,
        hidden: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        heads = even_part(layer.num_heads, weights.parallel, "attention heads")
        kv_heads = kv_head_part(layer.num_kv_heads, weights.parallel)
        self.layer = replace(layer, num_heads=length(heads), num_kv_heads=length(kv_heads))
        key, value = layer.head_dim, layer.v_head_dim
        parts = [
            Rows("q_proj", layer.num_heads * key, scaled(heads, key)),
            Rows("k_proj", layer.num_kv_heads * key, scaled(kv_heads, key)),
            Rows("v_proj", layer.num_kv_heads * value, scaled(kv_heads, value)),
        ]
        self.qkv = Linear.stacked(weights, parts, hidden, bias=qkv_bias)
        self.out = Linear.row_parallel(
            weights.at("o_proj"), layer.num_heads * value, hidden, scaled(heads, value), bias=out_bias
        )
        self.q_norm = None if norm_eps is None else RMSNorm(weights.at("q_norm"), key, norm_eps)
        self.k_norm = None if norm_eps is None else RMSNorm(weights.at("k_norm"), key, norm_eps)

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        layer = self.layer
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        qkv = self.qkv(hidden).unflatten(1, (heads + 2 * kv_heads, layer.head_dim))
        v = qkv[:, heads + kv_heads :]
        if self.q_norm is None or self.k_norm is None:
            q, k = rotation.apply(qkv[:, : heads + kv_heads]).split((heads, kv_heads), dim=1)
        else:
            q = rotation.apply(self.q_norm(qkv[:, :heads]))
            k = rotation.apply(self.k_norm(qkv[:, heads : heads + kv_heads]))
        backend = active_backend()
        run = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
        attended = run(q, k, v, layer, batch)
        return cast(Tensor, self.out(attended.flatten(1)))
