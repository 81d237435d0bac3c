"""The seam to FlashMLA's sparse kernels. The library is imported by ``kernels.load_library`` alone."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug_flashmla.kernels import load_library, wait_for_kernels

RANK = 512
HEADS = (64, 128)
"""Numbers of query heads that the kernels take; others are padded."""
WIDTH = 128
"""What the number of indices of a row is a multiple of. The decode kernel would take 64."""


class SparseKernels(Protocol):
    """Both return ``[rows, heads, 512]`` and the log-sum-exp ``[rows, heads]`` float32: natural logarithms, and zero
    and +inf for a row without indices. ``heads`` is 64 or 128.

    ``slots`` ``[rows, width]`` int32 are flat indices of the cache, -1 for none; ``width`` is a multiple of 128.
    """

    def schedule(self) -> Any:
        """Made empty, and filled by the first ``attend_packed`` that is given it. It depends on numbers of rows, heads
        and indices, not on their values."""
        ...

    def attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, schedule: Any
    ) -> tuple[Tensor, Tensor]:
        """q ``[rows, heads, 576]`` over a cache of bytes ``[pages, 64, 1, 656]``."""
        ...

    def attend_rows(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The same over a cache of bfloat16 rows ``[slots, 1, 576]``."""
        ...


class FlashMLASparseKernels:
    """FlashMLA's sparse decode and prefill. The library counts SM 90 as legacy.

    Every row is a request of its own: for these kernels the tokens of a request have nothing in common.
    """

    def __init__(self) -> None:
        self._library = load_library()

    def schedule(self) -> Any:
        return self._library.empty_schedule()[0]

    def attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, schedule: Any
    ) -> tuple[Tensor, Tensor]:
        wait_for_kernels(q.device)
        out, lse = self._library.attend(
            q=q.unsqueeze(1),
            k_cache=cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=RANK,
            tile_scheduler_metadata=schedule,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=slots.unsqueeze(1),
            use_legacy=True,
        )
        wait_for_kernels(q.device)
        return out.squeeze(1), lse.squeeze(2)

    def attend_rows(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        wait_for_kernels(q.device)
        out, _, lse = self._library.attend_rows(
            q=q, kv=cache, indices=slots.unsqueeze(1), sm_scale=scale, d_v=RANK, use_legacy=True, return_log2_lse=None
        )
        return out, lse


def padded_heads(q: Tensor) -> Tensor:
    """q ``[rows, heads, dim]`` contiguous, with heads of zeros up to a number that the kernels take."""
    rows, heads, dim = q.shape
    wanted = next(number for number in HEADS if heads <= number)
    if heads == wanted:
        return q.contiguous()
    padded = torch.zeros(rows, wanted, dim, dtype=q.dtype, device=q.device)
    padded[:, :heads] = q
    return padded
