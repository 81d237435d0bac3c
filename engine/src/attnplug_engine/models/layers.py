"""Basic layers of a decoder: tensor-parallel linear layers, norms, MLP, embedding and head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnplug.hf.config_keys import Config
from attnplug_engine import kernels
from attnplug_engine.kernels.invariant import active
from attnplug_engine.models.host_memory import available_memory
from attnplug_engine.models.matmul import matmul, pack
from attnplug_engine.models.weights import WeightRows, Weights
from attnplug_engine.parallel.collectives import ParallelError, TensorParallel, even_part, padded_part, shifted

if TYPE_CHECKING:
    from attnplug_engine.quantization.scheme import QuantizedWeight


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


_ONE_BY_ONE = 16


def embedded(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of an embedding ``[vocab, hidden]``. torch's own lookup reads up to 16 rows sequentially on a GPU:
    13 µs on an H200, versus 2 µs for 64 rows. Indexing does not."""
    return weight[ids] if weight.is_cuda and ids.numel() <= _ONE_BY_ONE else F.embedding(ids, weight)


class FastModule(nn.Module):
    """A module whose submodules and parameters are ordinary attributes.

    torch keeps them in dicts that it searches after a failed attribute lookup: a microsecond or two, twenty times per
    layer, which matters in steps of small batches on a CPU.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._modules or name in self._parameters:
            self.__dict__[name] = value


class Projection(FastModule):
    """Base class of products with a weight: ``[…, in_features]`` to ``[…, out_features]``."""

    long_wait = False
    """Several short kernels run between the last large product and this one."""

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activate: Callable[[Tensor], Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Multiply ``x``, normed first; the result is activated or added to ``onto``.

        The caller gives up ``onto``: the result may use its memory. For a row-parallel projection only rank 0 adds it,
        so that the sum over ranks has it once.
        """
        raise NotImplementedError

    # torch looks for hooks first: microseconds, ten times per layer, which matter when a CPU decodes.
    __call__ = forward


class Linear(Projection):
    """Product with this rank's part of a weight in the model's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, adds: bool = True) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.packed: Tensor | None = None
        self.bias = None if bias is None else frozen(bias)
        self._adds = adds
        self.counters: Tensor | None = None
        """Arrival counters of ``split_gemm``. Allocated here, so that a graph does not zero them."""
        if kernels.usable(weight):
            from attnplug_engine.kernels.split_gemm import arrival_counters

            self.counters = arrival_counters(weight.shape[0], weight.device)

    @classmethod
    def stacked(
        cls, weights: Weights, parts: Sequence[WeightRows], in_features: int, *, bias: bool | Tensor = False
    ) -> Projection:
        """Stack several stored projections of one input into one product; outputs are concatenated.

        ``bias`` is True for stored ones, or a bias of all rows. Projections of different quantization schemes are
        separate products.
        """
        whole = bias if isinstance(bias, Tensor) else weights.stack("bias", parts) if bias else None
        products: list[Projection] = []
        start = 0
        for scheme, run in groupby(parts, key=lambda part: weights.scheme(part.name)):
            own = list(run)
            stop = start + sum(part.count for part in own)
            own_bias = None if whole is None else whole[start:stop]
            if scheme is None:
                products.append(cls(weights.stack("weight", own, in_features), own_bias))
            else:
                products.append(QuantizedLinear(weights.quantized(scheme, own, in_features), own_bias))
            start = stop
        return products[0] if len(products) == 1 else Concatenated(products)

    @classmethod
    def row_parallel(
        cls, weights: Weights, in_features: int, out_features: int, own: slice, *, bias: bool = False
    ) -> Projection:
        """Load a projection of the columns that this rank owns; the sum over ranks is the result.

        Only rank 0 has the bias, or the sum would count it once per rank.
        """
        whole = weights.take("bias", out_features) if bias else None
        first = weights.parallel.rank == 0
        if (scheme := weights.scheme()) is not None:
            rows = WeightRows("", out_features, slice(0, out_features))
            columns = own if weights.parallel.size > 1 else None
            quantized = weights.quantized(scheme, [rows], in_features, columns=columns)
            return QuantizedLinear(quantized, whole if first else None, adds=first)
        weight = weights.take("weight", out_features, in_features, columns=own)
        return cls(weight, whole if first else None, adds=first)

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activate: Callable[[Tensor], Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        assert activate is None or onto is None, "nothing is added to an activated product"
        onto = onto if self._adds else None
        if kernels.usable(x):
            from attnplug_engine.kernels.gemm_tiles import choose
            from attnplug_engine.kernels.skinny_gemm import skinny_gemm
            from attnplug_engine.kernels.split_gemm import choose_split, split_gemm

            gated = activate is silu_and_mul
            if active():
                from attnplug_engine.kernels.invariant_gemm import invariant_gemm

                x = x if norm is None else norm(x)
                flat, added = x.flatten(0, -2), None if onto is None else onto.flatten(0, -2)
                out = invariant_gemm(flat, self.weight, bias=self.bias, gated=gated, onto=added)
                out = out.unflatten(0, x.shape[:-1])
                return out if activate is None or gated else activate(out)
            split = None if gated else choose_split(x, self.weight, normed=norm is not None)
            if split is not None and self.counters is not None:
                out = split_gemm(x, self.weight, split, self.counters, bias=self.bias, onto=onto)
                return out if activate is None else activate(out)
            config = choose(x, self.weight, normed=norm is not None, gated=gated, long_wait=self.long_wait)
            if config is not None:
                normed = None if norm is None else (norm.weight, norm.eps)
                out = skinny_gemm(x, self.weight, config, bias=self.bias, norm=normed, gated=gated, onto=onto)
                return out if activate is None or gated else activate(out)
        if norm is not None:
            x = norm(x)
        if onto is None:
            out = matmul(x, self.weight, self.bias, self.packed)
            return out if activate is None else activate(out)
        if x.is_cuda and self.bias is None and x.dim() == 2 and x.dtype == onto.dtype:
            return onto.addmm_(x, self.weight.t())  # fuses the sum into the product
        return matmul(x, self.weight, self.bias, self.packed).add_(onto)

    __call__ = forward


class QuantizedLinear(Projection):
    """Product with this rank's part of a quantized weight."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, *, adds: bool = True) -> None:
        super().__init__()
        self.weight = weight
        self.bias = None if bias is None else frozen(bias)
        self._adds = adds
        self._multiply = weight.scheme.multiply

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activate: Callable[[Tensor], Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        fused = None
        if norm is not None:
            if self.weight.takes(x):
                fused = norm.weight, norm.eps
            else:
                x = norm(x)
        gated, onto = activate is silu_and_mul, onto if self._adds else None
        out = self._multiply(
            x, self.weight, bias=self.bias, gated=gated, onto=onto, norm=fused, long_wait=self.long_wait
        )
        return out if activate is None or gated else activate(out)

    __call__ = forward


class Concatenated(Projection):
    """Products of one input with several weights; outputs are concatenated."""

    def __init__(self, products: Sequence[Projection]) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)

    def forward(
        self,
        x: Tensor,
        *,
        norm: RMSNorm | None = None,
        activate: Callable[[Tensor], Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        x = x if norm is None else norm(x)
        out = torch.cat([product(x) for product in self.products], -1)
        out = out if onto is None else out.add_(onto)
        return out if activate is None else activate(out)

    __call__ = forward


class RMSNorm(FastModule):
    """Root-mean-square norm over the last dimension, with a weight per element.

    ``zero_centred``: the stored weight is added to 1 (Qwen3-Next). The sum, and then also the norm, are float32: in a
    narrower dtype a small weight would be lost beside the 1.
    """

    def __init__(self, weights: Weights, width: int, eps: float, *, zero_centred: bool = False) -> None:
        super().__init__()
        weight = weights.take("weight", width, exact=zero_centred)
        self.weight = frozen(weight.add_(1.0) if zero_centred else weight)
        self._shape = (width,)
        self.eps = eps
        self._long = self._least = None
        if self.weight.device.type == "cpu" and self.weight.dtype is torch.float32:
            self._long, self._least = self.weight * width**0.5, self.weight.new_tensor((width * eps) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self._long is not None and self._least is not None and x.dtype is torch.float32:
            # torch has no CPU kernel for the norm and composes it of twice as many operations.
            lengths = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / torch.hypot(lengths, self._least)).mul_(self._long)
        if x.dim() == 2 and kernels.usable(x):
            from attnplug_engine.kernels.elementwise import rms_norm

            return rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)

    __call__ = forward


class ColumnNorm(nn.Module):
    """Root-mean-square norm over columns that the ranks share, in ``groups`` that are normed separately.

    A single group over all ranks costs a reduction of one number per token; of several groups each rank has whole ones.
    """

    def __init__(self, weights: Weights, width: int, eps: float, own: slice, *, groups: int = 1) -> None:
        super().__init__()
        parallel = weights.parallel
        if groups > 1 and groups % parallel.size:
            raise ParallelError(
                f"{groups} groups of normed columns cannot be divided evenly over {parallel.size} ranks",
                "norm groups",
                groups,
                parallel.size,
            )
        self.weight = frozen(weights.take("weight", width, rows=own, exact=True))
        self._groups = max(groups // parallel.size, 1)
        self._shape = (width // groups,)
        self._eps = eps
        self._parallel = parallel if groups == 1 and parallel.size > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """``[tokens, own columns]`` to the same in float32."""
        x = x.float()
        if self._parallel is None:
            return (
                F.rms_norm(x.unflatten(-1, (self._groups, -1)), self._shape, None, self._eps).flatten(-2) * self.weight
            )
        squares = self._parallel.all_reduce(x.square().sum(-1, keepdim=True))
        return x * (squares / self._shape[0] + self._eps).rsqrt() * self.weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[…, gate | up]``."""
    if gate_up.dim() == 2 and kernels.usable(gate_up):
        from attnplug_engine.kernels import elementwise

        return elementwise.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def relu_squared(up: Tensor) -> Tensor:
    return F.relu(up).square_()


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` of ``[…, gate | up]``, with the tanh approximation (Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True, slots=True)
class ClippedGate:
    """``gate * sigmoid(alpha * gate) * (up + offset)`` of ``[…, gate | up]``, with the gate at most ``limit`` and
    ``up`` within ``[-limit, limit]`` (DeepSeek-V4, gpt-oss)."""

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return torch.sigmoid(gate * self.alpha).mul_(gate).mul_(up.add_(self.offset))


@dataclass(frozen=True, slots=True)
class MLPForm:
    """Storage and computation of an MLP: its input projections, activation, and output projection."""

    inputs: tuple[str, ...]
    activate: Callable[[Tensor], Tensor]
    output: str
    packed: str | None = None
    """Name of a stored projection that has the rows of all ``inputs``, whose names are then not used (Phi-3)."""

    def rows(self, columns: int, own: slice) -> list[WeightRows]:
        """Return this rank's rows of the input projections, each ``[columns, hidden]``."""
        if self.packed is None:
            return [WeightRows(name, columns, own) for name in self.inputs]
        starts = range(0, len(self.inputs) * columns, columns)
        return [WeightRows(self.packed, len(starts) * columns, shifted(own, start)) for start in starts]


GATED = MLPForm(("gate_proj", "up_proj"), silu_and_mul, "down_proj")
GATED_BY_GELU = MLPForm(("gate_proj", "up_proj"), gelu_and_mul, "down_proj")
GATED_PACKED = MLPForm(("gate", "up"), silu_and_mul, "down_proj", packed="gate_up_proj")
GATED_BY_NUMBER = MLPForm(("w1", "w3"), silu_and_mul, "w2")
"""The same under the names of Mixtral's experts (also Kimi-Linear, MiniMax)."""
SQUARED = MLPForm(("up_proj",), relu_squared, "down_proj")

_ROWS_AT_ONCE = 1024
"""Rows that an MLP processes together on a CPU. Intermediate results of more rows exceed the caches, and are so large
that their memory is mapped anew each time."""


class MLP(FastModule):
    """``down(silu(gate(x)) * up(x))``, or another form, over this rank's intermediate columns: a partial sum."""

    def __init__(
        self, weights: Weights, hidden: int, intermediate: int, *, form: MLPForm = GATED, bias: bool = False
    ) -> None:
        super().__init__()
        self.form = form
        own = even_part(intermediate, weights.parallel, "MLP columns")
        self.gate_up = Linear.stacked(weights, form.rows(intermediate, own), hidden, bias=bias)
        self.down = Linear.row_parallel(weights.at(form.output), intermediate, hidden, own, bias=bias)
        self._activate = form.activate

    def forward(self, x: Tensor, *, norm: RMSNorm | None = None, onto: Tensor | None = None) -> Tensor:
        if x.is_cpu and x.dim() == 2 and x.shape[0] > _ROWS_AT_ONCE:
            adds = [None] * -(-x.shape[0] // _ROWS_AT_ONCE) if onto is None else onto.split(_ROWS_AT_ONCE)
            parts = zip(x.split(_ROWS_AT_ONCE), adds, strict=True)
            return torch.cat([self._forward(part, norm, add) for part, add in parts])
        return self._forward(x, norm, onto)

    def _forward(self, x: Tensor, norm: RMSNorm | None, onto: Tensor | None) -> Tensor:
        return self.down(self.gate_up(x, norm=norm, activate=self._activate), onto=onto)

    __call__ = forward


def check_activation(config: Config, key: str = "hidden_act", activation: str = "silu") -> None:
    """Raise if a model has another activation than the supported one."""
    if (config.optional_text(key) or activation) != activation:
        raise config.wrong(key, repr(activation))


class Head(nn.Module):
    """Hidden states to logits: each rank computes its rows of the vocabulary, and all are gathered on every rank."""

    def __init__(self, weight: Tensor, vocab: int, padded: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = frozen(weight)
        self.packed: Tensor | None = None
        self._vocab, self._padded, self._parallel = vocab, padded, parallel

    @classmethod
    def load(cls, weights: Weights, name: str, vocab: int, hidden: int) -> Head:
        own, padded = padded_part(vocab, weights.parallel)
        return cls(weights.take(name, vocab, hidden, rows=own), vocab, padded, weights.parallel)

    @classmethod
    def tied(cls, embedding: Tensor, parallel: TensorParallel) -> Head:
        """Return a head that shares the memory of the embedding ``[vocab, hidden]``."""
        own, padded = padded_part(embedding.shape[0], parallel)
        return cls(embedding[own], embedding.shape[0], padded, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[rows, hidden]`` to ``[rows, vocab]`` float32."""
        logits = self._product(hidden)
        if self._parallel.size == 1:
            return logits
        if logits.shape[1] < self._padded:
            logits = F.pad(logits, (0, self._padded - logits.shape[1]))
        return self._parallel.all_gather(logits, dim=1)[:, : self._vocab]

    def _product(self, hidden: Tensor) -> Tensor:
        """Return ``[rows, own vocab]`` float32; on a GPU without rounding to the model's dtype in between."""
        if hidden.dtype is torch.float32 or not hidden.is_cuda:
            return matmul(hidden, self.weight, packed=self.packed).float()
        if kernels.usable(hidden):
            from attnplug_engine.kernels.gemm_tiles import choose
            from attnplug_engine.kernels.skinny_gemm import skinny_gemm

            if active():
                return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
            config = choose(hidden, self.weight)
            if config is not None:
                return skinny_gemm(hidden, self.weight, config, dtype=torch.float32)
        return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)


_SHARE_OF_PACKED = 0.25


def pack_weights(model: nn.Module) -> None:
    """Keep packed copies of weights for faster products, if this CPU benefits and they take a small part of free
    memory."""
    users = [module for module in model.modules() if isinstance(module, Linear | Head)]
    if sum(user.weight.nbytes for user in users) <= _SHARE_OF_PACKED * available_memory():
        for user in users:
            user.packed = pack(user.weight)
