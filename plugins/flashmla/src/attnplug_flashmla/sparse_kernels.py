"""Kernel protocol of sparse attention and its FlashMLA implementation (imported by ``kernels.load_library``)."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug_flashmla.kernels import load_library, wait_for_kernels

RANK = 512
HEADS = (64, 128)
"""Supported numbers of query heads; others are padded."""
WIDTH = 128
"""Granularity of the number of indices per row. The decode kernel alone would allow 64."""


class SparseKernels(Protocol):
    """Sparse latent attention over selected cache slots.

    Both methods return the output ``[rows, heads, 512]`` and the log-sum-exp ``[rows, heads]`` float32 in natural log;
    zero and +inf for a row without indices. ``heads`` is 64 or 128. ``slots`` ``[rows, width]`` int32 are flat cache
    indices, -1 for none; ``width`` is a multiple of 128.
    """

    def schedule(self) -> Any:
        """Return an empty schedule, which the first ``attend_packed`` fills.

        It depends on the numbers of rows, heads and indices, not on their values.
        """
        ...

    def attend_packed(
        self, q: Tensor, cache: Tensor, slots: Tensor, scale: float, schedule: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend with q ``[rows, heads, 576]`` over a uint8 cache ``[pages, 64, 1, 656]``."""
        ...

    def attend_rows(self, q: Tensor, cache: Tensor, slots: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend with q ``[rows, heads, 576]`` over a bfloat16 cache ``[slots, 1, 576]``."""
        ...


class FlashMLASparseKernels:
    """FlashMLA's sparse decode and prefill. The library's flag for SM 90 is ``use_legacy``.

    Every row is a request of its own, because the tokens of a request share no rows in these kernels.
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


def padded_heads(heads: int) -> int:
    """Return the smallest supported number of heads that is not below ``heads``."""
    return next(number for number in HEADS if heads <= number)


def pad_heads(q: Tensor) -> Tensor:
    """Return q ``[rows, heads, dim]`` contiguous, zero-padded to a supported number of heads."""
    rows, heads, dim = q.shape
    wanted = padded_heads(heads)
    if heads == wanted:
        return q.contiguous()
    padded = torch.zeros(rows, wanted, dim, dtype=q.dtype, device=q.device)
    padded[:, :heads] = q
    return padded
