"""Multi-head latent attention, as in DeepSeek-V2 and V3, Kimi-Linear, Ring: a cache of one compressed row per token.

The down-projections of queries and row are one product, because both read the same input. ``ModelAttention`` expands
the row or absorbs the queries; the layer provides the parts of the up-projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import ForwardBatch, LayerSpec
from attnplug.hf.config_keys import Config
from attnplug.host import MLAWeights, active_attention
from attnplug.sparse import SelectedRows
from attnplug_engine.kernels import usable
from attnplug_engine.kernels.invariant import active, product
from attnplug_engine.kernels.row_places import row_places
from attnplug_engine.models.decoder import EPS, Attention
from attnplug_engine.models.layers import Linear, RMSNorm
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import even_part, length, scaled

_MAX_KERNEL_ROWS = 256
"""Beyond this a library's batched product is faster than our kernel, although it requires copies."""


def multiply_few(rows: Tensor, weight: Tensor) -> Tensor | None:
    """Multiply few rows per head with our kernel; see ``MLAWeights.by_head``. ``None`` where it is not the fastest.

    Inside of batch-invariant arithmetic it multiplies all rows."""
    if active():
        return _multiply_heads(rows, weight)
    if not usable(rows) or not 0 < rows.shape[0] <= _MAX_KERNEL_ROWS:
        return None
    if rows.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != rows.dtype:
        return None
    from attnplug_engine.kernels.head_gemm import multiply_heads

    return multiply_heads(rows, weight)


def _multiply_heads(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply any number of rows per head, each with the same bits as alone."""
    if usable(rows) and rows.shape[0] and rows.dtype in (torch.bfloat16, torch.float16) and weight.dtype == rows.dtype:
        from attnplug_engine.kernels.head_gemm import multiply_heads

        return multiply_heads(rows, weight, invariant=True)
    inputs = weight.shape[1]
    multiplied = product(rows[..., :inputs].transpose(0, 1), weight).transpose(0, 1)
    return multiplied if rows.shape[2] == inputs else torch.cat((multiplied, rows[..., inputs:]), -1)


class LatentAttention(Attention):
    """MLA with or without a low-rank query.

    ``deinterleave``: the stored weights produce rotary pairs ``(2 i, 2 i + 1)``, while the model keeps the rotated row
    as ``[evens | odds]`` (V3's ``rope_interleave``). The rows of the weights are reordered once, here, so that a half
    rotation gives exactly the row that transformers caches. ``eps`` is that of both inner norms: in most models the
    class's own, not the config's, as in transformers.
    """

    has_more_kernels = True

    def __init__(
        self,
        weights: Weights,
        layer: LayerSpec,
        config: Config,
        *,
        deinterleave: bool,
        eps: float = EPS,
        out: str = "o_proj",
    ) -> None:
        super().__init__()
        dims = layer.mla
        assert dims is not None
        hidden, bias = config.integer("hidden_size"), config.flag("attention_bias")
        heads = even_part(layer.num_heads, weights.parallel, "attention heads")
        own = length(heads)
        self.layer = layer.for_rank(weights.parallel.size)
        self.take_kv_scales(weights, layer.layer_id)
        self._latent, self._nope = dims.kv_lora_rank, dims.qk_nope_head_dim

        rope_order = evens_then_odds(dims.qk_rope_head_dim) if deinterleave else None
        queries = layer.num_heads * layer.head_dim
        query_order = _per_head(rope_order, own, self._nope, layer.head_dim)
        row_order = _per_head(rope_order, 1, self._latent, dims.row_dim)
        row = WeightRows("kv_a_proj_with_mqa", dims.row_dim, slice(0, dims.row_dim), row_order)
        rank = config.optional_integer("q_lora_rank")
        if rank is None:
            query = WeightRows("q_proj", queries, scaled(heads, layer.head_dim), query_order)
            # transformers gives q_proj no bias even if attention_bias is set, while the row's projection has one.
            row_bias = _bias_of_row(weights, length(query.own), row) if bias else False
            self.down = Linear.stacked(weights, [query, row], hidden, bias=row_bias)
            self.q_norm, self.q_up = None, None
            self._query_width = length(query.own)
        else:
            low = WeightRows("q_a_proj", rank, slice(0, rank))
            self.down = Linear.stacked(weights, [low, row], hidden, bias=bias)
            self.q_norm = RMSNorm(weights.at("q_a_layernorm"), rank, eps)
            query = WeightRows("q_b_proj", queries, scaled(heads, layer.head_dim), query_order)
            self.q_up = Linear.stacked(weights, [query], rank)
            self._query_width = rank
        self.row_norm = RMSNorm(weights.at("kv_a_layernorm"), self._latent, eps)

        width = self._nope + layer.v_head_dim
        up = weights.stack(
            "weight", [WeightRows("kv_b_proj", layer.num_heads * width, scaled(heads, width))], self._latent
        )
        keys, values = up.unflatten(0, (own, width)).split((self._nope, layer.v_head_dim), dim=1)
        # Values as [heads, v, latent] in memory, so that core's matrix of them is a view of the same memory.
        self.weights = MLAWeights(keys.contiguous(), values.contiguous().transpose(1, 2), multiply_few)
        self.register_buffer("_keys", self.weights.w_kc, persistent=False)  # counted as memory of the model
        self.register_buffer("_values", self.weights.w_vc, persistent=False)
        value = layer.v_head_dim
        self.out = Linear.row_parallel(
            weights.at(out), layer.num_heads * value, hidden, scaled(heads, value), bias=bias
        )

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        query, rows = self.project_down(hidden, norm)
        if self.q_norm is not None and self.q_up is not None:
            query = self.q_up(query, norm=self.q_norm)
        return self.attend(query, rows, rotation, batch, onto)

    def project_down(self, hidden: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Return the queries, or their latents ``[tokens, rank]`` before the norm, and the rows before theirs."""
        down = self.down(hidden, norm=norm)
        return down[:, : self._query_width], down[:, self._query_width :]

    def attend(
        self,
        query: Tensor,
        rows: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        onto: Tensor | None,
        selected: SelectedRows | None = None,
    ) -> Tensor:
        """Attend with queries ``[tokens, heads * width]`` and rows, neither rotated; return the attention's output."""
        layer = self.layer
        q = query.unflatten(1, (layer.num_heads, layer.head_dim))
        attention = active_attention()
        places = row_places(attention, layer, batch, q.shape[0], rows.dtype) if rotation.absorbs(q) else None
        new = None
        if places is None:
            new = rotation.latent_rows(q, rows, self._nope, self.row_norm)
        else:
            q = rotation.absorb(q, rows, self.weights, self.row_norm, places)
        attended = attention.attend_mla(q, new, layer, self.weights, batch, selected=selected)
        return self.out(attended.flatten(1), onto=onto)


def evens_then_odds(width: int) -> Tensor:
    return torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))


def _per_head(rope_order: Tensor | None, heads: int, plain: int, width: int) -> Tensor | None:
    """Return the order of ``heads * width`` rows if the last rows of each head are rotary and follow ``rope_order``."""
    if rope_order is None:
        return None
    one = torch.cat((torch.arange(plain), plain + rope_order))
    return (width * torch.arange(heads)[:, None] + one).flatten()


def _bias_of_row(weights: Weights, without: int, row: WeightRows) -> Tensor:
    """Return a bias ``[without + row]``: zeros for columns without a bias, then the row's own."""
    bias = weights.stack("bias", [row])
    return torch.cat((bias.new_zeros(without), bias))
