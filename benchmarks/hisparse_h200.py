"""HiSparse on an H200: a decode step of one sparse layer over rows in host memory, compared with rows on the device.

128 heads, 2048 of 131072 rows selected, hot buffers of 4096 rows. A cycle of selections is replayed, of which a part
stays from step to step and the rest changes. A cycle has more rows than a buffer, so changed rows always miss. This
sets the hit rate. ``attention`` is the write of the new rows and attention, with HiSparse also swap-in. ``step`` adds
the index: scores and top-k over all rows. Its selection is not used, so that the hit rate is known.

Both sides alternate in one run, in CUDA graphs if the backend can be captured. Only ratios within one run count.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_clock import device_us
from gpu_report import Report, attempt, describe

from attnplug import (
    AttentionKind,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Role,
)
from attnplug.host import (
    HostContext,
    HostLengths,
    KVPools,
    Limits,
    MLADims,
    ModelAttention,
    WorkspaceOwner,
    load_registry,
)
from attnplug.registry.assembly import build_backend
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions
from attnplug_sparse.hisparse import HOST_ROWS, HiSparse, HostRows, HotPool, HotSizes
from attnplug_sparse.pools import INDEX_KEYS, IndexKeyPool
from attnplug_sparse.selection import select_rows

WHAT = "one sparse layer's decode step over rows in host memory, against rows on the device"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-triton-mla")
PAGE, CONTEXT, TOPK, BUFFER, HEADS, ROUNDS = 64, 131072, 2048, 4096, 128, 15
BATCHES, RATES = (1, 4, 16), (0.9,)
CYCLE = 16
LAYER = LayerSpec(
    0,
    AttentionKind.MLA,
    HEADS,
    HEADS,
    192,
    128,
    192**-0.5,
    mla=MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64),
    indexer=IndexerDims(64, 128, TOPK),
)


class Side:
    """A backend with its pools: all rows on the device, or in host memory."""

    def __init__(self, name: str, requests: int, device: torch.device, keys: IndexKeyPool, *, hot: bool) -> None:
        pages, size = requests * CONTEXT // PAGE, {"page_size": PAGE, "device": device}
        self.hisparse: HiSparse | None = None
        if hot:
            sizes = HotSizes(requests, requests, CONTEXT, BUFFER)
            pool = HotPool([LAYER], sizes, num_pages=pages, dtype=DType.BFLOAT16, **size)
            host = HostRows(1, num_pages=pages, row_nbytes=pool.cells.shape[1], **size)
            pools = KVPools(mla=pool, caches={INDEX_KEYS: keys, HOST_ROWS: host})
            self.hisparse = HiSparse(pool, host)
        else:
            mla = MLAPool([LAYER], num_pages=pages, dtype=DType.BFLOAT16, **size)
            mla.rows(0).normal_(std=0.1)
            pools = KVPools(mla=mla, caches={INDEX_KEYS: keys})
        registered = load_registry().backends[name]
        context = HostContext(
            model=ModelSpec("one layer", "benchmark", (LAYER,), CONTEXT),
            device=device,
            dtype=torch.bfloat16,
            kv_dtype=DType.BFLOAT16,
            page_size=PAGE,
            limits=Limits(requests, requests, CONTEXT),
            pools=pools,
            workspace=WorkspaceOwner(),
            coordinator=self.hisparse,
        )
        roles = frozenset({Role.PREFILL, Role.DECODE})
        self.backend = build_backend(
            registered, context.for_backend(name, registered.spec.capabilities, roles=roles), None
        )
        self.attention = ModelAttention(self.backend, pools)
        self.captures = self.attention.graph_level >= GraphLevel.DECODE
        generator = torch.Generator().manual_seed(1)
        table = torch.randperm(pages, generator=generator).view(requests, -1).int().to(device)
        lens = torch.full((requests,), CONTEXT, dtype=torch.int32, device=device)
        exact = None if self.captures else HostLengths([1] * requests, [CONTEXT] * requests)
        geometry = Geometry(
            ForwardMode.DECODE,
            table,
            lens,
            PAGE,
            rows=requests,
            max_seq_len=CONTEXT,
            max_new=1,
            host=exact,
            captured=self.captures,
            table_rows=torch.arange(requests, device=device),
        )
        self.batch = ForwardBatch(geometry)
        if self.captures:
            self.attention.reserve(requests, requests)
            self.attention.capture(self.batch, in_capture=True)
        else:
            self.attention.plan(self.batch)

    def cycle(self, inputs: Inputs, *, indexed: bool) -> Callable[[], None]:
        """Run every selection of the cycle once, by its graph if captured."""

        def run() -> None:
            if self.captures:
                self.attention.refill(self.batch)
            for chosen in inputs.choices:
                if indexed:
                    select_rows(self.attention, inputs.index, LAYER, self.batch)
                extras = ForwardExtras(selected=chosen)
                self.backend.forward_decode(inputs.q, inputs.rows, None, LAYER, self.batch, extras=extras)

        run()
        if not self.captures:
            return run
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


class Inputs:
    """Queries, new rows, and a cycle of selections with hit rate ``rate``."""

    def __init__(self, requests: int, rate: float, device: torch.device) -> None:
        made = partial(torch.randn, device=device, dtype=torch.bfloat16)
        self.q, self.rows = made(requests, HEADS, 576), made(requests, 1, 576)
        weights = torch.randn(requests, 64, device=device)
        self.index = IndexInputs(made(requests, 64, 128), made(requests, 128), weights)
        stays, changes = round(TOPK * rate), TOPK - round(TOPK * rate)
        drawn = torch.stack([torch.randperm(CONTEXT - 1)[: stays + CYCLE * changes] for _ in range(requests)])
        self.choices = [
            SelectedPositions(
                torch.cat((drawn[:, :stays], drawn[:, stays + n * changes : stays + (n + 1) * changes]), 1)
                .int()
                .to(device)
            )
            for n in range(CYCLE)
        ]


def measure(name: str, requests: int, rate: float, device: torch.device) -> dict[str, Any]:
    keys = IndexKeyPool(
        [LAYER], num_pages=requests * CONTEXT // PAGE, page_size=PAGE, dtype=DType.BFLOAT16, device=device
    )
    keys.keys(0).normal_(std=0.1)
    sides = {"resident": Side(name, requests, device, keys, hot=False)}
    sides["hisparse"] = Side(name, requests, device, keys, hot=True)
    inputs, hisparse = Inputs(requests, rate, device), sides["hisparse"].hisparse
    assert hisparse is not None
    found: dict[str, Any] = {"captured": sides["hisparse"].captures}
    for what, indexed in (("attention", False), ("step", True)):
        runs = {side: each.cycle(inputs, indexed=indexed) for side, each in sides.items()}
        hisparse.reset_statistics()
        us = {side: taken / CYCLE for side, taken in device_us(runs, ROUNDS, lambda: None).items()}
        found[what] = {**us, "ratio": us["hisparse"] / us["resident"]}
    counted = hisparse.statistics()
    found["hit_rate"] = counted.hit_rate
    found["loaded_bytes_per_step"] = requests * round(TOPK * (1 - rate)) * hisparse.pool.cells.shape[1]
    return found


def line(requests: int, rate: float, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"batch {requests:2}, hit rate {rate}: {row['error']}"
    parts = [
        f"{what} {row[what]['resident']:7.1f} → {row[what]['hisparse']:7.1f} µs ({row[what]['ratio']:.2f} ×)"
        for what in ("attention", "step")
    ]
    return f"batch {requests:2}, hit rate {row['hit_rate']:.3f}: {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="triton_mla", metavar="NAME", help="a backend that claims hisparse")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("hisparse_h200 measures kernels of an NVIDIA GPU, and torch sees no CUDA device here")
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    report = Report(arguments.json, {**describe(WHAT, PACKAGES, arguments.commit), "backend": arguments.backend})
    rows = []
    with torch.inference_mode():
        for requests in BATCHES:
            for rate in RATES:
                row = attempt(partial(measure, arguments.backend, requests, rate, device))
                rows.append({"batch": requests, "asked_hit_rate": rate, **row})
                report.put("cases", rows)
                print(line(requests, rate, row), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
    ratios = [row["step"]["ratio"] for row in rows if "error" not in row]
    if ratios:
        print(f"a step takes {statistics.median(ratios):.2f} × as long, {max(ratios):.2f} × at most")
    print(f"{report.seconds:.0f} s in all")


if __name__ == "__main__":
    main()
