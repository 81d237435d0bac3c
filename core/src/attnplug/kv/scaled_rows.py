"""Rows in fp8 with scales of their own, e.g. latent rows of 656 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.declare.errors import PoolError
from attnplug.declare.model import MLADims
from attnplug.declare.problem import LATENT_GROUP
from attnplug.kv.buffer import PagedBuffer, RowKernel
from attnplug.kv.layout import PageLayout

_LARGEST = 448.0
_SMALLEST = 1e-4
"""The least that counts as the largest of a group: a group of zeros is divided by it too."""
_SCALE = torch.float32.itemsize


class ScaledRows:
    """Rows of ``width`` numbers, one a token, over bytes ``[pages, page_size, 1, row_bytes]``.

    The first columns are e4m3 ``values`` in groups that have a float32 scale each. Scales are powers of two: dividing
    by one rounds nothing, and kernels that multiply by it in bfloat16 are exact. The other columns, if there are any,
    are in ``rest`` as they are. Reads give float32.
    """

    scale = 1.0

    def __init__(self, pages: Tensor, values: Tensor, scales: Tensor, rest: Tensor | None = None) -> None:
        self.pages, self.layout = pages, PageLayout.of(pages)
        self.nbytes = pages.numel()
        self._values, self._scales = PagedBuffer(values), PagedBuffer(scales)
        self._rest = None if rest is None else PagedBuffer(rest)
        self._scaled, self._groups = values.shape[-1], scales.shape[-1]
        self.width = self._scaled + (0 if rest is None else rest.shape[-1])
        self._kernel: RowKernel | None = None
        if self._values.kernel is not None:  # Triton is there, and converts to fp8
            from attnplug.kv.triton_rows import ScaledWriter

            self._kernel = ScaledWriter(values, scales, rest, _SMALLEST)

    @classmethod
    def latent(cls, pages: Tensor, dims: MLADims) -> ScaledRows:
        """Latent rows: values, then scales, then rotated columns in bfloat16. Rows follow one another in a page."""
        check_latent(dims)
        rank = dims.kv_lora_rank
        end = rank + rank // LATENT_GROUP * _SCALE
        values = pages[..., :rank].view(torch.float8_e4m3fn)
        return cls(pages, values, pages[..., rank:end].view(torch.float32), pages[..., end:].view(torch.bfloat16))

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        return (self._values, self._scales) if self._rest is None else (self._values, self._scales, self._rest)

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None:
        """As ``PagedBuffer.check_rows``."""
        if slots.dim() != 1 or rows.shape != (slots.numel(), 1, self.width):
            raise PoolError(
                f"{name} of shape {list(rows.shape)} cannot be written to slots of shape {list(slots.shape)}; "
                f"give [tokens, 1, {self.width}] and [tokens]"
            )

    def check_targets(self, slots: Tensor) -> bool:
        """As ``PagedBuffer.check_targets``."""
        return self._values.check_targets(slots)

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Store ``rows`` ``[tokens, 1, width]``, as ``PagedBuffer.write`` does."""
        if self._kernel is not None:
            self._kernel.write(slots, rows)
            return
        groups = rows[..., : self._scaled].float().unflatten(-1, (self._groups, -1))
        scales = group_scales(groups.abs().amax(-1))
        self._values.write(slots, (groups / scales.unsqueeze(-1)).flatten(-2), padded=padded)
        self._scales.write(slots, scales, padded=padded)
        if self._rest is not None:
            self._rest.write(slots, rows[..., self._scaled :], padded=padded)

    def read(self, slots: Tensor) -> Tensor:
        """Rows ``[*slots.shape, 1, width]`` in float32."""
        groups = self._values.read(slots).unflatten(-1, (self._groups, -1))
        rows = groups.mul_(self._scales.read(slots).unsqueeze(-1)).flatten(-2)
        return rows if self._rest is None else torch.cat((rows, self._rest.read(slots).float()), -1)


def group_scales(largest: Tensor) -> Tensor:
    """By what to divide groups whose largest magnitudes are these, float32: the least power of two that fits."""
    scales = largest.clamp(min=_SMALLEST) / _LARGEST
    # The bits of a float32: any bit of the mantissa raises the exponent.
    return (scales.view(torch.int32) + 0x7FFFFF).bitwise_and_(-0x800000).view(torch.float32)


def latent_row_bytes(dims: MLADims) -> int:
    """Bytes of a latent row with scales of its own."""
    rank = dims.kv_lora_rank
    return rank + rank // LATENT_GROUP * _SCALE + dims.qk_rope_head_dim * torch.bfloat16.itemsize


def check_latent(dims: MLADims) -> None:
    """Refuse latent rows that cannot be divided into groups."""
    if dims.kv_lora_rank % LATENT_GROUP or dims.qk_rope_head_dim % 2:
        raise PoolError(
            f"latent rows of {dims.kv_lora_rank} + {dims.qk_rope_head_dim} numbers cannot be kept as fp8_ds_mla, which "
            f"has a scale for every {LATENT_GROUP} of the first; use another type of the cache"
        )
