"""Baseline for benchmarks: flash-attn-4 called directly (``attnplug.raw``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnplug_flashattention import kernels

if TYPE_CHECKING:  # tune is not a dependency: it loads this module by its entry point
    from attnplug_tune.raw_calls import RawScene


def calls(scene: RawScene) -> RawFlashAttention | None:
    """Return the paged decode of plain layers; ``None`` for other scenes."""
    plain = scene.pools.mha is not None and not scene.layers[0].features
    return RawFlashAttention(scene) if plain and scene.tokens == 1 and not scene.prefill else None


class RawFlashAttention:
    """flash-attn-4 over the pages of a scene."""

    def __init__(self, scene: RawScene) -> None:
        pool = scene.pools.mha
        assert pool is not None
        self._attend, self._q, self._table = kernels.load_fa4(), scene.q.unsqueeze(1), scene.page_table
        self._longest, self._scale = max(scene.lengths), scene.layers[0].scale
        self._lens = torch.tensor(scene.lengths, dtype=torch.int32, device=scene.q.device)
        self._caches = [(pool.keys(each.layer_id), pool.values(each.layer_id)) for each in scene.layers]

    def begin(self) -> None:
        """Do nothing: flash-attn-4 needs no planning."""

    def run(self, number: int) -> Tensor:
        keys, values = self._caches[number % len(self._caches)]
        out, _ = self._attend(
            self._q,
            keys,
            values,
            seqused_k=self._lens,
            page_table=self._table,
            max_seqlen_k=self._longest,
            softmax_scale=self._scale,
        )
        attended: Tensor = out.squeeze(1)
        return attended
