"""Variants of triton_mla on a GPU: page size, fp8 cache, verify, uneven lengths, batch invariance.

Decode and verify run in CUDA graphs of 20 calls over caches that are not in L2. Each variant alternates with the plain
one of the same bytes or tokens. The kernel that plans once per step is timed too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from mla_sides import CALLS, DIMS, MAX_CONTEXT, QK_DIM, SCALE, V_DIM, Rig, random
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, LayerSpec, MLAPool, ModelSpec
from attnplug.contract.batch import BatchPlan
from attnplug.host import HostContext, KVPools, Limits, WorkspaceOwner
from attnplug_triton_mla.backend import TritonMLABackend
from attnplug_triton_mla.configurations import MLAKernelConfig, choose
from attnplug_triton_mla.plugin import attnplug_backends

WHAT = "triton_mla: variants of decode and verify beside the plain decode; µs of a call in a graph of 20, medians"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-triton-mla")
REPLAYS, ROTATING_BYTES = 15, 3 << 30


@dataclass(frozen=True)
class Variant:
    lens: tuple[int, ...]
    heads: int = 16
    queries: int = 1
    page_size: int = 64
    kv_dtype: DType = DType.BFLOAT16
    invariant: bool = False


def even(requests: int, length: int) -> tuple[int, ...]:
    return (length,) * requests


SETS: Mapping[str, Mapping[str, Variant]] = {
    "page size, 4 x 4096": {str(size): Variant(even(4, 4096), page_size=size) for size in (64, 16, 1)},
    "page size, 64 x 4096": {str(size): Variant(even(64, 4096), page_size=size) for size in (64, 16, 1)},
    "cache, 1 x 16384": {str(t): Variant(even(1, 16384), kv_dtype=t) for t in (DType.BFLOAT16, DType.FLOAT8_E4M3)},
    "cache, 64 x 4096": {str(t): Variant(even(64, 4096), kv_dtype=t) for t in (DType.BFLOAT16, DType.FLOAT8_E4M3)},
    "tokens of each request, 1 x 4096": {str(n): Variant(even(1, 4096), queries=n) for n in (1, 2, 4, 8)},
    "tokens of each request, 16 x 4096": {str(n): Variant(even(16, 4096), queries=n) for n in (1, 2, 4, 8)},
    "lengths, 128 k tokens": {
        "64 x 2048": Variant(even(64, 2048)),
        "65536 and 63 x 1024": Variant((65536, *even(63, 1024))),
        "1000 times apart": Variant((100_000, *even(31, 900), *even(32, 100))),
    },
    "batch invariance, 1 x 65536": {str(on): Variant(even(1, 65536), invariant=on) for on in (False, True)},
    "batch invariance, 64 x 4096": {str(on): Variant(even(64, 4096), invariant=on) for on in (False, True)},
}


class Side:
    """One variant, ready to be captured."""

    def __init__(self, variant: Variant, device: torch.device) -> None:
        size, lens = variant.page_size, variant.lens
        width, pages = -(-max(lens) // size), sum(-(-length // size) for length in lens)
        table, order, at = torch.zeros(len(lens), width, dtype=torch.int32), torch.randperm(pages).int(), 0
        for request, length in enumerate(lens):
            count = -(-length // size)
            table[request, :count] = order[at : at + count]
            at += count
        nbytes = pages * size * DIMS.row_dim * 2
        self._layers = tuple(
            LayerSpec(number, AttentionKind.MLA, variant.heads, variant.heads, QK_DIM, V_DIM, SCALE, mla=DIMS)
            for number in range(min(CALLS, max(2, ROTATING_BYTES // nbytes)))
        )
        pool = MLAPool(self._layers, num_pages=pages, page_size=size, dtype=variant.kv_dtype, device=device)
        for layer in self._layers:
            rows = pool.rows(layer.layer_id)
            rows.copy_(random(*rows.shape, device=device))
        host = HostContext(
            model=ModelSpec("benchmark", "benchmark", self._layers, MAX_CONTEXT),
            device=device,
            dtype=torch.bfloat16,
            kv_dtype=variant.kv_dtype,
            page_size=size,
            limits=Limits(len(lens), len(lens) * variant.queries, MAX_CONTEXT),
            pools=KVPools(mla=pool),
            workspace=WorkspaceOwner(),
        )
        (spec,), levels = attnplug_backends(), frozenset({"run", "batch"} if variant.invariant else ())
        rows = len(lens) * variant.queries
        self._context = host.for_backend("benchmark", spec.capabilities, invariant=levels)
        self._decode = variant.queries == 1
        self._q = random(rows, variant.heads, DIMS.row_dim, device=device)
        self._geometry = Geometry(
            ForwardMode.DECODE if self._decode else ForwardMode.TARGET_VERIFY,
            table.to(device),
            torch.tensor(lens, dtype=torch.int32, device=device),
            size,
            rows=rows,
            max_seq_len=max(lens),
            max_new=variant.queries,
            captured=True,
        )
        self._capture(choose)

    def with_configs(self, choose: Callable[..., MLAKernelConfig]) -> Side:
        """The same side over the same memory, with other configurations."""
        other = copy(self)
        other._capture(choose)
        return other

    def _capture(self, choose: Callable[..., MLAKernelConfig]) -> None:
        self._backend, self._batch = TritonMLABackend(self._context, choose=choose), ForwardBatch(self._geometry)
        self._backend.init_cuda_graph_state(self._batch.batch_size, self._batch.num_tokens)
        plan = self._backend.init_forward_metadata_out_graph(self._batch, in_capture=True)
        self._batch.plan = BatchPlan(plan)

    def plan(self) -> Tensor:
        for _ in range(CALLS):
            self._backend.init_forward_metadata_in_graph(self._batch)
        return self._q

    def calls(self) -> Tensor:
        forward = self._backend.forward_decode if self._decode else self._backend.forward_extend
        for number in range(CALLS):
            layer = self._layers[number % len(self._layers)]
            out = forward(self._q, None, None, layer, self._batch, save_kv_cache=False)
        return out


def measure(variants: Mapping[str, Variant], rig: Rig) -> dict[str, float]:
    """Microseconds per call of each variant, and of planning the first."""
    sides = {name: Side(variant, rig.device) for name, variant in variants.items()}
    bodies: dict[str, Callable[[], Tensor]] = {name: side.calls for name, side in sides.items()}
    bodies["plan"] = next(iter(sides.values())).plan
    graphs = {name: capture(body)[0] for name, body in bodies.items()}
    us = device_us({name: graph.replay for name, graph in graphs.items()}, REPLAYS, rig.cold)
    return {name: found / CALLS for name, found in us.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    parser.add_argument("--limit", type=float, default=60, help="seconds after which no further set begins")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("triton_mla_variants measures kernels, and torch sees no CUDA device here")
    torch.manual_seed(0)
    report = Report(arguments.json, describe(WHAT, PACKAGES, arguments.commit))
    rig = Rig(torch.device("cuda", 0))
    for name, variants in SETS.items():
        if report.seconds > arguments.limit:
            break
        with torch.inference_mode():
            us = attempt(partial(measure, variants, rig))
        report.put(name, {"us": us, "variants": {key: asdict(variant) for key, variant in variants.items()}})
        shown = {key: round(found, 1) if isinstance(found, float) else found[:200] for key, found in us.items()}
        print(f"[{report.seconds:4.0f} s] {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
