"""Invariance on an H200: what a request's bits depend on, and what it costs that they depend on nothing.

``distinct`` counts the different results of one request next to 11 sets of companions (none; 1, 3, 7, 15 or 63 others
in front of it or behind it), for every installed backend that can run, without and with the levels that it claims. 1 is
the goal.

``decode`` times one decode layer in a CUDA graph without and with levels. Calls in a graph cycle over enough layers
that none finds its rows in L2. Both sides alternate within a run, and ``ratio`` is the time with levels divided by that
without.

``--smoke`` counts results of a tiny case on a CPU with torch_native.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import pkgutil
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_clock import capture, device_us
from gpu_report import Report, attempt, describe
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    DType,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    Problem,
    Role,
)
from attnplug.contract.batch import BatchPlan
from attnplug.host import HostContext, KVPools, Limits, MLADims, WorkspaceOwner, load_registry, plan_forward

WHAT = "distinct results of one request among 11 sets of companions, and decode times without and with levels, µs"
PACKAGES = ("torch", "triton", "attnplug", "attnplug-triton-mha", "attnplug-triton-mla", "flashinfer-python")
PAGE, ROUNDS, CALLS = 64, 8, 4
COLD_BYTES, MOST_LAYERS = 200 << 20, 6
COMPANIONS = (0, 1, 3, 7, 15, 63)
POINTS = ((776, 1), (4999, 1), (39999, 1), (3000, 100), (900, 900))
"""Cached and new rows of the request. One new row is decoded."""
REQUESTS, LENGTHS = (1, 4, 16, 64, 256), (1024, 4096, 16384, 65536)
MOST_BYTES = 40 << 30
"""Cache of the largest timed case."""
MLA_DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)


@dataclass(frozen=True)
class Shape:
    """One layer shape: GQA, or MLA with ``heads`` of one rank."""

    kind: str
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    mla: MLADims = MLA_DIMS

    def __str__(self) -> str:
        return f"GQA {self.heads}/{self.kv_heads}" if self.kind == "mha" else f"MLA {self.heads} heads"

    @property
    def q_dim(self) -> int:
        return self.head_dim if self.kind == "mha" else self.mla.row_dim

    @property
    def row_bytes(self) -> int:
        return 4 * self.kv_heads * self.head_dim if self.kind == "mha" else 2 * self.mla.row_dim

    def layer(self, number: int) -> LayerSpec:
        if self.kind == "mha":
            dims = self.heads, self.kv_heads, self.head_dim, self.head_dim
            return LayerSpec(number, AttentionKind.MHA, *dims, self.head_dim**-0.5)
        width = self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        dims = self.heads, self.heads, width, self.mla.qk_nope_head_dim
        return LayerSpec(number, AttentionKind.MLA, *dims, width**-0.5, mla=self.mla)


SHAPES = (Shape("mha", 32), Shape("mla", 16), Shape("mla", 128))


class Bench:
    """Caches of random rows, and backends over them."""

    def __init__(self, shape: Shape, device: torch.device, pages: int, layers: int, limits: Limits) -> None:
        self.shape, self.device, self.pages, self.limits = shape, device, pages, limits
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.layers = tuple(shape.layer(number) for number in range(layers))
        self.model = ModelSpec("benchmark", "benchmark", self.layers, limits.max_context)
        sizes: dict[str, Any] = {"num_pages": pages, "page_size": PAGE, "dtype": self.kv_dtype, "device": device}
        pool: Any = (MHAPool if shape.kind == "mha" else MLAPool)(self.layers, **sizes)
        for layer in self.layers:
            parts = pool.parts(layer.layer_id)
            for tensor in [part for each in parts for part in each] if shape.kind == "mha" else parts:
                tensor.normal_()
        self.pools = KVPools(mha=pool) if shape.kind == "mha" else KVPools(mla=pool)

    @property
    def kv_dtype(self) -> DType:
        return DType.FLOAT32 if self.device.type == "cpu" else DType.BFLOAT16

    def problem(self, levels: frozenset[str]) -> Problem:
        sm = None
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            sm = 10 * major + minor
        return Problem(self.model, self.device.type, sm, self.kv_dtype, self.kv_dtype, invariant=levels)

    def build(self, name: str, levels: frozenset[str]) -> AttentionBackend:
        spec = load_registry().backends[name].spec
        host = HostContext(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=str(self.kv_dtype),
            page_size=PAGE,
            limits=self.limits,
            pools=self.pools,
            workspace=WorkspaceOwner(),
        )
        roles = frozenset({Role.PREFILL, Role.DECODE})
        context = host.for_backend(name, spec.capabilities, roles=roles, invariant=levels)
        backend: AttentionBackend = pkgutil.resolve_name(spec.factory)(context)
        return backend

    def queries(self, rows: int, seed: int) -> Tensor:
        numbers = torch.Generator(self.device).manual_seed(seed)
        shape = rows, self.shape.heads, self.shape.q_dim
        return torch.randn(*shape, generator=numbers, device=self.device).to(self.dtype)


def companion_sets(before: int, new: int) -> Iterator[tuple[list[tuple[int, int]], bool]]:
    """Cached and new rows of the companions, and True if they stand in front of the request."""
    chance = random.Random(before)
    for count in COMPANIONS:
        for ahead in (True, False) if count else (True,):
            yield [(chance.randint(0, 3000), 1 if new == 1 else chance.randint(1, 200)) for _ in range(count)], ahead


def distinct(bench: Bench, name: str, levels: frozenset[str], point: tuple[int, int]) -> int:
    """Return the number of different results of one request."""
    backend, (before, new), found = bench.build(name, levels), point, set()
    q = bench.queries(new, 1)
    own = torch.arange(-(-(before + new) // PAGE), dtype=torch.int32)
    for others, ahead in companion_sets(before, new):
        given = [*others, point] if ahead else [point, *others]
        place = len(others) if ahead else 0
        width = max(-(-sum(each) // PAGE) for each in given)
        table = torch.randint(len(own), bench.pages, (len(given), width), dtype=torch.int32)
        table[place, : len(own)] = own
        news, totals = [each[1] for each in given], [sum(each) for each in given]
        mode = ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND
        batch = ForwardBatch(Geometry.of_lengths(mode, table.to(bench.device), news, totals, PAGE))
        rows = bench.queries(sum(news), 2)
        start = sum(news[:place])
        rows[start : start + new] = q
        plan_forward(backend, batch)
        lse = None
        if "lse" in backend.claims.extras:
            lse = torch.zeros(len(rows), bench.shape.heads, device=bench.device)
        run = backend.forward_decode if new == 1 else backend.forward_extend
        extras = None if lse is None else ForwardExtras(lse=lse)
        out = run(rows, None, None, bench.layers[0], batch, save_kv_cache=False, extras=extras)
        bits = hashlib.sha256()
        for result in (out, lse):
            if result is not None:
                bits.update(result[start : start + new].float().cpu().numpy().tobytes())
        found.add(bits.digest())
    return len(found)


def count_results(
    shape: Shape, device: torch.device, points: tuple[tuple[int, int], ...], report: Report, limit: float
) -> dict[str, Any]:
    """Count results of all backends that serve the shape, without and with the levels that each claims."""
    longest = max(sum(point) for point in points)
    requests = max(COMPANIONS) + 1
    limits = Limits(requests, requests * 200 + longest, max(longest, 3200))
    bench = Bench(shape, device, -(-longest // PAGE) + 512, 1, limits)
    found: dict[str, Any] = {}
    backends = load_registry().backends
    for name in sorted(backends, key=lambda name: (not name.startswith(("triton", "torch")), name)):  # libraries last
        spec = backends[name].spec
        for levels in dict.fromkeys((frozenset[str](), spec.capabilities.invariant)):
            label, counts = name if not levels else f"{name}, {' '.join(sorted(levels))}", {}
            for before, new in points:
                role = Role.DECODE if new == 1 else Role.PREFILL
                if spec.refusals(bench.problem(levels), role, None) or report.seconds > limit:
                    continue
                counts[f"{before} + {new}"] = attempt(partial(distinct, bench, name, levels, (before, new)))
            if counts:
                found[label] = counts
                print(f"[{report.seconds:4.0f} s] {shape}, {label}: {counts}", flush=True)
    return found


def decode_times(shape: Shape, device: torch.device, requests: int, length: int) -> dict[str, Any]:
    """Time a decode of ``requests`` x ``length`` without and with levels, in graphs that alternate."""
    name, nbytes = f"triton_{shape.kind}", requests * length * shape.row_bytes
    layers = min(max(-(-COLD_BYTES // nbytes), 1), MOST_LAYERS)
    pages = length // PAGE
    bench = Bench(shape, device, requests * pages, layers, Limits(requests, requests, length))
    table = torch.randperm(requests * pages, device=device).view(requests, pages).int()
    geometry = Geometry.of_lengths(ForwardMode.DECODE, table, [1] * requests, [length] * requests, PAGE)
    q, replays = bench.queries(requests, 1), {}
    kept = []  # graphs read the memory of backends and batches
    for label, levels in (("default", frozenset[str]()), ("invariant", _claims(name))):
        backend = bench.build(name, levels)
        backend.init_cuda_graph_state(requests, requests)
        batch = ForwardBatch(replace(geometry, host=None, captured=True))
        batch.plan = BatchPlan(backend.init_forward_metadata_out_graph(batch, in_capture=True))
        backend.init_forward_metadata_in_graph(batch)
        count = max(CALLS, layers)

        def body(backend: AttentionBackend = backend, batch: ForwardBatch = batch, count: int = count) -> Tensor:
            for number in range(count):
                out = backend.forward_decode(q, None, None, bench.layers[number % layers], batch, save_kv_cache=False)
            return out

        graph, out = capture(body)
        kept.append((backend, batch, graph, out))
        replays[label] = graph.replay
    times = device_us(replays, ROUNDS, lambda: torch.cuda._sleep(100_000))
    found: dict[str, Any] = {label: us / max(CALLS, layers) for label, us in times.items()}
    memory = kept[1][0].context.workspace.nbytes
    return found | {"ratio": found["invariant"] / found["default"], "layers": layers, "workspace_bytes": memory}


def _claims(name: str) -> frozenset[str]:
    return load_registry().backends[name].spec.capabilities.invariant


def measure_times(device: torch.device, report: Report, limit: float) -> None:
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        for requests in REQUESTS:
            for shape in SHAPES:
                if requests * length * shape.row_bytes > MOST_BYTES:
                    continue
                case = {"shape": str(shape), "requests": requests, "length": length}
                if report.seconds > limit:
                    print(f"{case}: left out, {report.seconds:.0f} s are over", flush=True)
                    continue
                found = attempt(partial(decode_times, shape, device, requests, length))
                rows.append(case | found)
                report.put("decode", rows)
                words = ", ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float))
                print(f"[{report.seconds:4.0f} s] {shape}, {requests} x {length}: {words or found}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()


def smoke(report: Report) -> None:
    """Count results of tiny cases on a CPU."""
    dims = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)
    shapes = Shape("mha", 4, 2, 16), Shape("mla", 4, mla=dims)
    points, device = ((70, 1), (40, 20)), torch.device("cpu")
    report.put("distinct", {shape.kind: count_results(shape, device, points, report, 60) for shape in shapes})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("distinct", "decode"), default=["distinct", "decode"])
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument("--commit", metavar="TEXT", help="what was measured")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which no further case begins")
    parser.add_argument("--smoke", action="store_true", help="a tiny case on a CPU")
    given = parser.parse_args(arguments)
    with torch.inference_mode():
        if given.smoke:
            smoke(Report(given.out, {"what": WHAT}))
            return
        if not torch.cuda.is_available():
            sys.exit("invariance_h200 measures kernels of an NVIDIA GPU, and torch sees none here; --smoke needs none")
        device, report = torch.device("cuda", 0), Report(given.out, describe(WHAT, PACKAGES, given.commit))
        report.put("shapes", [asdict(shape) for shape in SHAPES])
        if "distinct" in given.parts:
            found = {}
            for shape in SHAPES[:2]:
                found[str(shape)] = attempt(partial(count_results, shape, device, POINTS, report, given.limit / 2))
                report.put("distinct", found)
        if "decode" in given.parts:
            measure_times(device, report, given.limit)


if __name__ == "__main__":
    main()
