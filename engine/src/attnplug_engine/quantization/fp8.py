"""fp8 e4m3 weights with scales per block, per output channel or per tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug.hf.config_keys import Config
from attnplug_engine.quantization.scheme import EXPONENT_SCALES, FLOAT_SCALES, ModuleTensors, Scheme, WeightFormat

_LARGEST = 448.0
_SINGLE = ((), (1,), (1, 1))
"""Shapes of a scale per tensor."""
_VALUES = {"fmt": ("e4m3",), "activation_scheme": ("dynamic", "static"), "scale_fmt": ("float", "ue8m0")}
"""Allowed values of further keys of ``quant_method`` ``fp8``."""
_STATIC = ("input_scale", "activation_scale")
"""Static activation scales. Not used: activations are scaled dynamically per token, or not at all."""


class Fp8(Scheme):
    """Base class of fp8 schemes: one code per column."""

    code_kinds = frozenset({"F8_E4M3"})
    code_dtype = torch.float8_e4m3fn
    kernel = "fp8"
    scale_names = ("weight_scale_inv", "weight_scale", "scale")
    """All names mean the factor of a code: ``inv`` refers to the inverse of the quantizer's scale."""
    scale_kinds = FLOAT_SCALES | EXPONENT_SCALES
    unused = _STATIC

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def checked(self, tensors: ModuleTensors, name: str, scales: Tensor) -> Tensor:
        if scales.dtype is torch.uint8:  # UE8M0 by its bytes
            scales = scales.view(torch.float8_e8m0fnu)
        return super().checked(tensors, name, scales)


class Fp8Blocks(Fp8):
    """One scale per block of rows and columns, 128 × 128 in every published model. Activations have one scale per token
    and 128 columns."""

    title = "fp8 e4m3 blocks (`fp8` with `weight_block_size`; `compressed-tensors` `float-quantized`, `block`)"
    published = "DeepSeek-V3, R1, V3.1, V3.2, Kimi-K2, Qwen3-FP8; V4 except its experts"

    def __init__(self, rows: int = 128, columns: int = 128) -> None:
        self.rows_per_scale, self.group = rows, columns

    @classmethod
    def recognise(cls, described: WeightFormat) -> Fp8Blocks | None:
        section = described.section
        if described.method == "fp8":
            _check_values(section)
            key = "weight_block_size"
        elif described.format == "float-quantized" and section.lookup("strategy") == "block":
            _check_bits(section, 8)
            key = "block_structure"
        else:
            return None
        block = section.sequence(key)
        if block is None and described.method == "fp8":
            return None
        if block is None or len(block) != 2 or not all(type(size) is int and 16 <= size <= 4096 for size in block):
            raise section.wrong(key, "two whole numbers from 16 to 4096, such as [128, 128]")
        rows, columns = (int(str(size)) for size in block)
        return cls(rows, columns)

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        out, width = weight.shape
        high, wide = self.scale_shape(out, width)
        assert self.group is not None
        padded = F.pad(weight, (0, wide * self.group - width, 0, high * self.rows_per_scale - out))
        blocks = padded.view(high, self.rows_per_scale, wide, self.group)
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / _LARGEST
        codes = (blocks / scales[:, None, :, None]).view_as(padded)[:out, :width]
        return {"weight": codes.to(self.code_dtype), "weight_scale_inv": scales}


class Fp8Channels(Fp8):
    """One scale per output channel or per tensor. Activations are scaled dynamically."""

    title = "fp8 e4m3 per channel or tensor (`compressed-tensors` `float-quantized`; `fp8` without blocks)"
    published = "Llama and Qwen FP8 by RedHatAI, Mistral's FP8"

    def __init__(self, strategy: str | None = None) -> None:
        self._strategy = strategy
        """``channel`` or ``tensor``; None if the config does not say which, so that either may be stored."""

    @classmethod
    def recognise(cls, described: WeightFormat) -> Fp8Channels | None:
        section = described.section
        if described.method == "fp8":
            return cls() if section.lookup("weight_block_size") is None else None
        strategy = section.lookup("strategy")
        if described.format != "float-quantized" or strategy not in ("tensor", "channel"):
            return None
        _check_bits(section, 8)
        return cls(str(strategy))

    def read_scales(
        self, tensors: ModuleTensors, out: int, width: int, rows: slice | None, columns: slice | None
    ) -> Tensor:
        name = self.scale_name(tensors)
        found = tensors.stored(name)
        single = found is not None and found.shape in _SINGLE and self._strategy != "channel"
        if single or self._strategy == "tensor":
            shape: tuple[int, ...] = found.shape if single and found is not None else (1,)
            whole = self.checked(tensors, name, tensors.read(name, shape, self.scale_kinds))
            count = out if rows is None else rows.stop - rows.start
            return whole.reshape(1, 1).expand(count, 1)
        shape = (out,) if found is not None and len(found.shape) == 1 else (out, 1)
        return self.checked(tensors, name, tensors.read(name, shape, self.scale_kinds, rows=rows)).reshape(-1, 1)

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        largest = weight.abs().amax().view(1) if self._strategy == "tensor" else weight.abs().amax(1, keepdim=True)
        scales = largest.clamp(min=1e-12) / _LARGEST
        return {"weight": (weight / scales).to(self.code_dtype), "weight_scale": scales}


def _check_values(section: Config) -> None:
    for key, allowed in _VALUES.items():
        if section.lookup(key) not in (None, *allowed):
            raise section.wrong(key, " or ".join(map(repr, allowed)))


def _check_bits(section: Config, bits: int) -> None:
    if section.lookup("num_bits") != bits or section.lookup("type") != "float":
        raise section.wrong("num_bits", f"{bits}, with 'type' \"float\"")
