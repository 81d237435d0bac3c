"""Baseline for benchmarks: FlashMLA called directly, as its documentation shows (``attnplug.raw``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug_flashmla import kernels

if TYPE_CHECKING:  # tune is not a dependency: it loads this module by its entry point
    from attnplug_tune.raw_calls import RawScene


def calls(scene: RawScene) -> RawFlashMLA | None:
    """Return the dense decode of one or several tokens; ``None`` for other scenes."""
    return None if scene.prefill or scene.pools.mla is None else RawFlashMLA(scene)


class RawFlashMLA:
    """FlashMLA over the caches of a scene. The first call after ``begin`` computes the schedule."""

    def __init__(self, scene: RawScene) -> None:
        layer, pool = scene.layers[0], scene.pools.mla
        assert layer.mla is not None and pool is not None
        self._library, self._rank, self._scale = kernels.load_library(), layer.mla.kv_lora_rank, layer.scale
        self._heads, self._tokens = layer.num_heads, scene.tokens
        self._q = scene.q.view(-1, scene.tokens, *scene.q.shape[1:])
        self._table = scene.page_table
        self._lens = torch.tensor(scene.lengths, dtype=torch.int32, device=scene.q.device)
        self._caches = [pool.rows(each.layer_id) for each in scene.layers]
        self.begin()

    def begin(self) -> None:
        self._schedule: Any = self._library.empty_schedule()[0]

    def plan(self, _: int = 0) -> None:
        """Compute the schedule alone, to measure its time."""
        rows = self._tokens * self._heads
        self._library.schedule(
            seqlens_k=self._lens, num_q_tokens_per_head_k=rows, h_k=1, h_q=self._heads, use_legacy=True
        )

    def run(self, number: int) -> Tensor:
        out, _ = self._library.attend(
            q=self._q,
            k_cache=self._caches[number % len(self._caches)],
            block_table=self._table,
            cache_seqlens=self._lens,
            head_dim_v=self._rank,
            tile_scheduler_metadata=self._schedule,
            softmax_scale=self._scale,
            causal=self._tokens > 1,
            use_legacy=True,
        )
        attended: Tensor = out.flatten(0, 1)
        return attended
