"""Decoder, the base of every architecture: embedding, blocks, a last norm, and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, ModelSpec
from attnplug.hf.config_keys import Config
from attnplug_engine.kernels.invariant import arithmetic
from attnplug_engine.models.layers import MLP, FastModule, Head, RMSNorm, embedded, frozen
from attnplug_engine.models.rope import Positions, Rotation
from attnplug_engine.models.weights import Weights

EPS = 1e-6
"""Default of most config classes for ``rms_norm_eps``; others are in their architecture's defaults."""

MakeNorm = Callable[[Weights], RMSNorm]
"""Builds a norm of hidden states from the weights under its name."""


def norm_eps(config: Config) -> float:
    eps = config.optional_number("rms_norm_eps", least=0.0)
    return EPS if eps is None else eps


def hidden_norm(config: Config, *, zero_centred: bool = False) -> MakeNorm:
    """Return the builder of a model's norms of hidden states."""
    width, eps = config.integer("hidden_size"), norm_eps(config)
    return lambda weights: RMSNorm(weights, width, eps, zero_centred=zero_centred)


class Attention(FastModule):
    """Base class of attention layers: hidden states ``[tokens, hidden]`` to this rank's part of the output.

    Subclass contract: the output is a partial sum to be reduced over the ranks, in a tensor of its own. ``norm`` is
    applied to the hidden states first, and rank 0 adds the output to ``onto``; both are fused into a product where that
    is faster.
    """

    kv_scales: dict[int, tuple[float, float]]
    """Stored scales of keys and values in an fp8 cache, by layer id; empty if there are none."""
    has_more_kernels = False
    """A decode has more kernels between its large products than a cache write, attention and a merge."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_scales = {}

    def take_kv_scales(self, weights: Weights, layer_id: int) -> None:
        """Take the scales that are stored with the attention's weights, if there are any."""
        if (scales := weights.kv_scales()) != (1.0, 1.0):
            self.kv_scales = {layer_id: scales}

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError


class TokenWise(Attention):
    """An MLP in place of attention, for models in which a block is one or the other (Nemotron-H)."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        *,
        norm: RMSNorm | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        return cast(Tensor, self.mlp(hidden, norm=norm, onto=onto))


class Block(FastModule):
    """One layer: attention and MLP, each with a norm before it, a residual, and one reduction.

    ``mlp`` is a module from ``[tokens, hidden]`` to a partial sum, with ``norm`` and ``onto`` like attention. Without
    ``norms_input`` attention has no norm before it (EAGLE).
    """

    def __init__(
        self, weights: Weights, norm: MakeNorm, attention: Attention, mlp: nn.Module, *, norms_input: bool = True
    ) -> None:
        super().__init__()
        self.input_norm = norm(weights.at("input_layernorm")) if norms_input else None
        self.attention = attention
        self.mlp_norm = norm(weights.at("post_attention_layernorm"))
        self.mlp = mlp
        if isinstance(mlp, MLP):
            mlp.gate_up.long_wait = attention.has_more_kernels
        self._parallel = weights.parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        attended = self.attention(hidden, rotation, batch, norm=self.input_norm, onto=hidden)
        hidden = self._parallel.all_reduce(attended)
        return self._parallel.all_reduce(self.mlp(hidden, norm=self.mlp_norm, onto=hidden))


class ScaledBlock(Block):
    """A block that adds the outputs of attention and of the MLP with a weight (Granite)."""

    def __init__(
        self, weights: Weights, norm: MakeNorm, attention: Attention, mlp: nn.Module, *, weight: float
    ) -> None:
        super().__init__(weights, norm, attention, mlp)
        self._weight = weight

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        attended = self._parallel.all_reduce(self.attention(hidden, rotation, batch, norm=self.input_norm))
        hidden = torch.add(hidden, attended, alpha=self._weight)
        return torch.add(hidden, self._parallel.all_reduce(self.mlp(hidden, norm=self.mlp_norm)), alpha=self._weight)


class OutputNormBlock(FastModule):
    """One layer with a norm on the outputs of attention and of the MLP, before they are added to the residual (Olmo 2).

    With ``norms_input`` there is also a norm before each (Gemma 2 and 3).
    """

    def __init__(
        self, weights: Weights, norm: MakeNorm, attention: Attention, mlp: nn.Module, *, norms_input: bool = False
    ) -> None:
        super().__init__()
        self.input_norm = norm(weights.at("input_layernorm")) if norms_input else None
        self.attention = attention
        self.attention_norm = norm(weights.at("post_attention_layernorm"))
        self.mlp_norm = norm(weights.at("pre_feedforward_layernorm")) if norms_input else None
        self.mlp = mlp
        self.output_norm = norm(weights.at("post_feedforward_layernorm"))
        self._parallel = weights.parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        attended = self._parallel.all_reduce(self.attention(hidden, rotation, batch, norm=self.input_norm))
        hidden = self.attention_norm(attended).add_(hidden)
        return self.output_norm(self._parallel.all_reduce(self.mlp(hidden, norm=self.mlp_norm))).add_(hidden)


class MixerBlock(FastModule):
    """One layer of a model in which attention and MLP are layers of their own: Mamba-2, Nemotron-H.

    With ``exact_sum`` the hidden states between blocks are float32, whatever the model's dtype.
    """

    def __init__(self, weights: Weights, norm: MakeNorm, mixer: Attention, *, exact_sum: bool = False) -> None:
        super().__init__()
        self.norm = norm(weights.at("norm"))
        self.attention = mixer
        self._exact_sum = exact_sum
        self._parallel = weights.parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        if not self._exact_sum:
            return self._parallel.all_reduce(self.attention(hidden, rotation, batch, norm=self.norm, onto=hidden))
        normed = self.norm(hidden.to(self.norm.weight.dtype))
        return hidden.float() + self._parallel.all_reduce(self.attention(normed, rotation, batch))


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a decoder's parts in a checkpoint."""

    model: str
    embedding: str
    norm: str
    head: str = "lm_head.weight"

    def layer(self, index: int) -> str:
        return f"{self.model}.layers.{index}"


MODEL = Names("model", "embed_tokens", "norm")
BACKBONE = Names("backbone", "embeddings", "norm_f")


class Decoder(nn.Module):
    """A causal language model, or a rank's part of one. Built on its device from its weights.

    Tokens of all requests are flat, request by request. Layers find the active ``ModelAttention``, so ``forward`` is
    called inside its ``running()`` with a planned batch. Run it under ``torch.inference_mode``.
    """

    def __init__(
        self,
        weights: Weights,
        config: Config,
        norm: MakeNorm,
        rope: Positions,
        blocks: Sequence[nn.Module],
        names: Names = MODEL,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        model = weights.at(names.model)
        # Replicated on every rank: a divided vocabulary would cost a collective per step and save little memory.
        embedding, tied = f"{names.embedding}.weight", config.flag("tie_word_embeddings")
        if tied and weights.holds(names.head) and not model.holds(embedding):
            self.embedding = frozen(weights.take(names.head, self.vocab_size, self.hidden_size))
        else:
            self.embedding = frozen(model.take(embedding, self.vocab_size, self.hidden_size))
        self.rope = rope
        self.layers = nn.ModuleList(blocks)
        self.norm = norm(model.at(names.norm))
        self.head = self._head(weights, names.head, tied) if weights.head else None
        self.batch_invariant = False
        """True if a token's hidden state and logits must not depend on the other rows of a batch (E3)."""

    def _head(self, weights: Weights, name: str, tied: bool) -> Head:
        """Load the head. If it is tied it is the embedding, unless a head with other values is stored."""
        if tied and not weights.holds(name):
            return Head.tied(self.embedding, weights.parallel)
        head = Head.load(weights, name, self.vocab_size, self.hidden_size)
        if tied:  # as in transformers, a stored head takes precedence over the config
            shared = Head.tied(self.embedding, weights.parallel)
            if weights.same(head.weight, shared.weight):
                return shared
        return head

    @overload
    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor: ...

    @overload
    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, taps: Sequence[int]
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, taps: Sequence[int] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states ``[tokens, hidden]`` of tokens ``[tokens]`` at ``positions [tokens]`` of their requests.

        With ``taps``, also return the inputs of these layers, ``[tokens, taps * hidden]``, in the order of the taps.
        The number of layers, as a tap, stands for the output of the last one, before the norm.
        """
        with arithmetic(self.batch_invariant):
            return self._forward(input_ids, positions, batch, taps)

    def _forward(
        self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch, taps: Sequence[int] | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        hidden, rotation = self.begin(input_ids, positions)
        tapped = None if taps is None else _Tapped(taps, hidden)
        for index, layer in enumerate(self.layers):
            if tapped is not None:
                tapped.take(index, hidden)
            hidden = layer(hidden, rotation, batch)
        normed = self.end(hidden)
        if tapped is None:
            return normed
        tapped.take(len(self.layers), hidden)
        return normed, tapped.states.flatten(1)

    def begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Return the input of the first layer, and the rotation."""
        return embedded(input_ids, self.embedding), self.rope.at(positions)

    def end(self, hidden: Tensor) -> Tensor:
        """Apply the last norm."""
        return self.norm(hidden.to(self.embedding.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocab]`` float32 of hidden states ``[rows, hidden]``, the same on every rank."""
        assert self.head is not None, "the model was loaded without its head"
        with arithmetic(self.batch_invariant):
            return cast(Tensor, self.head(hidden))


class ScaledDecoder(Decoder):
    """A decoder with factors on its embeddings and on its logits, which may be capped: ``cap * tanh(logits / cap)``
    (Gemma, Granite). ``parts`` are the arguments of :class:`Decoder`."""

    def __init__(
        self, *parts: Any, embedding_factor: float, logit_factor: float = 1.0, logit_cap: float | None = None
    ) -> None:
        super().__init__(*parts)
        self._embedding_factor, self._logit_factor, self._logit_cap = embedding_factor, logit_factor, logit_cap

    def begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        hidden, rotation = super().begin(input_ids, positions)
        return hidden * self._embedding_factor, rotation

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        if self._logit_factor != 1.0:
            logits = logits.mul_(self._logit_factor)
        return logits if self._logit_cap is None else (logits / self._logit_cap).tanh_().mul_(self._logit_cap)


class _Tapped:
    """Copies of the inputs of some layers: a layer may overwrite its input."""

    def __init__(self, taps: Sequence[int], embedded: Tensor) -> None:
        self._taps = taps
        self.states = embedded.new_empty(embedded.shape[0], len(taps), embedded.shape[1])

    def take(self, index: int, hidden: Tensor) -> None:
        for place, tap in enumerate(self._taps):
            if tap == index:
                self.states[:, place].copy_(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device. ``spec`` has this rank's heads."""

    module: Decoder
    spec: ModelSpec
    config: Mapping[str, object]


def kv_scales(model: nn.Module) -> dict[int, tuple[float, float]]:
    """Return the stored scales of keys and values in an fp8 cache, by layer id; of layers that have them."""
    layers = (module for module in model.modules() if isinstance(module, Attention))
    return {layer_id: pair for layer in layers for layer_id, pair in layer.kv_scales.items()}
