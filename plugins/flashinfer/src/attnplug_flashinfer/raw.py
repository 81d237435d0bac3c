"""Baseline for benchmarks: FlashInfer called directly, as its documentation shows (``attnplug.raw``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug_flashinfer import kernels

if TYPE_CHECKING:  # tune is not a dependency: it loads this module by its entry point
    from attnplug_tune.raw_calls import RawScene

SCRATCH_BYTES = 512 << 20
"""Four times FlashInfer's recommendation, which a graph of 256 requests with 48 heads exceeds."""
_TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which FlashInfer recommends tensor cores for decode."""


def calls(scene: RawScene) -> RawFlashInfer | None:
    """Return the paged decode of plain layers over a cache in the queries' dtype; ``None`` for other scenes."""
    pool = scene.pools.mha
    if scene.prefill or scene.tokens != 1 or pool is None or scene.layers[0].features:
        return None
    return RawFlashInfer(scene) if pool.keys(scene.layers[0].layer_id).dtype == scene.q.dtype else None


class RawFlashInfer:
    """FlashInfer's decode wrapper over the caches of a scene, planned for its lengths."""

    def __init__(self, scene: RawScene) -> None:
        pool, layer, device = scene.pools.mha, scene.layers[0], scene.q.device
        assert pool is not None
        self._q = scene.q
        self._caches = [(pool.keys(each.layer_id), pool.values(each.layer_id)) for each in scene.layers]
        pages = [-(-length // scene.page_size) for length in scene.lengths]
        starts = torch.tensor([0, *pages]).cumsum(0).int().to(device)
        indices = torch.cat([scene.page_table[row, :count] for row, count in enumerate(pages)])
        last = [length - (count - 1) * scene.page_size for length, count in zip(scene.lengths, pages, strict=True)]
        last_page_lens = torch.tensor(last, dtype=torch.int32, device=device)
        reserved = {
            "paged_kv_indptr_buffer": starts.clone(),
            "paged_kv_indices_buffer": indices.clone(),
            "paged_kv_last_page_len_buffer": last_page_lens.clone(),
        }
        self._wrapper: Any = kernels.load_library().decode(
            torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device),
            kv_layout="NHD",
            use_cuda_graph=scene.captured,
            use_tensor_cores=layer.num_heads >= _TENSOR_CORE_GROUP * layer.num_kv_heads,
            **(reserved if scene.captured else {}),
        )
        self._wrapper.plan(
            indptr=starts,
            indices=indices,
            last_page_len=last_page_lens,
            num_qo_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            page_size=scene.page_size,
            sm_scale=layer.scale,
            q_data_type=scene.q.dtype,
            kv_data_type=scene.q.dtype,
        )

    def begin(self) -> None:
        """Do nothing: the wrapper's planning cannot be captured."""

    def run(self, number: int) -> Tensor:
        out: Tensor = self._wrapper.run(self._q, self._caches[number % len(self._caches)])
        return out
