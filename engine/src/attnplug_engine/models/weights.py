"""Weights of a model by name: in the model's dtype, only the rank's part, with a record of what was taken."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnplug_engine.checkpoints.safetensors import (
    CheckpointError,
    StoredTensor,
    UnusedTensors,
    WeightSource,
    quantization_key,
    shortened,
)
from attnplug_engine.parallel.collectives import TensorParallel, length

if TYPE_CHECKING:
    from attnplug_engine.quantization.config import Quantization
    from attnplug_engine.quantization.mxfp4 import Mxfp4
    from attnplug_engine.quantization.scheme import QuantizedWeight, Scheme

# Buffers in old checkpoints that every model computes by itself.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True)
class WeightRows:
    """Rows of a stored weight ``[total, in_features]`` for a stack: this rank's, possibly reordered.

    ``order`` holds indices into the owned rows, one per row of the result; other rows are not taken.
    """

    name: str
    total: int
    own: slice
    order: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of rows in the stack."""
        return length(self.own) if self.order is None else len(self.order)


class Weights:
    """Tensors under one prefix of a source, in the model's dtype and on its device.

    ``at`` returns a submodule's tensors. All tensors taken below the root are recorded in one place, so that
    ``check_all_taken`` at the root finds unused ones.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
        head: bool = True,
        prefix: str = "",
        quantization: Quantization | None = None,
        taken: set[str] | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.parallel = parallel
        self.head = head
        """True if the model is to have its head."""
        self._source = source
        self._prefix = prefix
        self._quantization = quantization_of(source) if taken is None else quantization
        self._taken = set() if taken is None else taken
        self._on_read = on_read
        """Called after each tensor with the number of tensors read so far."""

    def at(self, module: str) -> Weights:
        """Return the weights of a submodule: ``"layers.3"``."""
        return type(self)(
            self._source,
            dtype=self.dtype,
            device=self.device,
            parallel=self.parallel,
            head=self.head,
            prefix=f"{self._prefix}{module}.",
            quantization=self._quantization,
            taken=self._taken,
            on_read=self._on_read,
        )

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Return True if two weights have the same values, so that one can stand for both."""
        return torch.equal(one, other)

    def holds(self, name: str) -> bool:
        """Return True if the source has a tensor, or the codes of a weight, of this name: for optional tensors and for
        those with two possible names."""
        return _holds(self._source, self._prefix + name, self._quantization)

    def take(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None, exact: bool = False
    ) -> Tensor:
        """Return a tensor, or this rank's rows and columns of it. ``exact`` keeps it float32, whatever the model's
        dtype."""
        part = self._read(name, shape, rows, columns)
        # Always a copy: a file's memory map is not ours, and is not aligned for vector loads.
        return part.to(self.device, torch.float32 if exact else self.dtype, copy=True).contiguous()

    def integers(self, name: str, *shape: int, below: int) -> Tensor:
        """Return a tensor of integers from 0 to ``below - 1`` as int64."""
        full_name = self._prefix + name
        whole = self._source.integers(full_name, shape, below)
        self._note(full_name)
        return whole.to(self.device, copy=True)

    def kv_scales(self) -> tuple[float, float]:
        """Return the stored scales of an attention layer's keys and values in an fp8 cache; 1.0 if there are none."""
        if self.holds("q_scale"):  # not used: queries are not quantized
            self._note(f"{self._prefix}q_scale")
        key, value = self._kv_scale("k"), self._kv_scale("v")
        if key is None and value is None:
            return 1.0, 1.0
        if key is None or value is None:
            found, missing = (f"{self._prefix}{kind}_scale" for kind in ("vk" if key is None else "kv"))
            raise CheckpointError(
                f"the checkpoint {self._source.name!r} has a scale of an fp8 cache, {found!r}, but no {missing!r}; "
                "a layer needs both or neither",
                self._source.name,
                missing,
            )
        return key, value

    def _kv_scale(self, kind: str) -> float | None:
        # Names by llm-compressor, ModelOpt, for stacked projections, and by AutoFP8 (one for keys and values).
        names = (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"qkv_proj.{kind}_scale", "kv_scale")
        name = next(filter(self.holds, names), None)
        if name is None:
            return None
        full_name = self._prefix + name
        stored = self._source.stored(full_name)
        shape = () if stored is not None and not stored.shape else (1,)
        scale = self._read(name, shape, None, None).item()
        if not 0 < scale < math.inf:
            raise CheckpointError(
                f"the checkpoint {self._source.name!r} has {scale} in {full_name!r}; a scale of cached keys or values "
                "is finite and positive",
                self._source.name,
                full_name,
            )
        return scale

    def stack(self, suffix: str, parts: Sequence[WeightRows], *in_features: int) -> Tensor:
        """Stack several stored tensors into one, ``[rows of all parts, *in_features]``, for one matrix product."""
        self.check(suffix, parts, *in_features)
        count = sum(part.count for part in parts)
        stacked = torch.empty(count, *in_features, dtype=self.dtype, device=self.device)
        self.fill(stacked, suffix, parts)
        return stacked

    def check(self, suffix: str, parts: Sequence[WeightRows], *in_features: int) -> None:
        """Raise if the parts are not stored with these shapes. Called before memory is allocated, because a config may
        lie."""
        for part in parts:
            scheme = self.scheme(part.name) if suffix == "weight" else None
            if scheme is None:
                self._source.check(f"{self._prefix}{part.name}.{suffix}", (part.total, *in_features))
            elif not self._source.random:
                shape = (part.total, in_features[0] // scheme.per_code)
                self._source.check(f"{self._prefix}{part.name}.{scheme.code_name}", shape, scheme.code_kinds)

    def fill(self, target: Tensor, suffix: str, parts: Sequence[WeightRows]) -> None:
        """Fill ``target [rows of all parts, …]`` with the parts' rows, part by part."""
        start = 0
        for part in parts:
            stop = start + part.count
            stored = self._read(f"{part.name}.{suffix}", (part.total, *target.shape[1:]), part.own, None)
            target[start:stop].copy_(stored if part.order is None else stored[part.order])
            start = stop

    def scheme(self, module: str = "") -> Scheme | None:
        """Return the quantization scheme of a module's weight; None if it is not quantized.

        The stored dtype decides: published checkpoints leave modules unquantized that their config does not list.
        """
        if self._quantization is None:
            return None
        tensors = SourceTensors(self, module)
        own, codes = tensors.prefix[:-1], self._quantization.code_names
        in_file = (self._source.stored_name(f"{own}.{code}").removesuffix(f".{code}") for code in codes)
        schemes = self._quantization.schemes(own, *in_file)
        if not schemes:
            return None
        if self._source.random:
            return schemes[0]
        found = next((scheme for scheme in schemes if scheme.matches(tensors)), None)
        if found is None and tensors.stored("weight") is None:
            return schemes[0]  # loading reports the missing tensor by its name
        return found

    def quantized(
        self, scheme: Scheme, parts: Sequence[WeightRows], in_features: int, *, columns: slice | None = None
    ) -> QuantizedWeight:
        """Stack quantized weights, this rank's ``columns`` of them: ``[rows of all parts, columns]``."""
        weight = self.empty_quantized(scheme, parts, in_features, columns=columns)
        self.fill_quantized(weight, parts, in_features, columns=columns)
        return weight

    def empty_quantized(
        self,
        scheme: Scheme,
        parts: Sequence[WeightRows],
        in_features: int,
        *,
        columns: slice | None = None,
        experts: int | None = None,
    ) -> QuantizedWeight:
        """Return an uninitialised weight for ``fill_quantized``, or the weights of ``experts``.

        Each row has scales of its own if parts begin or end inside of a block, or have another order.
        """
        from attnplug_engine.quantization.scheme import QuantizedWeight

        rows = scheme.rows_per_scale
        whole = all(part.order is None and part.own.start % rows == 0 for part in parts)
        if not whole or any(part.count % rows for part in parts[:-1]):
            rows = 1
        width = in_features if columns is None else length(columns)
        count = sum(part.count for part in parts)
        scale_rows = sum(-(-part.count // rows) for part in parts)
        lead = () if experts is None else (experts,)
        codes = torch.empty(*lead, count, width // scheme.per_code, dtype=scheme.code_dtype, device=self.device)
        first = f"0.{parts[0].name}" if experts is not None else parts[0].name
        scales = torch.empty(
            *lead,
            scale_rows,
            scheme.scale_shape(1, width)[1],
            dtype=scheme.kept_scales(SourceTensors(self, first)),
            device=self.device,
        )
        return QuantizedWeight(scheme, codes, scales, rows)

    def fill_quantized(
        self,
        target: QuantizedWeight,
        parts: Sequence[WeightRows],
        in_features: int,
        *,
        columns: slice | None = None,
    ) -> None:
        """Fill a weight with the parts' rows, part by part."""
        start = first = 0
        for part in parts:
            codes, scales = self._load_quantized(target.scheme, part.name, (part.total, in_features), part.own, columns)
            if target.rows_per_scale < target.scheme.rows_per_scale:
                scales = _per_row(scales, part.own, target.scheme.rows_per_scale)
            if part.order is not None:
                # torch does not index float8 on every device
                codes = codes.view(torch.uint8)[part.order].view(codes.dtype)
                scales = scales[part.order]
            stop, last = start + part.count, first + scales.shape[0]
            target.codes[start:stop].copy_(codes)
            target.scales[first:last].copy_(scales)
            start, first = stop, last

    def experts_to_fill(self, count: int) -> range:
        """Return the indices of experts whose weights are filled one by one, of ``count``."""
        return range(count)

    def expert_scheme(self, matrices: Sequence[str]) -> Scheme | None:
        """Return the scheme of the experts' ``matrices``; None if they are not quantized. Raises CheckpointError if
        only some are."""
        first = self.at("0")
        schemes = {name: first.scheme(name) for name in matrices}
        plain = [name for name, scheme in schemes.items() if scheme is None]
        if plain and len(plain) < len(schemes):
            name = f"{first._prefix}{plain[0]}"
            raise CheckpointError(
                f"the checkpoint {self._source.name!r} has quantized experts, but {name!r} is not quantized; exclude "
                f"{', '.join(matrices)} of experts from quantization together, or none of them",
                self._source.name,
                f"{name}.weight",
            )
        return schemes[matrices[0]]

    def expert_stack_scheme(self, name: str) -> Mxfp4 | None:
        """Return the scheme of all experts' weights in one tensor (gpt-oss); None if they are not quantized.

        The stored tensors decide, as in ``scheme``.
        """
        if self._quantization is None:
            return None
        from attnplug_engine.quantization.mxfp4 import Mxfp4

        schemes = self._quantization.schemes(self._prefix.removesuffix("."))
        found = next((scheme for scheme in schemes if isinstance(scheme, Mxfp4)), None)
        if self._source.random:
            return found if found in schemes[:1] else None
        return None if self.holds(name) and not self.holds(f"{name}_blocks") else found

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
        """Return weights ``[experts, out, in]`` that are stored as one MXFP4 tensor: this rank's ``rows``, in
        ``order``, and ``columns``."""
        from attnplug_engine.quantization.mxfp4 import Mxfp4
        from attnplug_engine.quantization.scheme import QuantizedWeight

        tensors, scheme = SourceTensors(self, ""), Mxfp4()
        shape = (experts, out, in_features)
        if self._source.random:
            drawn = self._source.tensor(f"{self._prefix}{name}", (experts, in_features, out))
            self._note(f"{self._prefix}{name}")
            tensors.quantized = scheme.quantize_experts(tensors, name, drawn.transpose(1, 2))
        codes, scales = scheme.load_experts(tensors, name, shape, rows=rows, columns=columns, ranks=self.parallel.size)
        # Always a copy: a file's memory map is not ours. Rows are reordered on the device, which is faster.
        codes, scales = (part.to(self.device, copy=order is None) for part in (codes, scales))
        if order is not None:
            codes, scales = codes[:, order], scales[:, order]
        return QuantizedWeight(scheme, codes.contiguous(), scales.contiguous(), scheme.rows_per_scale)

    def _load_quantized(
        self, scheme: Scheme, module: str, shape: tuple[int, int], rows: slice | None, columns: slice | None
    ) -> tuple[Tensor, Tensor]:
        tensors = SourceTensors(self, module)
        if self._source.random:
            scheme.check_shape(tensors, *shape)
            drawn = self._source.tensor(f"{tensors.prefix}weight", shape)
            tensors.note("weight")
            tensors.quantized = scheme.quantize(drawn)
        return scheme.load(tensors, shape, rows=rows, columns=columns, ranks=self.parallel.size)

    def check_all_taken(self, ignored: Callable[[str], bool]) -> None:
        """Raise if the source holds tensors that no module took, other than known irrelevant ones."""
        unused = [
            name
            for name in self._source.names()
            if name not in self._taken and not _HARMLESS.search(name) and not ignored(name) and not self._empty(name)
        ]
        if unused:
            raise UnusedTensors(
                f"the checkpoint {self._source.name!r} holds {len(unused)} tensors that no part of the model takes: "
                f"{shortened(unused)}; its config.json describes another model",
                self._source.name,
                unused,
            )

    def _empty(self, name: str) -> bool:
        """Return True for a tensor without elements: transformers saves those of an MLP for no shared experts."""
        stored = self._source.stored(name)
        return stored is not None and 0 in stored.shape

    def _read(self, name: str, shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> Tensor:
        full_name = self._prefix + name
        if self._quantization is not None and len(shape) == 2 and name.endswith("weight") and not self._source.random:
            module = name.removesuffix("weight").removesuffix(".")
            scheme = self.scheme(module)
            if scheme is not None:
                from attnplug_engine.quantization.scheme import dequantized

                codes, scales = self._load_quantized(scheme, module, (shape[0], shape[1]), rows, columns)
                if scheme.rows_per_scale > 1:
                    scales = _per_row(scales, rows or slice(0, shape[0]), scheme.rows_per_scale)
                return dequantized(scheme, codes, scales, 1)
        part = self._source.tensor(full_name, shape, rows=rows, columns=columns)
        self._note(full_name)
        return part

    def _note(self, full_name: str) -> None:
        self._taken.add(full_name)
        if self._on_read is not None:
            self._on_read(len(self._taken))


def holds_weight(source: WeightSource, name: str) -> bool:
    """Return True if a source has a weight of this name, in its codes or not."""
    return _holds(source, name, quantization_of(source))


def _holds(source: WeightSource, name: str, quantization: Quantization | None) -> bool:
    codes = () if quantization is None or not name.endswith(".weight") else quantization.code_names
    return any(one in source.names() for one in (name, *(name.removesuffix("weight") + code for code in codes)))


def quantization_of(source: WeightSource) -> Quantization | None:
    """Return the quantization of a source's weights; None for none. Raises ModelConfigError for unknown schemes."""
    if quantization_key(source.config) is None:
        return None
    from attnplug_engine.quantization.config import read_quantization  # imports every scheme

    return read_quantization(source.config, source.name)


class SourceTensors:
    """Tensors of one module for its scheme: those of the source, or ``quantized`` ones."""

    def __init__(self, weights: Weights, module: str) -> None:
        self.prefix = f"{weights._prefix}{module}." if module else weights._prefix
        self.quantized: Mapping[str, Tensor] | None = None
        self._weights = weights

    def stored(self, name: str) -> StoredTensor | None:
        if self.quantized is not None:
            found = self.quantized.get(name)
            return None if found is None else StoredTensor("", tuple(found.shape))
        return self._weights._source.stored(self.prefix + name)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        kinds: Collection[str],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        if self.quantized is not None:
            part = self.quantized[name][rows or slice(None)]
            return part if columns is None else part[:, columns]
        part = self._weights._source.tensor(self.prefix + name, shape, rows=rows, columns=columns, kinds=kinds)
        self.note(name)
        return part

    def skip(self, name: str) -> None:
        if self.quantized is None and self.stored(name) is not None:
            self.note(name)

    def note(self, name: str) -> None:
        self._weights._note(self.prefix + name)

    def usual(self, names: Sequence[str]) -> str:
        stored = self._weights._source.names()
        return next((name for name in names if any(one.endswith(f".{name}") for one in stored)), names[0])

    def corrupt(self, name: str, problem: str) -> CheckpointError:
        source = self._weights._source
        return CheckpointError(
            f"{source.name}: tensor {self.prefix + name!r} {problem}", source.name, self.prefix + name
        )


def _per_row(scales: Tensor, rows: slice, rows_per_scale: int) -> Tensor:
    """Return a scale for each of ``rows``, of the scales of the blocks that they touch."""
    before = rows.start % rows_per_scale
    return scales.repeat_interleave(rows_per_scale, 0)[before : before + length(rows)]
