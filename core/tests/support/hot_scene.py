"""The scene of a sparse layer whose rows are in host memory: on the device is nothing but NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from attnplug import INDEX_KEYS, AttentionBackend, BackendContext, ForwardBatch, ForwardMode
from attnplug.host import HOST_ROWS, HiSparse, HostRows, HotPool, HotSizes, KVPools, TorchNativeBackend
from support.sparse_scene import NAN, SparseCase, SparseScene


class HotScene(SparseScene):
    """As ``SparseScene``, with a backend that HiSparse brings rows to. Buffers hold what one step chooses, and no more.

    Requests are in other rows of the slot table than in the batch.
    """

    def __init__(
        self,
        case: SparseCase,
        device: str = "cpu",
        build: Callable[[BackendContext], AttentionBackend] = TorchNativeBackend,
    ) -> None:
        super().__init__(case, device, build)
        nodes = max(self.new) if case.mode is ForwardMode.TARGET_VERIFY else 1
        requests, size = len(self.new), case.page_size
        sizes = HotSizes(requests + 2, sum(self.new) + 8, self.page_table.shape[1] * size, case.topk * nodes, nodes)
        pages = self.mla.num_pages
        pool = HotPool(case.layers, sizes, num_pages=pages, page_size=size, dtype=case.dtype, device=self.device)
        host = HostRows(3, num_pages=pages, page_size=size, row_nbytes=pool.cells.shape[1], device=self.device)
        self.hisparse = HiSparse(pool, host)
        for layer in pool.layer_ids:
            pool.rows(layer).fill_(NAN)
            self.hisparse.host_pages(layer).copy_(self.mla.rows(layer))
        pools = KVPools(mla=pool, caches={INDEX_KEYS: self.keys, HOST_ROWS: host})
        self.context = replace(self.context, pools=pools, coordinator=self.hisparse)
        self.backend = build(self.context)

    def batch(self) -> ForwardBatch:
        batch = super().batch()
        rows = torch.arange(len(self.new), 0, -1, device=self.device)
        batch.geometry = replace(batch.geometry, table_rows=rows)
        return batch
