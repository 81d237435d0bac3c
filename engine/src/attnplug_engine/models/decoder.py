"""The decoder that every architecture here is: embedding, blocks of attention and MLP, a last norm, and the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from attnplug.batch import ForwardBatch
from attnplug.config_keys import Config
from attnplug.model import LayerSpec, ModelSpec
from attnplug_engine.models.layers import Head, RMSNorm, frozen
from attnplug_engine.models.rope import Rope, Rotation
from attnplug_engine.models.weights import Weights
from attnplug_engine.parallel import TensorParallel

EPS = 1e-6
"""What the config classes of all these models assume for ``rms_norm_eps``."""


class Attention(nn.Module):
    """What a block calls: hidden states ``[tokens, hidden]`` to this rank's part of the attention's output.

    Subclass contract: the output is a sum to be reduced over the ranks, and a tensor of its own.
    """

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        raise NotImplementedError


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm, each added to what came in, each reduced once."""

    def __init__(
        self, weights: Weights, hidden: int, eps: float, attention: Attention, mlp: nn.Module, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.input_norm = RMSNorm(weights.at("input_layernorm"), hidden, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(weights.at("post_attention_layernorm"), hidden, eps)
        self.mlp = mlp
        self._parallel = parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        attended = self.attention(self.input_norm(hidden), rotation, batch)
        hidden = self._parallel.all_reduce(attended).add_(hidden)
        return self._parallel.all_reduce(self.mlp(self.mlp_norm(hidden))).add_(hidden)


MakeAttention = Callable[[Weights, LayerSpec], Attention]
"""Attention of a layer from the weights under ``self_attn``."""
MakeMLP = Callable[[Weights, LayerSpec], nn.Module]
"""MLP or experts of a layer from the weights under ``mlp``: ``[tokens, hidden]`` to a sum to be reduced."""


class Decoder(nn.Module):
    """A causal language model, or a rank's part of one. Made on its device from its weights, and stays there.

    Tokens of all requests are flat, one request after the other. Attention runs by the active backend, so ``forward``
    is called inside ``forward_context`` with a planned batch. Run it under ``torch.inference_mode``.
    """

    def __init__(
        self,
        weights: Weights,
        config: Config,
        spec: ModelSpec,
        rope: Rope,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        eps = config.optional_number("rms_norm_eps", least=0.0)
        eps = EPS if eps is None else eps
        model = weights.at("model")
        # Whole on every rank: a vocabulary in parts would cost a collective per step to save little memory.
        self.embedding = frozen(model.take("embed_tokens.weight", self.vocab_size, self.hidden_size))
        self.rope = rope
        self.layers = nn.ModuleList()
        for layer in spec.layers:
            own = model.at(f"layers.{layer.layer_id}")
            attention = make_attention(own.at("self_attn"), layer)
            mlp = make_mlp(own.at("mlp"), layer)
            self.layers.append(Block(own, self.hidden_size, eps, attention, mlp, weights.parallel))
        self.norm = RMSNorm(model.at("norm"), self.hidden_size, eps)
        if config.flag("tie_word_embeddings"):
            self.head = Head.tied(self.embedding, weights.parallel)
        else:
            self.head = Head.load(weights.at("lm_head"), self.vocab_size, self.hidden_size)

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states ``[tokens, hidden]`` of tokens ``[tokens]`` at ``positions`` ``[tokens]`` of their requests."""
        hidden = F.embedding(input_ids, self.embedding)
        rotation = self.rope.at(positions)
        for layer in self.layers:
            hidden = layer(hidden, rotation, batch)
        return cast(Tensor, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]`` float32 for hidden states ``[rows, hidden]``, the same on every rank."""
        return cast(Tensor, self.head(hidden))
