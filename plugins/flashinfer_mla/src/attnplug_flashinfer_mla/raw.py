"""Baseline for benchmarks: FlashInfer called directly, as its documentation shows (``attnplug.raw``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug_flashinfer_mla import kernels

if TYPE_CHECKING:  # tune is not a dependency: it loads this module by its entry point
    from attnplug_tune.raw_calls import RawScene

SCRATCH_BYTES = 128 << 20
"""Workspace size that FlashInfer recommends."""


def calls(scene: RawScene) -> RawFlashInferMLA | None:
    """Return the paged decode over a cache in the queries' dtype; ``None`` for other scenes."""
    pool = scene.pools.mla
    if scene.prefill or scene.tokens != 1 or pool is None or pool.rows(0).dtype != scene.q.dtype:
        return None
    return RawFlashInferMLA(scene)


class RawFlashInferMLA:
    """FlashInfer's paged wrapper over the caches of a scene, planned for its lengths."""

    def __init__(self, scene: RawScene, kernel: str = "auto", scratch: Tensor | None = None) -> None:
        dims, device = scene.layers[0].mla, scene.q.device
        assert dims is not None and scene.pools.mla is not None
        self._scene, self._dims, paged = scene, dims, kernels.load_library().paged
        pages = [-(-length // scene.page_size) for length in scene.lengths]
        starts = torch.tensor([0, *pages]).cumsum(0).int()
        self._arrays: dict[str, Tensor] = {
            "qo_indptr": torch.arange(len(pages) + 1, dtype=torch.int32, device=device),
            "kv_indptr": starts.to(device),
            "kv_indices": torch.cat([scene.page_table[row, :count] for row, count in enumerate(pages)]),
            "kv_len_arr": torch.tensor(scene.lengths, dtype=torch.int32, device=device),
        }
        reserved = {name: array.clone() for name, array in self._arrays.items()} if scene.captured else {}
        if scratch is None:
            scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = paged(scratch, use_cuda_graph=scene.captured, backend=kernel, **reserved)
        rank = dims.kv_lora_rank
        self._q = scene.q[..., :rank], scene.q[..., rank:]
        rows = [scene.pools.mla.rows(layer.layer_id).squeeze(2) for layer in scene.layers]
        self._caches = [(cache[..., :rank], cache[..., rank:]) for cache in rows]
        self.plan()

    def plan(self, _: int = 0) -> None:
        self._wrapper.plan(
            **self._arrays,
            num_heads=self._scene.layers[0].num_heads,
            head_dim_ckv=self._dims.kv_lora_rank,
            head_dim_kpe=self._dims.qk_rope_head_dim,
            page_size=self._scene.page_size,
            causal=False,
            sm_scale=self._scene.layers[0].scale,
            q_data_type=self._scene.q.dtype,
            kv_data_type=self._scene.q.dtype,
        )

    def begin(self) -> None:
        """Do nothing: the wrapper's planning cannot be captured."""

    def run(self, number: int) -> Tensor:
        out: Tensor = self._wrapper.run(*self._q, *self._caches[number % len(self._caches)])
        return out
