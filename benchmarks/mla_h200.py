"""MLA on an H200: our backends against FlashInfer and FlashMLA, called directly, in the same run.

- Decode over the grid of shapes that the raw kernels were measured with. On the device: eager, and in CUDA graphs of 20
  calls over four layers' caches. On the host: overhead of a call over the library's own, and planning time, idle and
  while the device is busy, when a plan that synchronizes takes milliseconds.
- triton_mla and both libraries, in graphs in which every call reads a cache that is not in L2.
- Prefill as MHA.
- Memory of a chunked prefill over long prefixes, next to the same prefill in one shot.

Raw and ours alternate. Only ratios within one run count, and ``raw_again`` shows their noise. A case that fails is
reported with its error. Results are written as soon as they are available.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from gpu_clock import Call, capture, device_us, host_us, medians, sync_error, while_busy
from gpu_report import Report, attempt, describe
from mla_report import errors, print_report
from mla_sides import (
    CALLS,
    CAPACITY,
    DECODE,
    DIMS,
    FLASHINFER,
    FLASHMLA,
    HOST_CALLS,
    LAYERS,
    MAX_CONTEXT,
    MEMORY,
    NEW,
    PACKAGES,
    PAGE,
    PREFILL,
    QK_DIM,
    QUICK_DECODE,
    QUICK_PREFILL,
    REPLAYS,
    V_DIM,
    Case,
    Ours,
    Pair,
    RawPrefill,
    Rig,
    decode_bytes,
    difference,
    missing_flashmla,
    prefill_flops,
    random,
    ratios,
    rotating_layers,
)
from torch import Tensor
from torch.nn.functional import pad

from attnplug import ExtendPath, ForwardBatch
from attnplug.contract.batch import BatchPlan
from attnplug.host import ExtendPolicy, KVPools, MLAWeights, ModelAttention

WHAT = (
    "flashinfer_mla and flashmla against their libraries called directly, triton_mla beside both; bf16, kv_lora 512 + "
    "rope 64, pages of 64; medians"
)
SECTIONS = ("decode", "flashmla", "triton", "prefill", "memory")

# Cases


class Decode:
    """One decode case: both sides of a pair on the same queries and caches."""

    def __init__(self, case: Case, rig: Rig, pair: Pair = FLASHINFER) -> None:
        self._case, self._rig, self._pair = case, rig, pair
        self._ours = Ours(case, rig.device, LAYERS, pair.name)
        self._backend = self._ours.backend
        self._q = random(case.requests, case.heads, DIMS.row_dim, device=rig.device)
        self._rows = random(case.requests, 1, DIMS.row_dim, device=rig.device)
        self._batch = self._ours.batch()
        self._batch.plan = BatchPlan(self._backend.init_forward_metadata(self._batch))
        self._raw = pair.raw(self._ours, self._q, rig, False)

    @cached_property
    def _raw_in_graph(self) -> Any:
        return self._pair.raw(self._ours, self._q, self._rig, True)

    @cached_property
    def _captured(self) -> ForwardBatch:
        """A batch planned for a graph, its page indices in place."""
        self._backend.init_cuda_graph_state(self._case.requests, self._case.requests)
        batch = self._ours.batch(captured=True)
        batch.plan = BatchPlan(self._backend.init_forward_metadata_out_graph(batch, in_capture=True))
        self._backend.init_forward_metadata_in_graph(batch)
        return batch

    def _call(self, batch: ForwardBatch, *, write: bool = False) -> Callable[[int], Tensor]:
        forward, layers, q = self._backend.forward_decode, self._ours.layers, self._q
        rows = self._rows if write else None
        return lambda number: forward(q, rows, None, layers[number % LAYERS], batch, save_kv_cache=write)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"eager": self.eager, "host": self.host, "plan": self.planning, "graph": self.graphs}

    def eager(self) -> dict[str, Any]:
        """One call on the device, with the cache not in L2."""
        raw, ours, writing = self._raw.run, self._call(self._batch), self._call(self._batch, write=True)
        off = difference(ours(0), raw(0))
        calls = {"raw": lambda: raw(0), "ours": lambda: ours(0), "ours_writing": lambda: writing(0)}
        us = device_us(calls, REPLAYS, self._rig.cold)
        return {"us": us, "ratio": ratios(us), "difference": off}

    def host(self) -> dict[str, Any]:
        """Host time of one call, and our overhead over the library's."""
        ours = {"ours": self._call(self._batch), "ours_writing": self._call(self._batch, write=True)}
        rounds = host_us({"raw": self._raw.run, **ours}, 20, HOST_CALLS)
        added = {name: [a - b for a, b in zip(rounds[name], rounds["raw"], strict=True)] for name in ours}
        return {"us": medians(rounds), "added_us": medians(added)}

    def planning(self) -> dict[str, Any]:
        """Plans on the host: the library's from device tensors, as an engine has them, ours as the batch has them."""
        captured, plan, replan = (
            self._captured,
            self._backend.init_forward_metadata,
            self._backend.init_forward_metadata_out_graph,
        )
        calls: dict[str, Call] = {
            "stock": self._raw.plan,
            "stock_in_graph": self._raw_in_graph.plan,
            "ours": lambda _: plan(self._batch),
            "ours_replay": lambda _: replan(captured),
        }
        return {
            "us": medians(host_us(calls, 50, 1)),
            "busy": {name: while_busy(call, self._rig.load) for name, call in calls.items()},
            "torch_complains": {name: sync_error(call) for name, call in calls.items()},
        }

    def graphs(self) -> dict[str, Any]:
        """A call inside a graph of 20: with the kernel that plans in the graph, without it, and with the KV write."""
        batch, library = self._captured, self._raw_in_graph
        ours, writing = self._call(batch), self._call(batch, write=True)

        def plan() -> None:
            self._backend.init_forward_metadata_in_graph(batch)

        def repeated(call: Callable[[int], Tensor], begin: Callable[[], None] | None = None) -> Callable[[], Tensor]:
            def body() -> Tensor:
                if begin is not None:
                    begin()
                for number in range(CALLS):
                    out = call(number)
                return out

            return body

        bodies = {
            "raw": repeated(library.run, library.begin),
            "ours": repeated(ours, plan),
            "ours_calls_only": repeated(ours),
            "ours_writing": repeated(writing, plan),
            "raw_again": repeated(library.run, library.begin),
        }
        captured = {name: capture(body) for name, body in bodies.items()}
        replays = {name: graph.replay for name, (graph, _) in captured.items()}
        us = {name: value / CALLS for name, value in device_us(replays, REPLAYS, self._rig.warm).items()}
        off = {name: difference(out, captured["raw"][1]) for name, (_, out) in captured.items() if name != "raw"}
        rate = decode_bytes(self._case) / us["ours"] / 1e3
        return {"us": us, "ratio": ratios(us), "difference": off, "gb_per_s": rate}


class Rotating:
    """One decode case over caches that are not in L2, as in a model with many layers: triton_mla and both
    libraries."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._case, self._rig, self._layers = case, rig, rotating_layers(case)
        self._ours = Ours(case, rig.device, self._layers, "triton_mla")
        invariant = self._ours.build("triton_mla", frozenset({"run", "batch"}))
        self._backends = {"triton": self._ours.backend, "triton_invariant": invariant}
        self._q = random(case.requests, case.heads, DIMS.row_dim, device=rig.device)
        self._rows = random(case.requests, 1, DIMS.row_dim, device=rig.device)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"graph": self.graphs, "host": self.host}

    def _side(self, backend: Any, *, writing: bool = False, room: int = 0) -> Callable[[], Tensor]:
        """A step of 20 layers: the kernel that plans, then the calls.

        ``room``: width of the page table in tokens. ``writing``: each call stores its new rows first.
        """
        backend.init_cuda_graph_state(self._case.requests, self._case.requests)
        batch, layers = self._ours.batch(captured=True), self._ours.layers
        table = batch.geometry.page_table
        wide = pad(table, (0, max(room // PAGE - table.shape[1], 0)))
        batch.geometry = replace(batch.geometry, page_table=wide)
        batch.plan = BatchPlan(backend.init_forward_metadata_out_graph(batch, in_capture=True))
        rows = self._rows if writing else None

        def body() -> Tensor:
            backend.init_forward_metadata_in_graph(batch)
            for number in range(CALLS):
                layer = layers[number % self._layers]
                out: Tensor = backend.forward_decode(self._q, rows, None, layer, batch, save_kv_cache=writing)
            return out

        return body

    def _library(self, raw: Any) -> Callable[[], Tensor]:
        def body() -> Tensor:
            raw.begin()
            for number in range(CALLS):
                out: Tensor = raw.run(number)
            return out

        return body

    def graphs(self) -> dict[str, Any]:
        bodies = {"flashinfer": self._library(FLASHINFER.raw(self._ours, self._q, self._rig, True))}
        if missing_flashmla() is None:
            bodies["flashmla"] = self._library(FLASHMLA.raw(self._ours, self._q, self._rig, True))
        bodies |= {name: self._side(backend) for name, backend in self._backends.items()}
        bodies["triton_again"] = bodies["triton"]
        bodies["triton_room"] = self._side(self._ours.build("triton_mla"), room=MAX_CONTEXT)
        bodies["triton_writing"] = self._side(self._ours.build("triton_mla"), writing=True)
        captured = {name: capture(body) for name, body in bodies.items()}
        replays = {name: graph.replay for name, (graph, _) in captured.items()}
        us = {name: value / CALLS for name, value in device_us(replays, REPLAYS, self._rig.cold).items()}
        off = {name: difference(out, captured["flashinfer"][1]) for name, (_, out) in captured.items()}
        best = min(us[name] for name in ("flashinfer", "flashmla") if name in us)
        floor = decode_bytes(self._case) / 4.2e6
        return {"us": us, "ratio": {"best": us["triton"] / best}, "difference": off, "floor_us": floor}

    def host(self) -> dict[str, Any]:
        """A call on the host, with and without writing, and the plan of a batch that is not captured."""
        backend, layers, batch = self._ours.backend, self._ours.layers, self._ours.batch()
        batch.plan = BatchPlan(backend.init_forward_metadata(batch))

        def call(number: int, rows: Tensor | None = None) -> Tensor:
            layer = layers[number % self._layers]
            out: Tensor = backend.forward_decode(self._q, rows, None, layer, batch, save_kv_cache=rows is not None)
            return out

        calls: dict[str, Call] = {"call": call, "writing": lambda number: call(number, self._rows)}
        plans: dict[str, Call] = {"plan": lambda _: backend.init_forward_metadata(batch)}
        return {"us": medians(host_us(calls, 20, HOST_CALLS) | host_us(plans, 30, 1))}


class Prefill:
    """One prefill without prefix, as MHA: both sides on the same queries, keys and values."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._case, self._rig = case, rig
        self._ours = Ours(case, rig.device, 1)
        policy = ExtendPolicy(forced=ExtendPath.ONE_SHOT)
        self._attention = ModelAttention(self._ours.backend, KVPools(mla=self._ours.pool), policy)
        self._batch = self._ours.batch(case.length)
        self._attention.plan(self._batch)
        rows = case.requests * case.length
        self._q, self._k, self._v = (
            random(rows, case.heads, dim, device=rig.device) for dim in (QK_DIM, QK_DIM, V_DIM)
        )
        self._raw = RawPrefill(case, rig.scratch)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"eager": self.eager, "plan": self.planning}

    def eager(self) -> dict[str, Any]:
        (call,), planned = self._batch.geometry.calls, self._batch.plan
        assert planned is not None
        forward, (layer,) = self._ours.backend.forward_ragged, self._ours.layers

        def raw() -> Tensor:
            return self._raw.run(self._q, self._k, self._v)

        def ours() -> Tensor:
            out: Tensor = forward(self._q, self._k, self._v, layer, call, planned.chunks)
            return out

        off = difference(ours(), raw())
        us = device_us({"raw": raw, "ours": ours, "raw_again": raw}, REPLAYS, self._rig.cold)
        rate = {name: prefill_flops(self._case) / value / 1e6 for name, value in us.items()}
        return {"us": us, "ratio": ratios(us), "tflop_per_s": rate, "difference": off}

    def planning(self) -> dict[str, Any]:
        """``ours`` plans FlashInfer's call; ``ours_prepare`` is all that a batch takes, including the slots of its
        rows."""
        other, plan = self._ours.batch(self._case.length), self._ours.backend.init_mha_chunk_metadata
        calls: dict[str, Call] = {
            "stock": self._raw.plan,
            "ours": lambda _: plan(self._batch),
            "ours_prepare": lambda _: self._attention.plan(other),
        }
        return {
            "us": medians(host_us(calls, 30, 1)),
            "busy": {name: while_busy(call, self._rig.load) for name, call in calls.items()},
        }


class Memory:
    """One layer's prefill after long prefixes: device memory of the chunked and the one-shot path."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._rig, heads, rank = rig, case.heads, DIMS.kv_lora_rank
        self._ours = Ours(case, rig.device, 1)
        tokens = case.requests * NEW
        self._q = random(tokens, heads, QK_DIM, device=rig.device)
        self._rows = random(tokens, DIMS.row_dim, device=rig.device)
        self._weights = MLAWeights(
            random(heads, DIMS.qk_nope_head_dim, rank, device=rig.device) * rank**-0.5,
            random(heads, rank, V_DIM, device=rig.device) * rank**-0.5,
        )
        self._runs: dict[str, Callable[[], Tensor]] = {}
        self._outs: dict[str, Tensor] = {}

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        paths = (ExtendPath.CHUNKED, ExtendPath.ONE_SHOT)
        return {
            "memory": self.memory,
            **{str(path): partial(self.peak, path) for path in paths},
            "time": self.timing,
        }

    def memory(self) -> dict[str, Any]:
        """Memory that is always allocated: ``backend_bytes`` is all that building the backend took, workspace
        included."""
        return {
            "workspace": [asdict(use) for use in self._ours.workspace.report()],
            "workspace_bytes": self._ours.workspace.nbytes,
            "backend_bytes": self._ours.backend_bytes,
            "pool_bytes": self._ours.pool.nbytes,
        }

    def peak(self, path: ExtendPath) -> dict[str, Any]:
        """Bytes that preparing a batch leaves on the device, and the peak that one layer adds."""
        policy = ExtendPolicy(chunk_capacity=CAPACITY, forced=path)
        attention = ModelAttention(self._ours.backend, KVPools(mla=self._ours.pool), policy)
        batch = self._ours.batch(NEW)
        (layer,) = self._ours.layers
        before = torch.cuda.memory_allocated()
        attention.plan(batch)
        prepared = torch.cuda.memory_allocated() - before

        def run() -> Tensor:
            return attention.attend_mla(self._q, self._rows, layer, self._weights, batch)

        run()  # cuBLAS allocates its workspace at the first call
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run()
        torch.cuda.synchronize()
        found = {
            "calls": len(batch.geometry.calls),
            "prepared_bytes": prepared,
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
        }
        self._runs[str(path)], self._outs[str(path)] = run, out
        return found

    def timing(self) -> dict[str, Any]:
        us = device_us(self._runs, 5, self._rig.cold)
        outs = list(self._outs.values())
        return {"us": us, "difference": difference(outs[0], outs[1]) if len(outs) == 2 else None}


# The run


def measure_case(make: Callable[[Case, Rig], Any], case: Case, rig: Rig) -> dict[str, Any]:
    bench = attempt(lambda: make(case, rig))
    if isinstance(bench, dict):
        return bench
    return {name: attempt(part) for name, part in bench.parts().items()}


def measure_all(
    name: str, make: Callable[[Case, Rig], Any], cases: Iterable[Case], rig: Rig, report: Report, limit: float
) -> None:
    rows: list[dict[str, Any]] = []
    for case in cases:
        found = {"error": f"not begun: {limit:.0f} s were over"}
        if report.seconds < limit:
            found = measure_case(make, case, rig)
            gc.collect()
            attempt(torch.cuda.empty_cache)
        rows.append({**asdict(case), **found})
        report.put(name, rows)
        print(f"[{report.seconds:5.0f} s] {name} {case}: {', '.join(errors(found)) or 'done'}", flush=True)


def compile_kernels(rig: Rig, sections: Collection[str]) -> dict[str, Any]:
    """Seconds until each measured module of FlashInfer is available, compiled if no cache has it."""
    found = {}
    made_by: dict[str, Callable[[], Any]] = {
        "import": lambda: __import__("flashinfer"),
        "decode": lambda: Decode(Case(16, 1, PAGE), rig),
    }
    if not {"prefill", "memory"}.isdisjoint(sections):
        made_by["prefill"] = lambda: Prefill(Case(16, 1, PAGE), rig)
    for name, make in made_by.items():
        started = time.monotonic()
        made = attempt(make)
        found[name] = made if isinstance(made, dict) else time.monotonic() - started
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="two decode cases and one prefill, in about a minute")
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, help="what to measure")
    parser.add_argument("--limit", type=float, default=330, help="seconds after which no further case begins")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("mla_h200 measures kernels of an NVIDIA Hopper GPU, and torch sees no CUDA device here")
    if torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"mla_h200 measures kernels for SM 90, and this is a {torch.cuda.get_device_name()}")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    torch.manual_seed(0)
    report = Report(arguments.json, describe(WHAT, PACKAGES, arguments.commit))
    with torch.inference_mode():
        rig = Rig(torch.device("cuda", 0))
        report.put("ceilings", attempt(rig.ceilings))
        report.put("compile_s", compile_kernels(rig, arguments.sections))
        decode, prefill = (QUICK_DECODE, QUICK_PREFILL) if arguments.quick else (DECODE, PREFILL)
        if missing := missing_flashmla():
            print(missing, flush=True)
            report.put("flashmla_left_out", missing)
        sections: dict[str, tuple[Callable[[Case, Rig], Any], Iterable[Case]]] = {
            "decode": (Decode, decode),
            "flashmla": (partial(Decode, pair=FLASHMLA), () if missing else decode),
            "triton": (Rotating, decode),
            "prefill": (Prefill, prefill),
            # Last, in ascending order: if one makes the device unusable, no other case is lost.
            "memory": (Memory, () if arguments.quick else MEMORY),
        }
        for name in SECTIONS:
            if name in arguments.sections:
                measure_all(name, *sections[name], rig, report, arguments.limit)
    print_report(report.found)


if __name__ == "__main__":
    main()
