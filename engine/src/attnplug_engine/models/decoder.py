"""The decoder that every architecture here is: embedding, blocks, a last norm, and the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast, overload

import torch
from torch import Tensor, nn

from attnplug import ForwardBatch, ModelSpec
from attnplug.host import Config
from attnplug_engine.models.layers import Head, Part, RMSNorm, embedded, frozen
from attnplug_engine.models.rope import Positions, Rotation
from attnplug_engine.models.weights import Weights

EPS = 1e-6
"""What most config classes assume for ``rms_norm_eps``; those that do not say so in their architecture's defaults."""

MakeNorm = Callable[[Weights], RMSNorm]
"""The norm of a model's hidden states, from the weights under its own name."""


def norm_eps(config: Config) -> float:
    eps = config.optional_number("rms_norm_eps", least=0.0)
    return EPS if eps is None else eps


def hidden_norm(config: Config, *, zero_centred: bool = False) -> MakeNorm:
    """How a model makes the norms of its hidden states, between its blocks and in them."""
    width, eps = config.integer("hidden_size"), norm_eps(config)
    return lambda weights: RMSNorm(weights, width, eps, zero_centred=zero_centred)


class Attention(Part):
    """What a block calls: hidden states ``[tokens, hidden]`` to this rank's part of the attention's output.

    Subclass contract: the output is a sum to be reduced over the ranks, and a tensor of its own. ``norm`` is applied to
    the hidden states first, and rank 0 adds the output to ``onto``: each becomes part of a product where that pays.
    """

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
    """An MLP in the place of attention, for models in which one block is one or the other (Nemotron-H)."""

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


class Block(Part):
    """One layer: attention and MLP, each after a norm, each added to what came in, each reduced once.

    ``mlp`` is a module from ``[tokens, hidden]`` to a sum to be reduced, with ``norm`` and ``onto`` as attention has.
    Without ``norms_input`` attention has no norm before it (EAGLE).
    """

    def __init__(
        self, weights: Weights, norm: MakeNorm, attention: Attention, mlp: nn.Module, *, norms_input: bool = True
    ) -> None:
        super().__init__()
        self.input_norm = norm(weights.at("input_layernorm")) if norms_input else None
        self.attention = attention
        self.mlp_norm = norm(weights.at("post_attention_layernorm"))
        self.mlp = mlp
        self._parallel = weights.parallel

    def forward(self, hidden: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, hidden]``."""
        attended = self.attention(hidden, rotation, batch, norm=self.input_norm, onto=hidden)
        hidden = self._parallel.all_reduce(attended)
        return self._parallel.all_reduce(self.mlp(hidden, norm=self.mlp_norm, onto=hidden))


class MixerBlock(Part):
    """One layer of a model in which attention and MLP are layers of their own: Mamba-2, Nemotron-H.

    With ``exact_sum`` the hidden states between blocks are float32 whatever the model's type.
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
    """What a checkpoint calls the parts of a decoder."""

    model: str
    embedding: str
    norm: str
    head: str = "lm_head.weight"

    def layer(self, index: int) -> str:
        return f"{self.model}.layers.{index}"


MODEL = Names("model", "embed_tokens", "norm")
BACKBONE = Names("backbone", "embeddings", "norm_f")


class Decoder(nn.Module):
    """A causal language model, or a rank's part of one. Made on its device from its weights, and stays there.

    Tokens of all requests are flat, one request after the other. Layers find the active ``ModelAttention``, so
    ``forward`` is called inside its ``running()`` with a planned batch. Run it under ``torch.inference_mode``.
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
        # Whole on every rank: a vocabulary in parts would cost a collective per step to save little memory.
        embedding, tied = f"{names.embedding}.weight", config.flag("tie_word_embeddings")
        if tied and weights.holds(names.head) and not model.holds(embedding):
            self.embedding = frozen(weights.take(names.head, self.vocab_size, self.hidden_size))
        else:
            self.embedding = frozen(model.take(embedding, self.vocab_size, self.hidden_size))
        self.rope = rope
        self.layers = nn.ModuleList(blocks)
        self.norm = norm(model.at(names.norm))
        self.head = self._head(weights, names.head, tied) if weights.head else None

    def _head(self, weights: Weights, name: str, tied: bool) -> Head:
        """The stored head; the embedding once more where it is tied, unless a head with other numbers is stored."""
        if tied and not weights.holds(name):
            return Head.tied(self.embedding, weights.parallel)
        head = Head.load(weights, name, self.vocab_size, self.hidden_size)
        if tied:  # transformers does the same: what is stored wins over what the config says
            shared = Head.tied(self.embedding, weights.parallel)
            if torch.equal(head.weight, shared.weight):
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
        """Hidden states ``[tokens, hidden]`` of tokens ``[tokens]`` at ``positions`` ``[tokens]`` of their requests.

        With ``taps`` also what goes into these layers: ``[tokens, taps * hidden]``, in the order of the taps. The
        number of layers, as a tap, stands for what comes out of the last one, before the norm.
        """
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
        """What the first layer is given."""
        return embedded(input_ids, self.embedding), self.rope.at(positions)

    def end(self, hidden: Tensor) -> Tensor:
        """The last layer's hidden states, normed."""
        return self.norm(hidden.to(self.embedding.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]`` float32 for hidden states ``[rows, hidden]``, the same on every rank."""
        assert self.head is not None, "the model was loaded without its head"
        return cast(Tensor, self.head(hidden))


class _Tapped:
    """Copies of what goes into some layers: a layer may write its sum into the same memory."""

    def __init__(self, taps: Sequence[int], embedded: Tensor) -> None:
        self._taps = taps
        self.states = embedded.new_empty(embedded.shape[0], len(taps), embedded.shape[1])

    def take(self, index: int, hidden: Tensor) -> None:
        for place, tap in enumerate(self._taps):
            if tap == index:
                self.states[:, place].copy_(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device. ``spec`` has the heads that this rank has of it."""

    module: Decoder
    spec: ModelSpec
    config: Mapping[str, object]
