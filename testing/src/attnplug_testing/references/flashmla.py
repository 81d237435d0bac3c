"""flashmla's kernels in plain torch, as strict as FlashMLA's. They test planning, not a kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnplug import BackendContext, DType
from attnplug_flashmla.backend import FlashMLABackend
from attnplug_flashmla.kernels import FlashMLACall, TileSchedule
from attnplug_testing.batches import declaring
from attnplug_testing.kernel_scene import KernelCase, KernelScene

PARTS = 7
ROW_DIM, RANK, PAGE = 576, 512, 64


def build(context: BackendContext) -> FlashMLABackend:
    """Build the backend with real kernels on a GPU, else with reference kernels."""
    kernels = ReferenceFlashMLA() if context.device.type == "cpu" else None
    return FlashMLABackend(declaring(context, "flashmla"), kernels=kernels)


def on(case: KernelCase, device: str) -> KernelCase:
    """Return the case as it runs on a device; on a CPU in float32, so that no error hides behind rounding."""
    return replace(case, dtype=DType.FLOAT32) if device == "cpu" else case


def scene(case: KernelCase, device: str) -> KernelScene:
    return KernelScene(on(case, device), device, build)


class ReferenceFlashMLA:
    """Kernels that record in a schedule what it was made for, and refuse it for anything else."""

    def schedule(self, kv_lens: Tensor, queries: int) -> TileSchedule:
        assert kv_lens.dtype is torch.int32 and kv_lens.is_contiguous() and kv_lens.dim() == 1 and len(kv_lens)
        tiles = torch.full((PARTS, 8), queries, dtype=torch.int32)
        splits = torch.zeros(len(kv_lens) + 1, dtype=torch.int32)
        splits[1:] = kv_lens
        return TileSchedule(tiles, splits)

    def attend(self, q: Tensor, cache: Tensor, call: FlashMLACall, scale: float) -> tuple[Tensor, Tensor]:
        requests, heads = len(call.kv_lens), q.shape[1]
        pages = len(cache)
        assert cache.shape == (pages, PAGE, 1, ROW_DIM) and cache.stride(-1) == 1
        assert not any(stride % 8 for stride in cache.stride()[:-1]), "a tensor map takes multiples of 16 bytes"
        assert q.shape == (requests * call.queries, heads, ROW_DIM) and q.dtype == cache.dtype
        table = call.page_table
        assert table.dtype is torch.int32 and table.stride(-1) == 1 and len(table) == requests
        assert call.kv_lens.dtype is torch.int32 and call.kv_lens.is_contiguous()
        assert call.schedule.tiles.shape == (PARTS, 8) and call.schedule.tiles.is_contiguous()
        assert bool((call.schedule.tiles == call.queries).all()), "a schedule for other queries"
        assert torch.equal(call.schedule.splits[1:], call.kv_lens), "a schedule for other lengths"
        out = torch.empty(requests, call.queries, heads, RANK, dtype=q.dtype)
        lse = torch.empty(requests, heads, call.queries)
        for request, kv_len in enumerate(call.kv_lens.tolist()):
            used = table[request, : max(-(-kv_len // PAGE), 1)]  # the first page is fetched whatever the length
            assert len(used) * PAGE >= kv_len and bool(((used >= 0) & (used < pages)).all())
            keys = cache[used.long()].flatten(0, 1)[:kv_len, 0].double()
            for query in range(call.queries):
                seen = keys[: max(kv_len - call.queries + query + 1, 0)]
                logits = q[request * call.queries + query].double() @ seen.T * scale
                out[request, query] = torch.softmax(logits, -1) @ seen[:, :RANK]
                lse[request, :, query] = torch.logsumexp(logits, -1) if len(seen) else float("inf")
        return out.flatten(0, 1), lse
