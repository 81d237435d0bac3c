"""int4 weights with group scales, eight codes per int32: ``pack-quantized`` of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attnplug_engine.quantization.scheme import ModuleTensors, Scheme, WeightFormat

_GROUPS = (32, 64, 128)
_INTEGERS = frozenset({"I64", "I32"})


class Int4Groups(Scheme):
    """Codes 0 to 15 stand for -8 to 7, with one scale per row and group of columns. Activations are not quantized."""

    title = "int4 groups (`compressed-tensors` `pack-quantized`, symmetric)"
    published = "Kimi-K2-Thinking, K2.5; w4a16 by RedHatAI"
    code_name = "weight_packed"
    code_kinds = frozenset({"I32"})
    code_dtype = torch.int32
    per_code = 8
    kernel = "int4"

    def __init__(self, group: int) -> None:
        self.group = group

    @classmethod
    def recognise(cls, described: WeightFormat) -> Int4Groups | None:
        section = described.section
        if described.format != "pack-quantized":
            return None
        if section.lookup("num_bits") != 4 or section.lookup("type") not in (None, "int"):
            raise section.wrong("num_bits", "4, with 'type' \"int\"")
        if section.lookup("symmetric") is False:
            raise section.wrong("symmetric", "true: zero points are not supported")
        if section.lookup("actorder") not in (None, False, "weight", "static"):
            raise section.wrong("actorder", "null, 'weight' or 'static': columns in another order are not supported")
        group = section.lookup("group_size")
        if section.lookup("strategy") not in (None, "group") or type(group) is not int or group not in _GROUPS:
            raise section.wrong("group_size", f"one of {', '.join(map(str, _GROUPS))}, with 'strategy' \"group\"")
        return cls(group)

    def load(
        self,
        tensors: ModuleTensors,
        shape: tuple[int, int],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        ranks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        if tensors.stored("weight_shape") is not None:
            stored = tuple(tensors.read("weight_shape", (2,), _INTEGERS).tolist())
            if stored != shape:
                raise tensors.corrupt("weight_shape", f"is {list(stored)}, but the config implies {list(shape)}")
        if tensors.stored("weight_g_idx") is not None:
            assert self.group is not None
            groups = tensors.read("weight_g_idx", (shape[1],), _INTEGERS)
            # -1 for all columns: the quantizer kept their order
            if not bool((groups == -1).all() | (groups == torch.arange(shape[1]) // self.group).all()):
                raise tensors.corrupt("weight_g_idx", "puts columns in another order, which is not supported")
        return super().load(tensors, shape, rows=rows, columns=columns, ranks=ranks)

    def kept_scales(self, tensors: ModuleTensors) -> torch.dtype:
        stored = tensors.stored(self.scale_name(tensors))
        return torch.bfloat16 if stored is None or stored.dtype == "BF16" else torch.float32

    def decode(self, codes: Tensor) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        return ((codes.unsqueeze(-1) >> shifts) & 15).flatten(-2).float().sub_(8)

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        assert self.group is not None
        groups = weight.unflatten(1, (-1, self.group))
        scales = (groups.abs().amax(2, keepdim=True).clamp(min=1e-12) / 7.5).bfloat16()
        codes = (groups / scales.float()).round().clamp(-8, 7).add(8).to(torch.int64).flatten(1)
        shifts = torch.arange(0, 32, 4, device=codes.device)
        words = (codes.unflatten(1, (-1, 8)) << shifts).sum(2)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words)
        # Without weight_shape, whose numbers loading reads: on a fake GPU there are none (E1).
        return {"weight_packed": words.to(torch.int32), "weight_scale": scales.squeeze(2)}
