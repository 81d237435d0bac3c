"""MXFP4 weights: e2m1 codes, two per byte, with a power-of-two scale (UE8M0) per 32 columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from attnplug_engine.quantization.scheme import EXPONENT_SCALES, ModuleTensors, Scheme, WeightFormat

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the codes 0 to 7; 8 to 15 are their negatives."""


class Mxfp4(Scheme):
    """MXFP4. The first column of a byte is in its low nibble. Activations are not quantized."""

    title = "MXFP4 (experts of `mxfp4`, and of `fp8` with FP4 codes; `compressed-tensors` `mxfp4-pack-quantized`)"
    published = "gpt-oss, DeepSeek-V4 (experts)"
    code_kinds = frozenset({"U8", "I8", "F4"})
    code_dtype = torch.uint8
    per_code = 2
    kernel = "mxfp4"
    scale_names = ("weight_scale", "scale", "weight_scale_inv")
    scale_kinds = EXPONENT_SCALES
    scale_dtype = torch.uint8
    group = 32

    def __init__(self, code_name: str = "weight") -> None:
        self.code_name = code_name

    @classmethod
    def recognise(cls, described: WeightFormat) -> Mxfp4 | None:
        if described.method in ("fp8", "mxfp4"):
            # DeepSeek-V4 has FP4 codes under the name of its fp8 weights; gpt-oss stacks all experts in one tensor.
            return cls()
        if described.format != "mxfp4-pack-quantized":
            return None
        if described.section.lookup("num_bits") != 4 or described.section.lookup("group_size") not in (None, 32):
            raise described.section.wrong("num_bits", "4, with 'group_size' 32")
        return cls("weight_packed")

    def load_experts(
        self,
        tensors: ModuleTensors,
        name: str,
        shape: tuple[int, int, int],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        ranks: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Read the weights ``shape [experts, out, in]`` that gpt-oss stacks: ``NAME_blocks [experts, out, in / 32,
        16]`` and ``NAME_scales [experts, out, in / 32]``. Return a rank's codes ``[experts, rows, columns / 2]`` and
        scales."""
        experts, out, width = shape
        _check_groups(tensors, name, width)
        _, groups = self.own_columns(columns, width, ranks)
        blocks = tensors.read(f"{name}_blocks", (experts, out, width // 32, 16), self.code_kinds, columns=rows)
        scales = tensors.read(f"{name}_scales", (experts, out, width // 32), self.scale_kinds, columns=rows)
        if groups is not None:
            blocks, scales = blocks[:, :, groups], scales[:, :, groups]
        codes, scales = blocks.view(torch.uint8).flatten(2), self.checked(tensors, f"{name}_scales", scales)
        self.check_vanishing(tensors, f"{name}_scales", codes.flatten(0, 1), scales.flatten(0, 1))
        return codes, scales

    def quantize_experts(self, tensors: ModuleTensors, name: str, weights: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of ``load_experts`` whose weights are about ``weights [experts, out, in]``."""
        _check_groups(tensors, name, weights.shape[2])
        parts = [self.quantize(weight.contiguous()) for weight in weights]
        codes, scales = (torch.stack([part[key] for part in parts]) for key in (self.code_name, "weight_scale"))
        return {f"{name}_blocks": codes.unflatten(2, (-1, 16)), f"{name}_scales": scales}

    def decode(self, codes: Tensor) -> Tensor:
        values = torch.tensor((*VALUES, *(-value for value in VALUES)), device=codes.device)
        shifts = torch.tensor((0, 4), dtype=torch.uint8, device=codes.device)
        return values[((codes.unsqueeze(-1) >> shifts) & 15).flatten(-2).int()]

    def quantize(self, weight: Tensor) -> Mapping[str, Tensor]:
        groups = weight.unflatten(1, (-1, 32))
        exponents = torch.ceil(torch.log2(groups.abs().amax(2, keepdim=True).clamp(min=1e-30) / VALUES[-1]))
        exponents = exponents.clamp(-127, 127)
        scaled = (groups / torch.exp2(exponents)).flatten(1)
        middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(VALUES)], device=weight.device)
        codes = torch.bucketize(scaled.abs(), middles) | ((scaled < 0).int() << 3)
        packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
        return {self.code_name: packed, "weight_scale": (exponents + 127).squeeze(2).to(torch.uint8)}


def _check_groups(tensors: ModuleTensors, name: str, width: int) -> None:
    if width % 32:
        raise tensors.corrupt(f"{name}_blocks", f"has one scale per 32 columns, and the weight has {width}")
