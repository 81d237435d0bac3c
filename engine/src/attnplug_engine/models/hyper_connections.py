"""Hyper-connections: a residual of several streams, mixed around every block (DeepSeek-V4's mHC)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnplug import ForwardBatch
from attnplug.hf.config_keys import Config
from attnplug_engine.kernels.invariant import active
from attnplug_engine.models.decoder import MODEL, Attention, Decoder, MakeNorm, Names, norm_eps
from attnplug_engine.models.layers import frozen
from attnplug_engine.models.rope import Positions, Rotation
from attnplug_engine.models.weights import Weights


class _Mixing(nn.Module):
    """Base class: a float32 product of all streams of a token, normed together, ``[tokens, columns]``."""

    def __init__(self, weights: Weights, name: str, parts: Sequence[int], config: Config) -> None:
        """``parts`` are the numbers of columns that share a scale."""
        super().__init__()
        self.streams, width, columns = config.integer("hc_mult"), config.integer("hidden_size"), sum(parts)
        self.product = frozen(weights.take(f"{name}_fn", columns, self.streams * width, exact=True))
        self.base = frozen(weights.take(f"{name}_base", columns, exact=True))
        scales = weights.take(f"{name}_scale", len(parts), exact=True)
        self.scale = frozen(torch.cat([scale.expand(part) for scale, part in zip(scales, parts, strict=True)]))
        self.least = config.number("hc_eps")
        self._eps = norm_eps(config)

    def mixes(self, streams: Tensor) -> Tensor:
        flat = streams.flatten(1).float()
        return F.linear(F.rms_norm(flat, flat.shape[1:], None, self._eps), self.product) * self.scale + self.base

    def collapsed(self, streams: Tensor, share: Tensor) -> Tensor:
        """Return the streams' sum ``[tokens, hidden]``, weighted by the sigmoid of ``share [tokens, streams]``."""
        weights = share.sigmoid() + self.least
        return (weights.unsqueeze(-1) * streams).sum(1).to(streams.dtype)


class HyperConnection(_Mixing):
    """Mixing around a block: how it reads the streams ``[tokens, streams, hidden]``, and how its output is written
    back."""

    def __init__(self, weights: Weights, name: str, config: Config) -> None:
        streams = config.integer("hc_mult")
        parts = (streams, streams, streams * streams)
        super().__init__(weights, name, parts, config)
        self._parts = parts
        self._rounds = config.integer("hc_sinkhorn_iters")

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's input ``[tokens, hidden]``, the weight of each stream in its output ``[tokens, streams]``,
        and the weight of stream ``[:, i]`` in stream ``[:, :, j]`` of the next residual."""
        read, write, kept = self.mixes(streams).split(self._parts, dim=1)
        square = kept.unflatten(1, (self.streams, self.streams))
        return self.collapsed(streams, read), 2 * write.sigmoid(), self._balanced(square)

    def _balanced(self, logits: Tensor) -> Tensor:
        """Normalise rows and columns alternately until both sum to one (Sinkhorn), so that streams neither grow nor
        fade."""
        matrix = logits.softmax(-1) + self.least
        matrix = matrix / (matrix.sum(-2, keepdim=True) + self.least)
        for _ in range(self._rounds - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + self.least)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + self.least)
        return matrix


def next_streams(streams: Tensor, output: Tensor, write: Tensor, kept: Tensor) -> Tensor:
    """Return the residual behind a block with this ``output [tokens, hidden]``."""
    dtype = streams.dtype
    if active():  # a batched product may depend on the number of tokens
        mixed = (kept.to(dtype).unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
        return write.to(dtype).unsqueeze(-1) * output.unsqueeze(1) + mixed
    return torch.baddbmm(write.to(dtype).unsqueeze(-1) * output.unsqueeze(1), kept.to(dtype).transpose(1, 2), streams)


class HyperBlock(nn.Module):
    """One layer: attention and experts, each between two mixes of the streams, each reduced once.

    ``mlp`` is a module from ``[tokens, hidden]`` and the token ids to a partial sum.
    """

    def __init__(self, weights: Weights, config: Config, norm: MakeNorm, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_mix, self.mlp_mix = (HyperConnection(weights, name, config) for name in ("hc_attn", "hc_ffn"))
        self.input_norm, self.mlp_norm = norm(weights.at("attn_norm")), norm(weights.at("ffn_norm"))
        self.attention, self.mlp = attention, mlp
        self._parallel = weights.parallel

    def forward(self, streams: Tensor, rotation: Rotation, batch: ForwardBatch) -> Tensor:
        """``[tokens, streams, hidden]`` to the same shape."""
        hidden, write, kept = self.attention_mix(streams)
        attended = self._parallel.all_reduce(self.attention(hidden, rotation, batch, norm=self.input_norm))
        streams = next_streams(streams, attended, write, kept)
        hidden, write, kept = self.mlp_mix(streams)
        mixed = self._parallel.all_reduce(self.mlp(self.mlp_norm(hidden), batch.input_ids))
        return next_streams(streams, mixed, write, kept)


class HyperDecoder(Decoder):
    """A decoder whose hidden states are streams between its blocks; they are collapsed before the last norm."""

    def __init__(
        self,
        weights: Weights,
        config: Config,
        norm: MakeNorm,
        rope: Positions,
        blocks: list[HyperBlock],
        names: Names = MODEL,
    ) -> None:
        super().__init__(weights, config, norm, rope, blocks, names)
        streams = config.integer("hc_mult")
        self.last_mix = _Mixing(weights.at(f"{names.model}.hc_head"), "hc", (streams,), config)

    def begin(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        hidden, rotation = super().begin(input_ids, positions)
        return hidden.unsqueeze(1).repeat(1, self.last_mix.streams, 1), rotation

    def end(self, hidden: Tensor) -> Tensor:
        mix = self.last_mix
        return super().end(mix.collapsed(hidden, mix.mixes(hidden)))
