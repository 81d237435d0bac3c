"""Base class of quantization schemes, and the module that holds a quantized weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnplug.hf.config_keys import Config
from attnplug_engine.checkpoints.safetensors import CheckpointError, StoredTensor
from attnplug_engine.kernels import usable
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_engine.quantization.libraries import FEWEST_ROWS, Product, block_product

FLOAT_SCALES = frozenset({"F32", "BF16", "F16"})
EXPONENT_SCALES = frozenset({"F8_E8M0", "U8"})
"""UE8M0: ``2 ** (byte - 127)``. 255 is NaN."""
_LEAST_SCALE = 2.0**-126
_MOST_DECODED = 1 << 22
"""Elements of a weight that the reference decodes at a time: 16 MiB of float32."""


class ModuleTensors(Protocol):
    """Tensors of one module in a checkpoint, by the last part of their names."""

    def stored(self, name: str) -> StoredTensor | None:
        """Return the dtype and shape of a tensor; None if there is none."""
        ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        kinds: Collection[str],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        """Return ``rows`` and ``columns`` of a tensor, read-only. It must have ``shape`` and a dtype in ``kinds``."""
        ...

    def skip(self, name: str) -> None:
        """Record a tensor as used, if it exists."""
        ...

    def usual(self, names: Sequence[str]) -> str:
        """Return the first of ``names`` that any module of the checkpoint has; the first one if none has."""
        ...

    def corrupt(self, name: str, problem: str) -> CheckpointError:
        """Return the error for a tensor with wrong values."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One entry of a ``quantization_config``, for schemes to recognise.

    ``section`` has the keys of the weight: of the config itself, or of ``config_groups.NAME.weights``.
    """

    method: str
    format: str
    section: Config


class Scheme(ABC):
    """Storage format of a quantized weight ``[out, in]``: codes ``[out, in / per_code]``, and scales.

    A scale applies to ``rows_per_scale`` rows and ``group`` columns (None: all columns). To add a scheme, write a
    module with a subclass and add it to ``SCHEMES``. A subclass sets the class attributes and implements
    ``recognise``, ``decode`` and ``quantize``.
    """

    title: ClassVar[str]
    """Scheme and config, for messages and for the README's table."""
    published: ClassVar[str]
    """Models that are published in this scheme."""
    code_name: str = "weight"
    code_kinds: ClassVar[Collection[str]]
    code_dtype: ClassVar[torch.dtype]
    per_code: ClassVar[int] = 1
    """Weight columns in one element of the codes."""
    kernel: ClassVar[str]
    """Name of the codes' format in the GPU kernels."""
    scale_names: tuple[str, ...] = ("weight_scale",)
    scale_kinds: Collection[str] = FLOAT_SCALES
    scale_dtype: torch.dtype = torch.float32
    unused: tuple[str, ...] = ()
    """Further tensors of a module that loading does not need, such as static activation scales."""
    rows_per_scale: int = 1
    group: int | None = None

    @property
    def column_unit(self) -> int:
        """Columns per unit: ranks divide a weight between units only."""
        return max(self.group or 1, self.per_code)

    @classmethod
    @abstractmethod
    def recognise(cls, described: WeightFormat) -> Scheme | None:
        """Return the scheme of a config entry; None if it describes another one."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return codes ``[..., rows, in / per_code]`` as float32 ``[..., rows, in]``, without their scales."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a module, by name, whose float32 weight is about ``weight [out, in]``."""

    def matches(self, tensors: ModuleTensors) -> bool:
        """Return True if a module's weight is stored in this scheme."""
        stored = tensors.stored(self.code_name)
        return stored is not None and stored.dtype in self.code_kinds

    def scale_shape(self, out: int, width: int) -> tuple[int, int]:
        """Shape of the scales of a weight ``[out, width]``."""
        return -(-out // self.rows_per_scale), 1 if self.group is None else -(-width // self.group)

    def check_shape(self, tensors: ModuleTensors, out: int, width: int) -> None:
        """Raise if a weight ``[out, width]`` cannot be stored in this scheme."""
        if width % self.per_code:
            raise tensors.corrupt(
                self.code_name, f"packs {self.per_code} columns in one element, and the weight has {width} columns"
            )

    def load(
        self,
        tensors: ModuleTensors,
        shape: tuple[int, int],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        ranks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Read this rank's ``rows`` and ``columns`` of a weight ``shape``: codes, and the scales of the blocks that
        they touch.

        Raises CheckpointError for wrong tensors, ParallelError if ``columns`` of one of ``ranks`` divide a block.
        """
        out, width = shape
        self.check_shape(tensors, out, width)
        code_columns, scale_columns = self.own_columns(columns, width, ranks)
        codes = tensors.read(
            self.code_name, (out, width // self.per_code), self.code_kinds, rows=rows, columns=code_columns
        ).view(self.code_dtype)
        scale_rows = rows
        if rows is not None and self.rows_per_scale > 1:
            scale_rows = slice(rows.start // self.rows_per_scale, -(-rows.stop // self.rows_per_scale))
        scales = self.read_scales(tensors, out, width, scale_rows, scale_columns)
        first = 0 if rows is None else rows.start % self.rows_per_scale
        self.check_vanishing(tensors, self.scale_name(tensors), codes, scales, first)
        for name in self.unused:
            tensors.skip(name)
        return codes, scales

    def read_scales(
        self, tensors: ModuleTensors, out: int, width: int, rows: slice | None, columns: slice | None
    ) -> Tensor:
        """Return checked scales ``[rows, columns]`` in ``scale_dtype``."""
        name = self.scale_name(tensors)
        scales = tensors.read(name, self.scale_shape(out, width), self.scale_kinds, rows=rows, columns=columns)
        return self.checked(tensors, name, scales)

    def kept_scales(self, tensors: ModuleTensors) -> torch.dtype:
        """Return the dtype in which a module's scales are kept on the device."""
        return self.scale_dtype

    def scale_name(self, tensors: ModuleTensors) -> str:
        """Name of the scales: the first that exists, or that other modules have."""
        found = next((name for name in self.scale_names if tensors.stored(name) is not None), None)
        return tensors.usual(self.scale_names) if found is None else found

    def checked(self, tensors: ModuleTensors, name: str, scales: Tensor) -> Tensor:
        """Return scales in ``scale_dtype``. Raises CheckpointError if any is not a positive finite number."""
        if self.scale_dtype is torch.uint8:
            scales = scales.view(torch.uint8)
            valid = scales != 255
        else:
            # torch has hardly any operation on float8_e8m0fnu
            scales = scales.to(torch.float32)
            valid = (scales > 0) & (scales < float("inf"))
        if bool((~valid).any()):  # not of ``valid.all()``: on a fake GPU conditions of tensors are false (E1)
            wrong = torch.where(valid, 0, 1).flatten()
            first = int(wrong.argmax())
            raise tensors.corrupt(
                name,
                f"has {int(wrong.sum())} of {wrong.numel()} scales that are not positive finite numbers; the first is "
                f"{scales.flatten()[first].item()} at index {first}",
            )
        return scales.to(self.scale_dtype)

    def check_vanishing(self, tensors: ModuleTensors, name: str, codes: Tensor, scales: Tensor, first: int = 0) -> None:
        """Raise CheckpointError if nonzero codes ``[rows, …]`` have vanishing scales.

        ``first`` is the index of the first row in its block of scales. UE8M0 has no zero: zeroed scales read as
        2 ** -127, which quantizers write for blocks of zeros only.
        """
        least = 1 if scales.dtype is torch.uint8 else _LEAST_SCALE
        tiny = scales < least
        if not bool(tiny.any()):
            return
        nonzero = self.decode(codes) != 0
        width = nonzero.shape[1]
        group = self.group or width
        used = F.pad(nonzero, (0, -width % group)).unflatten(1, (-1, group)).any(2)
        wrong = tiny.repeat_interleave(self.rows_per_scale, 0)[first : first + used.shape[0]] & used
        if bool(wrong.any()):
            raise tensors.corrupt(
                name,
                f"has {int(tiny.sum())} of {tiny.numel()} scales of 2 ** -127 or less, whose codes are not zero; "
                f"the first is in row {int(wrong.any(1).int().argmax())}",
            )

    def scale_values(self, scales: Tensor) -> Tensor:
        """Return scales as float32."""
        if scales.dtype is torch.uint8:
            return torch.exp2(scales.float() - 127)
        return scales.float()

    def multiply(
        self,
        x: Tensor,
        weight: QuantizedWeight,
        *,
        bias: Tensor | None = None,
        gated: bool = False,
        onto: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        long_wait: bool = False,
    ) -> Tensor:
        """Return ``x [..., in]`` times the weight ``[out, in]`` transposed: ``[..., out]``.

        ``gated`` computes ``silu(gate) * up`` of ``out = [gate | up]``. The result is added to ``onto``. ``norm`` is
        the weight and epsilon of an RMS norm of ``x``, if the weight ``takes`` it. ``long_wait``: several short kernels
        run before this product.
        """
        if not weight.takes(x):
            return self.finish(self.reference(x, weight), bias, gated, onto)
        codes, scales = weight.codes, weight.scales
        if weight.library is not None and x.shape[0] >= FEWEST_ROWS and x.dtype is torch.bfloat16:
            from attnplug_engine.kernels.scaled_rows import scale_rows

            return self.finish(weight.library(*scale_rows(x, norm), codes, scales), bias, gated, onto)
        from attnplug_engine.kernels.quantized_gemm import quantized_gemm

        return quantized_gemm(
            x, codes, scales, form=self.kernel, group=self.group, rows_per_scale=weight.rows_per_scale,
            bias=bias, norm=norm, gated=gated, onto=onto, counters=weight.counters, long_wait=long_wait,
        )  # fmt: skip

    @staticmethod
    def finish(out: Tensor, bias: Tensor | None, gated: bool, onto: Tensor | None) -> Tensor:
        """Apply bias, SwiGLU gate and residual to a product, as ``multiply`` does."""
        if bias is not None:
            out = out.add_(bias)
        if gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate).mul_(up)
        return out if onto is None else out.add_(onto)

    def reference(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Like ``multiply``, by torch on any device. Rows of the weight are decoded to the dtype of ``x`` in parts."""
        rows, width = weight.shape
        step = max(_MOST_DECODED // width // weight.rows_per_scale, 1) * weight.rows_per_scale
        if rows <= step:
            return F.linear(x, weight.dequantized(x.dtype))
        out = x.new_empty(*x.shape[:-1], rows)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            out[..., start:stop] = F.linear(x, weight.dequantized(x.dtype, start, stop))
        return out

    def own_columns(self, columns: slice | None, width: int, ranks: int) -> tuple[slice | None, slice | None]:
        """Return one of ``ranks``' columns of the codes and of the scales. Raises ParallelError if they divide a
        block."""
        if columns is None:
            return None, None
        unit = self.column_unit
        if any(edge % unit and edge != width for edge in (columns.start, columns.stop)):
            raise ParallelError(
                f"{width} columns of a weight with one scale per {unit} columns cannot be divided over {ranks} ranks "
                "between two scales",
                "weight columns",
                width,
                ranks,
            )
        codes = slice(columns.start // self.per_code, -(-columns.stop // self.per_code))
        if self.group is None:
            return codes, None
        return codes, slice(columns.start // self.group, -(-columns.stop // self.group))


class QuantizedWeight(nn.Module):
    """Quantized weight ``[out, in]`` on its device as stored, or weights ``[experts, out, in]`` of all experts.

    ``codes`` are ``[..., out, in / per_code]``. ``scales`` are ``[..., out / rows_per_scale, in / group]``; their
    number of rows differs from the scheme's if parts of blocks were stacked.
    """

    def __init__(self, scheme: Scheme, codes: Tensor, scales: Tensor, rows_per_scale: int) -> None:
        super().__init__()
        self.scheme, self.rows_per_scale = scheme, rows_per_scale
        # Ordinary attributes: a module searches for parameters after a failed attribute lookup.
        self.codes, self.scales = codes, scales
        self.register_buffer("_codes", codes, persistent=False)
        self.register_buffer("_scales", scales, persistent=False)
        self.shape = (codes.shape[-2], codes.shape[-1] * scheme.per_code)
        self.on_gpu = False
        """True if the Triton kernels support it."""
        self.library: Product | None = None
        """Library function for many rows. Chosen here, because it cannot be checked during graph capture."""
        self.counters: Tensor | None = None
        """Arrival counters of ``split_gemm``. Allocated here, so that a graph does not zero them."""
        if usable(codes.device):
            from attnplug_engine.kernels.quantized_gemm import supports
            from attnplug_engine.kernels.scaled_rows import scales_rows

            self.on_gpu = supports(self.shape[1], scheme.group)
            if self.on_gpu and codes.dim() == 2 and scheme.kernel == "fp8":
                from attnplug_engine.kernels.split_gemm import arrival_counters

                self.counters = arrival_counters(self.shape[0], codes.device)
            whole = codes.dim() == 2 and (rows_per_scale, scheme.group) == (128, 128)
            if whole and scales_rows(scheme.kernel, 128, codes.device) and not any(size % 128 for size in self.shape):
                self.library = block_product(codes.device)

    def takes(self, x: Tensor) -> bool:
        """Return True if the Triton kernels support ``x``."""
        return self.on_gpu and x.dim() == 2 and x.element_size() == 2

    def expert(self, index: int) -> QuantizedWeight:
        """Return one expert's weight, a view."""
        return QuantizedWeight(self.scheme, self.codes[index], self.scales[index], self.rows_per_scale)

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x [rows, in]`` times the weight transposed: ``[rows, out]``."""
        return self.scheme.multiply(x, self)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantized(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows ``start`` to ``stop`` in ``dtype``: ``[..., rows, in]``. ``start`` is where a scale begins."""
        codes = self.codes[..., start:stop, :]
        rows = self.rows_per_scale
        last = None if stop is None else -(-stop // rows)
        scales = self.scales[..., start // rows : last, :]
        return dequantized(self.scheme, codes, scales, rows).to(dtype)


def dequantized(scheme: Scheme, codes: Tensor, scales: Tensor, rows_per_scale: int) -> Tensor:
    """Return the float32 values of codes ``[..., rows, in / per_code]`` with their scales."""
    values, factors = scheme.decode(codes), scheme.scale_values(scales)
    if rows_per_scale > 1:
        factors = factors.repeat_interleave(rows_per_scale, -2)[..., : values.shape[-2], :]
    if scheme.group is not None:
        factors = factors.repeat_interleave(scheme.group, -1)[..., : values.shape[-1]]
    return values.mul_(factors)
