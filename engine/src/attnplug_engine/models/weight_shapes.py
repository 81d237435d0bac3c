"""Weights without values: what a model takes, how ranks divide it, and whether a checkpoint has its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from attnplug_engine.checkpoints.safetensors import Checkpoint, CheckpointHeaders, WeightSource
from attnplug_engine.models.weights import SourceTensors, WeightRows, Weights
from attnplug_engine.parallel.collectives import FirstRank
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight

_META = torch.device("meta")
_MOST_ALLOCATED = 1 << 22
"""Elements of the largest tensor in memory. The first operation on ``meta`` may import torch's compiler, which takes
seconds, and models compute with small tensors only."""


class WeightShapes(Weights):
    """Weights of rank 0 of ``ranks``, with any values. Raises ParallelError like ``Weights``, and all ranks the same.

    Nothing is read but the dtypes of tensors, which say what is quantized. Large tensors have no memory.
    """

    def take(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None, exact: bool = False
    ) -> Tensor:
        parts = (rows or slice(None), columns or slice(None))
        own = [len(range(*part.indices(size))) for size, part in zip(shape, parts, strict=False)]
        own += shape[len(parts) :]
        device = _META if math.prod(own) > _MOST_ALLOCATED else None
        return torch.empty(own, device=device, dtype=torch.float32 if exact else self.dtype)

    def same(self, one: Tensor, other: Tensor) -> bool:
        return False

    def integers(self, name: str, *shape: int, below: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def kv_scales(self) -> tuple[float, float]:
        return 1.0, 1.0

    def check(self, suffix: str, parts: Sequence[WeightRows], *in_features: int) -> None:
        pass

    def check_all_taken(self, ignored: Callable[[str], bool]) -> None:
        pass

    def fill(self, target: Tensor, suffix: str, parts: Sequence[WeightRows]) -> None:
        pass

    def fill_quantized(
        self,
        target: QuantizedWeight,
        parts: Sequence[WeightRows],
        in_features: int,
        *,
        columns: slice | None = None,
    ) -> None:
        for part in parts:
            target.scheme.check_shape(SourceTensors(self, part.name), part.total, in_features)
        target.scheme.own_columns(columns, in_features, self.parallel.size)

    def experts_to_fill(self, count: int) -> range:
        return range(1)  # ranks divide all alike

    def expert_stack(
        self,
        name: str,
        experts: int,
        out: int,
        in_features: int,
        *,
        rows: slice | None = None,
        order: Tensor | None = None,
        columns: slice | None = None,
    ) -> QuantizedWeight:
        self._check_experts(name, (experts, out, in_features), rows, columns)
        parts = [WeightRows("", out, rows or slice(0, out))]
        return self.empty_quantized(Mxfp4(), parts, in_features, columns=columns, experts=experts)

    def _check_experts(self, name: str, shape: tuple[int, int, int], rows: slice | None, columns: slice | None) -> None:
        Mxfp4().check_shape(SourceTensors(self, ""), *shape[1:])
        Mxfp4().own_columns(columns, shape[2], self.parallel.size)


class CheckedShapes(WeightShapes):
    """Weights of the shapes that a checkpoint stores. Raises CheckpointError like ``Weights``, except for wrong values,
    which are not read."""

    check = Weights.check
    check_all_taken = Weights.check_all_taken
    experts_to_fill = Weights.experts_to_fill
    kv_scales = Weights.kv_scales

    def take(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None, exact: bool = False
    ) -> Tensor:
        self._read(name, shape, rows, columns)
        return super().take(name, *shape, rows=rows, columns=columns, exact=exact)

    def integers(self, name: str, *shape: int, below: int) -> Tensor:
        Weights.integers(self, name, *shape, below=below)
        return super().integers(name, *shape, below=below)

    def fill(self, target: Tensor, suffix: str, parts: Sequence[WeightRows]) -> None:
        for part in parts:
            self._read(f"{part.name}.{suffix}", (part.total, *target.shape[1:]), part.own, None)

    def fill_quantized(
        self,
        target: QuantizedWeight,
        parts: Sequence[WeightRows],
        in_features: int,
        *,
        columns: slice | None = None,
    ) -> None:
        for part in parts:
            self._load_quantized(target.scheme, part.name, (part.total, in_features), part.own, columns)

    def _check_experts(self, name: str, shape: tuple[int, int, int], rows: slice | None, columns: slice | None) -> None:
        tensors, ranks = SourceTensors(self, ""), self.parallel.size
        Mxfp4().load_experts(tensors, name, shape, rows=rows, columns=columns, ranks=ranks)


def shapes_of(
    source: WeightSource, ranks: int, dtype: torch.dtype, *, head: bool = True, checked: bool = False
) -> WeightShapes:
    """Return a source's weights without values; ``checked`` ones if it is a checkpoint."""
    parallel = FirstRank(ranks)
    if checked and isinstance(source, Checkpoint):
        return CheckedShapes(CheckpointHeaders.of(source), dtype=dtype, device=_META, parallel=parallel, head=head)
    return WeightShapes(source, dtype=dtype, device=_META, parallel=parallel, head=head)


def nbytes(*modules: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of modules, which may share them."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())  # ``meta`` has no addresses
