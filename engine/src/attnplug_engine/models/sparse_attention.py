"""DeepSeek sparse attention: latent attention over rows that an indexer selects, its own or an earlier layer's.

The indexer reads the same normed hidden states and query latents as the layer. It is replicated on every rank, so all
select the same rows. Queries and keys are not multiplied by a Hadamard matrix, because scores do not depend on it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnplug import ForwardBatch, LayerSpec
from attnplug.hf.config_keys import Config
from attnplug.host import active_attention
from attnplug.sparse import IndexerDims, IndexInputs
from attnplug_engine.models.latent_attention import LatentAttention, evens_then_odds
from attnplug_engine.models.layers import Linear, RMSNorm, frozen
from attnplug_engine.models.rope import Rotation
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_sparse.selection import select_rows

_EPS = 1e-6
"""Epsilon of the keys' norm, independent of the config."""


class Indexer(nn.Module):
    """Indexer that selects a layer's rows. As many first dimensions of queries and keys are rotated as in MLA.

    ``interleave``: rotary pairs are ``(2 i, 2 i + 1)`` (GLM). As in ``LatentAttention``, rows of the weights are then
    reordered to ``[evens | odds]``, for queries and keys alike, which changes no score.
    """

    def __init__(self, weights: Weights, dims: IndexerDims, config: Config, *, interleave: bool) -> None:
        super().__init__()
        hidden, rank, rope = (config.integer(key) for key in ("hidden_size", "q_lora_rank", "qk_rope_head_dim"))
        heads, width = dims.heads, dims.head_dim
        order = torch.arange(width)
        if interleave:
            order[:rope] = evens_then_odds(rope)
        everywhere = (width * torch.arange(heads)[:, None] + order).flatten()
        queries = WeightRows("wq_b", heads * width, slice(0, heads * width), everywhere)
        self.q = Linear.stacked(weights, [queries], rank)
        self.k = Linear.stacked(weights, [WeightRows("wk", width, slice(0, width), order)], hidden)
        norm = weights.at("k_norm")
        self.norm_weight = frozen(norm.take("weight", width)[order])
        self.norm_bias = frozen(norm.take("bias", width)[order])
        self.head_weight = frozen(weights.take("weights_proj.weight", heads, hidden, exact=True))
        self._dims, self._rope = dims, rope

    def forward(self, hidden: Tensor, latents: Tensor, rotation: Rotation) -> IndexInputs:
        """Index inputs of normed hidden states ``[tokens, hidden]`` and normed query latents ``[tokens, rank]``."""
        dims = self._dims
        q = self.q(latents).unflatten(1, (dims.heads, dims.head_dim))
        k = F.layer_norm(self.k(hidden), (dims.head_dim,), self.norm_weight, self.norm_bias, _EPS)
        rotation.apply_(q[..., : self._rope])
        rotation.apply_(k.unsqueeze(1)[..., : self._rope])
        weights = F.linear(hidden.float(), self.head_weight) * dims.heads**-0.5
        return IndexInputs(q, k, weights)


class SparseLatentAttention(LatentAttention):
    """MLA over selected rows. A layer that shares an earlier layer's selection has no indexer."""

    def __init__(
        self, weights: Weights, layer: LayerSpec, config: Config, *, deinterleave: bool, index_interleave: bool
    ) -> None:
        super().__init__(weights, layer, config, deinterleave=deinterleave)
        dims = layer.indexer
        assert dims is not None
        self.indexer = None
        if dims.shares is None:
            self.indexer = Indexer(weights.at("indexer"), dims, config, interleave=index_interleave)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        assert self.q_norm is not None and self.q_up is not None
        normed = hidden if norm is None else norm(hidden)
        low, rows = self.project_down(normed, None)
        latents = self.q_norm(low)
        index = None if self.indexer is None else self.indexer(normed, latents, rotation)
        selected = select_rows(active_attention(), index, self.layer, batch)
        return self.attend(self.q_up(latents), rows, rotation, batch, onto, selected)


def check_indexer(config: Config) -> None:
    """Raise if a model's indexer is not the supported one."""
    if config.lookup("q_lora_rank") is None:
        raise config.wrong("q_lora_rank", "a whole number: the indexer reads the queries' latents")
    if config.optional_text("index_k_norm_type") not in (None, "layer", "layernorm"):
        raise config.wrong("index_k_norm_type", "absent or 'layer': keys are normed by a layer norm with a bias")
    for key in ("index_init_tokens", "index_local_tokens"):
        if config.optional_integer(key, least=0):
            raise config.wrong(key, "absent or 0: rows are chosen by their scores alone")
