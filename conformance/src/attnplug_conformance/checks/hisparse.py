"""Checks of sparse layers with HiSparse: rows are in host memory, and only selected ones are swapped in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnplug import ForwardMode, Geometry
from attnplug.host import KVPools
from attnplug.kv.buffer import part_views
from attnplug_conformance.check import Check, CheckContext
from attnplug_conformance.checks.cache import check_written
from attnplug_conformance.checks.sparse import DECODE, EXTEND, VERIFY, SparseScene, check_sparse, sparse_case
from attnplug_conformance.failure import failure_prefix
from attnplug_conformance.stored_rows import coded_formats
from attnplug_sparse.hisparse import HOST_ROWS, HiSparse, HostRows, HotPool, HotSizes
from attnplug_sparse.pools import INDEX_KEYS


class HotScene(SparseScene):
    """Scene with its cache in host memory. The device has NaN, and space for the rows that one step selects.

    Requests have different row indices in the slot table than in the batch.
    """

    def _pools(self, zero_region: str | None) -> KVPools:
        plain = super()._pools(zero_region)
        case, layers = self.case, self.case.layers
        nodes = max(self.new) if case.mode is ForwardMode.TARGET_VERIFY else 1
        longest = self.page_table.shape[1] * self.page_size
        rows = sum(self.new) + case.padding + 8
        sizes = HotSizes(len(self.new) + 2, rows, longest, self.index.topk * nodes, nodes)
        pool = HotPool(
            layers,
            sizes,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=self.format,
            device=self.device,
        )
        host = HostRows(
            len(layers),
            num_pages=self.num_pages,
            page_size=self.page_size,
            row_nbytes=pool.cells.shape[1],
            device=self.device,
        )
        pool.cells.fill_(0xFF)  # NaN in every dtype
        host.cells.fill_(0xFF)
        self.coordinator = self.hisparse = HiSparse(pool, host)
        return KVPools(mla=pool, caches={INDEX_KEYS: plain.caches[INDEX_KEYS], HOST_ROWS: host})

    def contents(self, layer_id: int, pools: KVPools | None = None) -> tuple[tuple[Tensor, ...], ...]:
        if pools is not None:
            return super().contents(layer_id, pools)
        (rows,) = self.stored_rows
        return (part_views(self.hisparse.host_pages(layer_id), rows.format, rows.width, rows.rope),)

    def geometry(self, *, lane: int = 0, slots: Tensor | None = None) -> Geometry:
        rows = torch.arange(len(self.new), 0, -1, device=self.device)
        return replace(super().geometry(lane=lane, slots=slots), table_rows=rows)


def _swapped_in(context: CheckContext) -> None:
    scene = HotScene(context.subject, context.case)
    before = scene.snapshot()
    check_sparse(context, scene)
    with failure_prefix("the cache in host memory"):
        check_written(scene, before)


def hisparse_checks() -> Iterator[Check]:
    modes = {
        "decode": (((17, 1), (8, 1), (40, 1), (0, 1)), DECODE, 0),
        "verify": (((12, 3), (30, 3)), VERIFY, 0),
        "extend": (((3, 2), (30, 3), (0, 4)), EXTEND, 3),
    }
    for name, (lengths, mode, padding) in modes.items():
        yield Check(
            f"mla.hisparse.{name}",
            "hisparse",
            "it reads the selected rows where HiSparse swaps them in, and writes new rows through it",
            sparse_case(lengths, mode, hisparse=True, padding=padding),
            _swapped_in,
            name != "verify",
        )
    for format in coded_formats("mla"):
        if format.in_bytes:
            yield Check(
                f"mla.hisparse.{format}",
                "hisparse",
                f"{format} rows that HiSparse swaps in are read with their own scales",
                sparse_case(modes["decode"][0], DECODE, hisparse=True, kv_dtype=format.name),
                _swapped_in,
            )
