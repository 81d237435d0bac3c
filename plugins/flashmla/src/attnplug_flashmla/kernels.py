"""The seam to FlashMLA: the two calls of dense attention. Only this module imports the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from attnplug import PlanError

_LARGEST_INDEX = 1 << 31


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Which multiprocessors read which pages, made on the device: ``tiles`` and ``splits`` ``[requests + 1]``, int32.

    Valid for every layer, as long as the lengths do not change.
    """

    tiles: Tensor
    splits: Tensor

    def become(self, other: Schedule) -> None:
        """Copy another schedule's numbers into this one's memory."""
        torch._foreach_copy_([self.tiles, self.splits], [other.tiles, other.splits])  # one launch for both


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A batch as the kernel takes it: ``queries`` tokens per request, the last of its ``kv_lens`` rows.

    ``kv_lens`` ``[requests]`` and ``page_table`` ``[requests, pages]`` are int32 and contiguous. A request of length 0
    attends to nothing, but its first entry in the table must still be a valid page.
    """

    queries: int
    kv_lens: Tensor
    page_table: Tensor
    schedule: Schedule


class Kernels(Protocol):
    def schedule(self, kv_lens: Tensor, queries: int) -> Schedule:
        """Plan for all layers. Waits for nothing and can be captured."""
        ...

    def attend(self, q: Tensor, cache: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """q ``[rows, heads, row_dim]`` over the cache ``[pages, 64, 1, row_dim]``, causally.

        It may start before kernels that let others start early have ended: q and the cache are ready before the call.
        Returns ``[rows, heads, kv_lora_rank]`` and the log-sum-exp ``[requests, heads, queries]`` float32, natural log;
        where a row sees no key, zero and +inf.
        """
        ...


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of FlashMLA in use."""

    attend: Callable[..., Any]
    schedule: Callable[..., Any]
    empty_schedule: Callable[[], Any]
    attend_rows: Callable[..., Any]


@cache
def load_library() -> Library:
    """Import FlashMLA. Raises whatever its import raises."""
    import flash_mla

    if not flash_mla.has_legacy():
        raise ImportError("it was built without its kernels for SM 90 (FLASH_MLA_BUILD_LEGACY=0)")
    return Library(
        flash_mla.flash_mla_with_kvcache,
        flash_mla.get_mla_decoding_metadata,
        flash_mla.get_mla_metadata,
        flash_mla.flash_mla_sparse_fwd,
    )


class FlashMLAKernels:
    """FlashMLA's dense decode, for one number of heads. The library counts dense decode and SM 90 as legacy."""

    def __init__(self, heads: int, kv_lora_rank: int) -> None:
        self._library, self._heads, self._rank = load_library(), heads, kv_lora_rank

    def schedule(self, kv_lens: Tensor, queries: int) -> Schedule:
        tiles, splits = self._library.schedule(
            seqlens_k=kv_lens,
            num_q_tokens_per_head_k=queries * self._heads,
            h_k=1,
            h_q=self._heads,
            is_fp8_kvcache=False,
            use_legacy=True,
        )
        self._check_size(len(kv_lens), queries, len(tiles))
        return Schedule(tiles, splits)

    def _check_size(self, requests: int, queries: int, parts: int) -> None:
        """The kernel counts the numbers of all partial results in 32 bits, and does not check whether they fit."""
        if (requests + parts) * queries * self._heads * self._rank >= _LARGEST_INDEX:
            most = (_LARGEST_INDEX - 1) // (queries * self._heads * self._rank) - parts
            raise PlanError(
                f"{requests} requests with {queries} tokens each and {self._heads} heads are more than FlashMLA can "
                f"count, at most {most}; lower `max_batch`",
                settings=["max_batch"],
            )

    def attend(self, q: Tensor, cache: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
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
    """Let what follows start only after every kernel before has ended.

    The library's first kernel is launched early (programmatic dependent launch) and never waits: it would read queries
    that are not written yet if the kernel before it lets others start early. Its last kernel may end before its first
    has stored all results. A plain launch stands between them: it does not start early, and lets nothing else do so.
    """
    if device.type == "cuda":
        torch.zeros(1, dtype=torch.uint8, device=device)
