"""Kernel protocol of dense decode and its FlashMLA implementation. Only this module imports FlashMLA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug import PlanError

_MAX_INDEX = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class TileSchedule:
    """FlashMLA's tile schedule, computed on the device: ``tiles`` and ``splits`` ``[requests + 1]``, int32.

    It assigns pages to multiprocessors (``tile_scheduler_metadata``, ``num_splits``) and is valid for all layers as
    long as the lengths do not change.
    """

    tiles: Tensor
    splits: Tensor

    def copy_from(self, other: TileSchedule) -> None:
        """Copy another schedule into this one's memory, which a graph reads."""
        torch._foreach_copy_([self.tiles, self.splits], [other.tiles, other.splits])  # one launch for both tensors


@dataclass(frozen=True, slots=True, eq=False)
class FlashMLACall:
    """A kernel call. Each request has ``queries`` query tokens, the last of its ``kv_lens`` rows.

    ``kv_lens`` ``[requests]`` and ``page_table`` ``[requests, pages]`` are int32 and contiguous. A request of length 0
    attends to nothing, but the first entry of its table row must be a valid page.
    """

    queries: int
    kv_lens: Tensor
    page_table: Tensor
    schedule: TileSchedule


class DenseKernels(Protocol):
    """Dense latent attention over pages of 64 tokens."""

    def schedule(self, kv_lens: Tensor, queries: int) -> TileSchedule:
        """Plan for all layers. Does not synchronize and can be captured."""
        ...

    def attend(self, q: Tensor, cache: Tensor, call: FlashMLACall, scale: float) -> tuple[Tensor, Tensor]:
        """Attend with q ``[rows, heads, row_dim]`` over the cache ``[pages, 64, 1, row_dim]``, causally.

        The kernel may start before previous kernels have ended (programmatic dependent launch); q and the cache must be
        complete before the call. Returns ``[rows, heads, kv_lora_rank]`` and the log-sum-exp
        ``[requests, heads, queries]`` float32 in natural log; zero and +inf for a row that sees no key.
        """
        ...


@dataclass(frozen=True, slots=True)
class FlashMLALibrary:
    """FlashMLA's functions in use."""

    attend: Callable[..., Any]
    schedule: Callable[..., Any]
    empty_schedule: Callable[[], Any]
    attend_rows: Callable[..., Any]


@cache
def load_library() -> FlashMLALibrary:
    """Import FlashMLA. Raises whatever its import raises."""
    import flash_mla

    if not flash_mla.has_legacy():
        raise ImportError("flash_mla was built without SM 90 kernels (FLASH_MLA_BUILD_LEGACY=0)")
    return FlashMLALibrary(
        flash_mla.flash_mla_with_kvcache,
        flash_mla.get_mla_decoding_metadata,
        flash_mla.get_mla_metadata,
        flash_mla.flash_mla_sparse_fwd,
    )


class FlashMLAKernels:
    """FlashMLA's dense decode for ``heads`` heads. The library's flag for dense decode on SM 90 is ``use_legacy``."""

    def __init__(self, heads: int, kv_lora_rank: int) -> None:
        self._library, self._heads, self._rank = load_library(), heads, kv_lora_rank

    def schedule(self, kv_lens: Tensor, queries: int) -> TileSchedule:
        tiles, splits = self._library.schedule(
            seqlens_k=kv_lens,
            num_q_tokens_per_head_k=queries * self._heads,
            h_k=1,
            h_q=self._heads,
            is_fp8_kvcache=False,
            use_legacy=True,
        )
        self._check_size(len(kv_lens), queries, len(tiles))
        return TileSchedule(tiles, splits)

    def _check_size(self, requests: int, queries: int, parts: int) -> None:
        """Raise ``PlanError`` if partial results exceed the kernel's 32-bit index, which the kernel does not check."""
        if (requests + parts) * queries * self._heads * self._rank >= _MAX_INDEX:
            most = (_MAX_INDEX - 1) // (queries * self._heads * self._rank) - parts
            raise PlanError(
                f"{requests} requests with {queries} tokens each and {self._heads} heads exceed FlashMLA's 32-bit "
                f"index, at most {most} fit; lower `max_batch`",
                settings=["max_batch"],
            )

    def attend(self, q: Tensor, cache: Tensor, call: FlashMLACall, scale: float) -> tuple[Tensor, Tensor]:
        schedule, _ = self._library.empty_schedule()
        schedule.tile_scheduler_metadata, schedule.num_splits = call.schedule.tiles, call.schedule.splits
        out, lse = self._library.attend(
            q=q.contiguous().view(-1, call.queries, *q.shape[1:]),
            k_cache=cache,
            block_table=call.page_table,
            cache_seqlens=call.kv_lens,
            head_dim_v=self._rank,
            tile_scheduler_metadata=schedule,
            softmax_scale=scale,
            causal=call.queries > 1,
            is_fp8_kvcache=False,
            use_legacy=True,
        )
        wait_for_kernels(q.device)
        return out.flatten(0, 1), lse


def wait_for_kernels(device: torch.device) -> None:
    """Launch a plain kernel as a barrier: later kernels start only after all previous ones have ended.

    The library's first kernel uses programmatic dependent launch and never waits, so it would read queries that are not
    written yet if the kernel before it lets others start early. Its last kernel may end before its first has stored all
    results. A plain launch neither starts early nor lets the next kernel do so.
    """
    if device.type == "cuda":
        torch.zeros(1, dtype=torch.uint8, device=device)
