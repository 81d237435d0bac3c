"""The plain parts of a decoder: linear maps that ranks share, norms, the gated MLP, embeddings and the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.config_keys import Config
from attnplug_engine.models.weights import Rows, Weights
from attnplug_engine.parallel import TensorParallel, even_part, padded_part


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """``[…, in_features]`` to ``[…, out_features]``, with a weight that is already this rank's."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    @classmethod
    def stacked(cls, weights: Weights, parts: Sequence[Rows], in_features: int, *, bias: bool = False) -> Linear:
        """Several stored projections of one input as one product; their outputs lie one after the other."""
        return cls(weights.stack("weight", parts, in_features), weights.stack("bias", parts) if bias else None)

    @classmethod
    def row_parallel(
        cls, weights: Weights, in_features: int, out_features: int, own: slice, *, bias: bool = False
    ) -> Linear:
        """A projection of the columns that this rank owns; the sum over ranks is the result.

        The bias is rank 0's alone: the sum would count it once per rank otherwise.
        """
        weight = weights.take("weight", out_features, in_features, columns=own)
        whole = weights.take("bias", out_features) if bias else None
        return cls(weight, whole if weights.parallel.rank == 0 else None)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, with a weight for each place of it."""

    def __init__(self, weights: Weights, width: int, eps: float) -> None:
        super().__init__()
        self.weight = frozen(weights.take("weight", width))
        self._shape = (width,)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._eps)


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` over this rank's part of the intermediate columns: a sum to be reduced."""

    def __init__(self, weights: Weights, hidden: int, intermediate: int, *, bias: bool = False) -> None:
        super().__init__()
        own = even_part(intermediate, weights.parallel, "MLP columns")
        parts = [Rows(name, intermediate, own) for name in ("gate_proj", "up_proj")]
        self.gate_up = Linear.stacked(weights, parts, hidden, bias=bias)
        self.down = Linear.row_parallel(weights.at("down_proj"), intermediate, hidden, own, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(silu_and_mul(self.gate_up(x))))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[…, gate | up]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def check_activation(config: Config) -> None:
    """Refuse a model whose MLP is gated by something else than SiLU."""
    if (config.optional_text("hidden_act") or "silu") != "silu":
        raise config.wrong("hidden_act", "'silu'")


class Head(nn.Module):
    """Hidden states to logits: each rank its rows of the vocabulary, and then all of them on every rank."""

    def __init__(self, weight: Tensor, vocab: int, padded: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self._vocab, self._padded, self._parallel = vocab, padded, parallel

    @classmethod
    def load(cls, weights: Weights, vocab: int, hidden: int) -> Head:
        own, padded = padded_part(vocab, weights.parallel)
        return cls(weights.take("weight", vocab, hidden, rows=own), vocab, padded, weights.parallel)

    @classmethod
    def tied(cls, embedding: Tensor, parallel: TensorParallel) -> Head:
        """The head that is the embedding ``[vocab, hidden]`` once more, in the same memory."""
        own, padded = padded_part(embedding.shape[0], parallel)
        return cls(embedding[own], embedding.shape[0], padded, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]`` float32."""
        logits = F.linear(hidden, self.weight).float()
        if self._parallel.size == 1:
            return logits
        if logits.shape[1] < self._padded:
            logits = F.pad(logits, (0, self._padded - logits.shape[1]))
        return self._parallel.all_gather(logits, dim=1)[:, : self._vocab]
