"""DeepSeek-V4's experts: chosen by a learned router or by the token id, with clipped activations."""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.hf.config_keys import Config
from attnplug_engine.models.experts import AddedTerms, Experts, Router
from attnplug_engine.models.layers import MLP, ClippedGate, MLPForm, frozen
from attnplug_engine.models.weights import Weights


class RootRouter(Router):
    """Router with weights that are square roots of softplus, normalised and scaled. Experts are the best by score and
    bias, or those that a table has for the token (``hashed``)."""

    def __init__(self, weights: Weights, config: Config, experts: int, *, hashed: bool) -> None:
        super().__init__(weights, config, experts)
        self.scaling = config.number("routed_scaling_factor")
        self.table = None
        if hashed:
            vocab = config.integer("vocab_size")
            self.table = frozen(weights.integers("tid2eid", vocab, self.per_token, below=experts))
        else:
            self.bias = frozen(weights.take("bias", experts, exact=True))

    def choose_for(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return chosen experts ``[tokens, k]`` of tokens with these ``ids``, and their weights ``[tokens, k]``
        float32."""
        scores = F.softplus(logits).sqrt()
        if self.table is not None:
            topk_ids = self.table[ids]
        else:
            assert self.bias is not None
            topk_ids = (scores + self.bias).topk(self.per_token, dim=-1, sorted=False).indices
        topk_weights = scores.gather(1, topk_ids)
        return topk_ids, topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20) * self.scaling


class HashExperts(nn.Module):
    """Routed experts and a shared one: a partial sum to be reduced over the ranks."""

    def __init__(self, weights: Weights, config: Config, *, hashed: bool) -> None:
        super().__init__()
        hidden, width = config.integer("hidden_size"), config.integer("moe_intermediate_size")
        form = MLPForm(("w1", "w3"), ClippedGate(config.number("swiglu_limit")), "w2")
        count = config.integer("n_routed_experts")
        self.router = RootRouter(weights.at("gate"), config, count, hashed=hashed)
        self.experts = Experts(weights.at("experts"), count, hidden, width, form=form)
        self.shared = MLP(weights.at("shared_experts"), hidden, width, form=form)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``; ``ids [tokens]`` are the token ids."""
        topk_ids, topk_weights = self.router.choose_for(self.router.logits(x)[1], ids)
        return cast(Tensor, self.experts(x, topk_ids, topk_weights, AddedTerms(self.shared(x))))
