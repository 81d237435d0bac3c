"""Rows in fp8 with scales of their own, e.g. latent rows of 656 bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnplug import DType, LayerSpec, PoolError
from attnplug.kernels import PagedBuffer, PageLayout, RowFormat
from attnplug.sparse import LATENT_GROUP

if TYPE_CHECKING:
    from attnplug_sparse.pools.triton_scaled_rows import ScaledWriter

_LARGEST = 448.0
_SMALLEST = 1e-4
"""Lower bound of a group's largest magnitude, so that a group of zeros has a scale too."""
_SCALE_NBYTES = torch.float32.itemsize


class ScaledRows:
    """Rows of ``width`` values per token, over bytes ``[pages, page_size, 1, row_nbytes]``.

    The first columns are e4m3 ``values`` in groups with a float32 scale each. Scales are powers of two: dividing by one
    rounds nothing, and kernels that multiply by it in bfloat16 are exact. The other columns, if any, are stored
    unscaled in ``rest``. Reads return float32.
    """

    scale = 1.0

    def __init__(self, pages: Tensor, values: Tensor, scales: Tensor, rest: Tensor | None = None) -> None:
        self.pages, self.layout = pages, PageLayout.of(pages)
        self.nbytes = pages.numel()
        self._values, self._scales = PagedBuffer(values), PagedBuffer(scales)
        self._rest = None if rest is None else PagedBuffer(rest)
        self._scaled, self._groups = values.shape[-1], scales.shape[-1]
        self.width = self._scaled + (0 if rest is None else rest.shape[-1])
        self._kernel: ScaledWriter | None = None
        if self._values.kernel is not None:  # Triton is installed and converts to fp8
            from attnplug_sparse.pools.triton_scaled_rows import ScaledWriter

            self._kernel = ScaledWriter(values, scales, rest, _SMALLEST)

    @classmethod
    def latent(cls, pages: Tensor, rank: int, rope: int) -> ScaledRows:
        """Latent rows: values, then scales, then rotated columns in bfloat16. Rows of a page are contiguous."""
        if rank % LATENT_GROUP or rope % 2:
            raise PoolError(
                f"latent rows of {rank} + {rope} numbers cannot be kept as fp8_ds_mla, which has a scale for every "
                f"{LATENT_GROUP} of the first; use another type of the cache"
            )
        end = rank + rank // LATENT_GROUP * _SCALE_NBYTES
        values = pages[..., :rank].view(torch.float8_e4m3fn)
        return cls(pages, values, pages[..., rank:end].view(torch.float32), pages[..., end:].view(torch.bfloat16))

    @property
    def parts(self) -> tuple[PagedBuffer, ...]:
        return (self._values, self._scales) if self._rest is None else (self._values, self._scales, self._rest)

    def check_rows(self, slots: Tensor, rows: Tensor, name: str) -> None:
        """See ``PagedBuffer.check_rows``."""
        if slots.dim() != 1 or rows.shape != (slots.numel(), 1, self.width):
            raise PoolError(
                f"{name} of shape {list(rows.shape)} cannot be written to slots of shape {list(slots.shape)}; "
                f"give [tokens, 1, {self.width}] and [tokens]"
            )

    def check_targets(self, slots: Tensor) -> bool:
        """See ``PagedBuffer.check_targets``."""
        return self._values.check_targets(slots)

    def write(self, slots: Tensor, rows: Tensor, *, padded: bool) -> None:
        """Store ``rows`` ``[tokens, 1, width]``; see ``PagedBuffer.write``."""
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
        """Return rows ``[*slots.shape, 1, width]`` in float32."""
        groups = self._values.read(slots).unflatten(-1, (self._groups, -1))
        rows = groups.mul_(self._scales.read(slots).unsqueeze(-1)).flatten(-2)
        return rows if self._rest is None else torch.cat((rows, self._rest.read(slots).float()), -1)


def group_scales(largest: Tensor) -> Tensor:
    """Return the scales of groups, float32, given their largest magnitudes: the smallest power of two that fits."""
    scales = largest.clamp(min=_SMALLEST) / _LARGEST
    # Round up to a power of two: any bit of the mantissa raises the exponent.
    return (scales.view(torch.int32) + 0x7FFFFF).bitwise_and_(-0x800000).view(torch.float32)


def latent_format(dtype: DType) -> Callable[[LayerSpec], RowFormat] | None:
    """Return the ``row_format`` of an ``MLAPool`` in ``dtype``; ``None`` for dtypes that the pool stores itself."""
    return _scaled_format if dtype is DType.FP8_DS_MLA else None


def latent_row_nbytes(layer: LayerSpec, dtype: DType) -> int:
    """Return the bytes of an MLA layer's latent row in a cache of ``dtype``."""
    assert layer.mla is not None
    form = _scaled_format(layer) if dtype is DType.FP8_DS_MLA else RowFormat.plain(layer.mla.row_dim, dtype)
    return form.width * form.stored.itemsize


def _scaled_format(layer: LayerSpec) -> RowFormat:
    assert layer.mla is not None
    rank, rope = layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim
    width = rank + rank // LATENT_GROUP * _SCALE_NBYTES + rope * torch.bfloat16.itemsize
    return RowFormat(width, torch.uint8, partial(ScaledRows.latent, rank=rank, rope=rope))
