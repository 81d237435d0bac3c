"""MLA on an H200: the flashinfer_mla backend against FlashInfer called directly, over the same caches, in the same run.

Decode over the grid of the raw kernels' marks: on the device, eager and in CUDA graphs of 20 calls over four layers'
caches; on the host, what a call takes beyond FlashInfer's own, and what planning takes, idle and while the device is
busy, where a plan that waits shows as milliseconds. Prefill as MHA. Memory of a chunked prefill over long prefixes next
to the same in one shot. Raw and ours take turns; ratios of one run are what counts, and ``raw_again`` is their noise.
A case that fails has its error in its place. Every result is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendContext,
    DType,
    ExtendPath,
    ExtendPolicy,
    ForwardBatch,
    ForwardMode,
    KVPools,
    LayerSpec,
    Limits,
    MLAAttention,
    MLADims,
    MLAPool,
    MLAWeights,
    ModelSpec,
    Role,
    WorkspaceOwner,
)
from attnplug_flashinfer_mla.backend import FlashInferMLABackend

PAGE = 64
DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
QK_DIM, V_DIM = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim, 128
SCALE = QK_DIM**-0.5
DTYPE = torch.bfloat16
KERNEL = "fa3"
MAX_CONTEXT = 131072
SCRATCH_BYTES = 128 << 20
"""What FlashInfer recommends, and our backend's default."""

LAYERS = 4
CALLS = 20
"""Calls in a graph, over the layers in turn."""
REPLAYS = 30
HOST_CALLS = 50
"""Calls between two looks at the clock: too few to fill the launch queue, where the host would wait for the device."""
NEW, PREFIX, CAPACITY = 512, 32768, 16384
PACKAGES = ("torch", "triton", "flashinfer-python", "attnplug", "attnplug-engine", "attnplug-flashinfer-mla")

Call = Callable[[int], object]
"""Takes the number of the call, which says whose layer's cache is read."""


@dataclass(frozen=True)
class Case:
    """Equally long requests."""

    heads: int
    requests: int
    length: int

    def __str__(self) -> str:
        return f"{self.heads:>3} heads {self.requests:>3} × {self.length:<5}"


GRID = ((1, 1024), (1, 4096), (1, 16384), (1, 65536), (4, 4096), (16, 4096), (64, 4096), (128, 8192), (256, 2048))
DECODE = tuple(Case(heads, *shape) for heads in (16, 128) for shape in GRID)
PREFILL = (Case(128, 1, 4096), Case(16, 4, 4096), Case(16, 1, 16384), Case(16, 16, 1024))
MEMORY = tuple(Case(heads, 4, PREFIX + NEW) for heads in (16, 128))
QUICK_DECODE, QUICK_PREFILL = (Case(16, 1, 4096), Case(128, 64, 4096)), (Case(16, 4, 4096),)


def causal_pairs(new: int, total: int) -> int:
    """(query, key) pairs of one request and head whose ``new`` queries are the last of ``total`` rows."""
    return new * total - new * (new - 1) // 2


def prefill_flops(case: Case) -> int:
    return case.heads * case.requests * causal_pairs(case.length, case.length) * 2 * (QK_DIM + V_DIM)


def decode_bytes(case: Case) -> int:
    """Cache rows, queries and outputs, each moved once."""
    rows = case.length * DIMS.row_dim + case.heads * (DIMS.row_dim + DIMS.kv_lora_rank)
    return case.requests * rows * DTYPE.itemsize


def ratios(times: Mapping[str, float], to: str = "raw") -> dict[str, float]:
    return {name: value / times[to] for name, value in times.items() if name != to}


def difference(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


# Clocks


class Rig:
    """What all cases share: the device, scratch memory for the raw wrappers, and work that keeps the device busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._left, self._right = (random(8192, 8192, device=device) for _ in range(2))
        self._product = torch.empty_like(self._left)

    def warm(self) -> None:
        """Hold the device for 0.2 ms, in which the host gets ahead: launches then cost the device nothing."""
        torch.cuda._sleep(400_000)

    def cold(self) -> None:
        """The same, with the L2 cache emptied."""
        self._flush.zero_()
        self.warm()

    def multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._product)

    def load(self) -> None:
        """About 6 ms of work."""
        for _ in range(4):
            self.multiply()

    def ceilings(self) -> dict[str, float]:
        """Bandwidth of a large copy, read and written counted, and the rate of an 8192³ bf16 product."""
        source = random(1 << 30, device=self.device)
        target = torch.empty_like(source)
        us = device_us({"copy": lambda: target.copy_(source), "product": self.multiply}, 20, self.warm)
        moved = 2 * source.numel() * source.element_size()
        return {"copy_gb_per_s": moved / us["copy"] / 1e3, "matmul_tflop_per_s": 2 * 8192**3 / us["product"] / 1e6}


def device_us(calls: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], None]) -> dict[str, float]:
    """Median microseconds of calls on the device, which take turns, forth and back; ``before`` runs untimed."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        marks = {}
        for name in list(calls)[:: -1 if number % 2 else 1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            calls[name]()
            end.record()
            marks[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in marks.items():
            times[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def host_us(calls: Mapping[str, Call], rounds: int, count: int) -> dict[str, list[float]]:
    """Microseconds of the host for a call, of each round: ``count`` calls in a row that nobody waits for, in turns."""
    for call in calls.values():
        call(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for number in range(count):
                call(number)
            times[name].append(1e6 * (time.perf_counter() - started) / count)
    torch.cuda.synchronize()
    return times


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def while_busy(call: Call, load: Callable[[], None], rounds: int = 10) -> dict[str, Any]:
    """Host microseconds of a call behind queued work, and whether that work was always still running afterwards."""
    call(0)
    times, running = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        load()
        done = torch.cuda.Event()
        done.record()
        started = time.perf_counter()
        call(0)
        times.append(1e6 * (time.perf_counter() - started))
        running.append(not done.query())
    torch.cuda.synchronize()
    return {"median_us": statistics.median(times), "max_us": max(times), "device_still_busy": all(running)}


def complaint_of_torch(call: Call) -> str | None:
    """What torch's own check for synchronising operations says of a call; None where it finds none."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(0)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def capture(body: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``body``, run once before so that nothing is compiled or loaded in it; and where its result lies."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = body()
    return graph, out


# Both sides


class Ours:
    """Our backend over caches of random rows in random pages."""

    def __init__(self, case: Case, device: torch.device, layers: int) -> None:
        self.case, self.device = case, device
        width = -(-case.length // PAGE)
        pages = case.requests * width
        self.page_table = torch.randperm(pages).view(case.requests, width).int().to(device)
        self.layers = tuple(
            LayerSpec(number, AttentionKind.MLA, case.heads, case.heads, QK_DIM, V_DIM, SCALE, mla=DIMS)
            for number in range(layers)
        )
        self.pool = MLAPool(self.layers, num_pages=pages, page_size=PAGE, dtype=DType.BFLOAT16, device=device)
        for layer in self.layers:
            self.pool.rows(layer.layer_id).normal_()
        self.workspace = WorkspaceOwner()
        before = torch.cuda.memory_allocated()
        self.backend = FlashInferMLABackend(
            BackendContext(
                name="flashinfer_mla",
                roles=frozenset({Role.PREFILL, Role.DECODE}),
                model=ModelSpec("benchmark", "benchmark", self.layers, MAX_CONTEXT),
                device=device,
                dtype=DTYPE,
                kv_dtype=DType.BFLOAT16,
                page_size=PAGE,
                limits=Limits(case.requests, case.requests * case.length, MAX_CONTEXT),
                pools=KVPools(mla=self.pool),
                workspace=self.workspace,
            )
        )
        self.backend_bytes = torch.cuda.memory_allocated() - before

    def batch(self, new: int | None = None) -> ForwardBatch:
        """Each request's last ``new`` rows extend it; without a number its last row is decoded."""
        requests = self.case.requests
        lens = torch.full((requests,), self.case.length, dtype=torch.int32)
        news = None if new is None else torch.full((requests,), new, dtype=torch.int32)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if new is None else ForwardMode.EXTEND,
            input_ids=torch.zeros(requests * (new or 1), dtype=torch.int64, device=self.device),
            page_table=self.page_table,
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            extend_seq_lens=None if news is None else news.to(self.device),
            extend_seq_lens_cpu=news,
        )


class RawDecode:
    """FlashInfer's paged wrapper over the caches of our pool, planned and called as its documentation does."""

    def __init__(self, ours: Ours, q: Tensor, scratch: Tensor, *, graph: bool) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        case, device, rank = ours.case, ours.device, DIMS.kv_lora_rank
        counts = torch.arange(case.requests + 1, dtype=torch.int32, device=device)
        self._arrays = {
            "qo_indptr": counts,
            "kv_indptr": counts * ours.page_table.shape[1],
            "kv_indices": ours.page_table.flatten(),
            "kv_len_arr": torch.full((case.requests,), case.length, dtype=torch.int32, device=device),
        }
        reserved = {name: array.clone() for name, array in self._arrays.items()} if graph else {}
        self._wrapper = BatchMLAPagedAttentionWrapper(scratch, use_cuda_graph=graph, backend=KERNEL, **reserved)
        self._heads = case.heads
        self._q = q[..., :rank], q[..., rank:]
        rows = [ours.pool.rows(layer.layer_id).squeeze(2) for layer in ours.layers]
        self._caches = [(cache[..., :rank], cache[..., rank:]) for cache in rows]
        self.plan()

    def plan(self, _: int = 0) -> None:
        self._wrapper.plan(
            **self._arrays,
            num_heads=self._heads,
            head_dim_ckv=DIMS.kv_lora_rank,
            head_dim_kpe=DIMS.qk_rope_head_dim,
            page_size=PAGE,
            causal=False,
            sm_scale=SCALE,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

    def run(self, number: int) -> Tensor:
        out: Tensor = self._wrapper.run(*self._q, *self._caches[number % len(self._caches)])
        return out


class RawPrefill:
    """FlashInfer's ragged wrapper, likewise."""

    def __init__(self, case: Case, scratch: Tensor) -> None:
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

        self._heads = case.heads
        counts = torch.arange(case.requests + 1, dtype=torch.int32, device=scratch.device)
        self._indptr = counts * case.length
        self._wrapper = BatchPrefillWithRaggedKVCacheWrapper(scratch, kv_layout="NHD", backend=KERNEL)
        self.plan()

    def plan(self, _: int = 0) -> None:
        self._wrapper.plan(
            qo_indptr=self._indptr,
            kv_indptr=self._indptr,
            num_qo_heads=self._heads,
            num_kv_heads=self._heads,
            head_dim_qk=QK_DIM,
            head_dim_vo=V_DIM,
            causal=True,
            sm_scale=SCALE,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = self._wrapper.run(q, k, v)
        return out


# Cases


class Decode:
    """One decode case: both sides on the same queries and caches."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._case, self._rig = case, rig
        self._ours = Ours(case, rig.device, LAYERS)
        self._backend = self._ours.backend
        self._q = random(case.requests, case.heads, DIMS.row_dim, device=rig.device)
        self._rows = random(case.requests, 1, DIMS.row_dim, device=rig.device)
        self._batch = self._ours.batch()
        self._batch.plan = self._backend.init_forward_metadata(self._batch)
        self._raw = RawDecode(self._ours, self._q, rig.scratch, graph=False)

    @cached_property
    def _raw_in_graph(self) -> RawDecode:
        return RawDecode(self._ours, self._q, self._rig.scratch, graph=True)

    @cached_property
    def _captured(self) -> ForwardBatch:
        """A batch planned for a graph, its page indices in place."""
        self._backend.init_cuda_graph_state(self._case.requests, self._case.requests)
        batch = self._ours.batch()
        batch.plan = self._backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self._backend.init_forward_metadata_in_graph(batch)
        return batch

    def _call(self, batch: ForwardBatch, *, write: bool = False) -> Callable[[int], Tensor]:
        forward, layers, q = self._backend.forward_decode, self._ours.layers, self._q
        rows = self._rows if write else None
        return lambda number: forward(q, rows, None, layers[number % LAYERS], batch, save_kv_cache=write)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"eager": self.eager, "host": self.host, "plan": self.planning, "graph": self.graphs}

    def eager(self) -> dict[str, Any]:
        """One call on the device, the cache out of L2."""
        raw, ours, writing = self._raw.run, self._call(self._batch), self._call(self._batch, write=True)
        off = difference(ours(0), raw(0))
        calls = {"raw": lambda: raw(0), "ours": lambda: ours(0), "ours_writing": lambda: writing(0)}
        us = device_us(calls, REPLAYS, self._rig.cold)
        return {"us": us, "ratio": ratios(us), "difference": off}

    def host(self) -> dict[str, Any]:
        """One call on the host, and what ours adds to FlashInfer's."""
        ours = {"ours": self._call(self._batch), "ours_writing": self._call(self._batch, write=True)}
        rounds = host_us({"raw": self._raw.run, **ours}, 20, HOST_CALLS)
        added = {name: [a - b for a, b in zip(rounds[name], rounds["raw"], strict=True)] for name in ours}
        return {"us": medians(rounds), "added_us": medians(added)}

    def planning(self) -> dict[str, Any]:
        """Plans on the host: FlashInfer's from device tensors, as an engine has them, ours from lengths on the host."""
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
            "torch_complains": {name: complaint_of_torch(call) for name, call in calls.items()},
        }

    def graphs(self) -> dict[str, Any]:
        """A call inside a graph of 20: with the kernel that plans in the graph, without it, and with the KV write."""
        batch, raw = self._captured, self._raw_in_graph.run
        ours, writing = self._call(batch), self._call(batch, write=True)

        def repeated(call: Callable[[int], Tensor], *, fill: bool = False) -> Callable[[], Tensor]:
            def body() -> Tensor:
                if fill:
                    self._backend.init_forward_metadata_in_graph(batch)
                for number in range(CALLS):
                    out = call(number)
                return out

            return body

        bodies = {
            "raw": repeated(raw),
            "ours": repeated(ours, fill=True),
            "ours_calls_only": repeated(ours),
            "ours_writing": repeated(writing, fill=True),
            "raw_again": repeated(raw),
        }
        captured = {name: capture(body) for name, body in bodies.items()}
        replays = {name: graph.replay for name, (graph, _) in captured.items()}
        us = {name: value / CALLS for name, value in device_us(replays, REPLAYS, self._rig.warm).items()}
        off = {name: difference(out, captured["raw"][1]) for name, (_, out) in captured.items() if name != "raw"}
        rate = decode_bytes(self._case) / us["ours"] / 1e3
        return {"us": us, "ratio": ratios(us), "difference": off, "gb_per_s": rate}


class Prefill:
    """One prefill without prefix, as MHA: both sides on the same queries, keys and values."""

    def __init__(self, case: Case, rig: Rig) -> None:
        self._case, self._rig = case, rig
        self._ours = Ours(case, rig.device, 1)
        policy = ExtendPolicy(forced=ExtendPath.ONE_SHOT)
        self._mla = MLAAttention(self._ours.backend, self._ours.pool, policy)
        self._batch = self._ours.batch(case.length)
        self._mla.prepare(self._batch)
        rows = case.requests * case.length
        self._q, self._k, self._v = (
            random(rows, case.heads, dim, device=rig.device) for dim in (QK_DIM, QK_DIM, V_DIM)
        )
        self._raw = RawPrefill(case, rig.scratch)

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"eager": self.eager, "plan": self.planning}

    def eager(self) -> dict[str, Any]:
        (call,) = self._batch.mla_plan.calls
        forward, (layer,) = self._ours.backend.forward_ragged, self._ours.layers

        def raw() -> Tensor:
            return self._raw.run(self._q, self._k, self._v)

        def ours() -> Tensor:
            return forward(self._q, self._k, self._v, layer, self._batch, call)

        off = difference(ours(), raw())
        us = device_us({"raw": raw, "ours": ours, "raw_again": raw}, REPLAYS, self._rig.cold)
        rate = {name: prefill_flops(self._case) / value / 1e6 for name, value in us.items()}
        return {"us": us, "ratio": ratios(us), "tflop_per_s": rate, "difference": off}

    def planning(self) -> dict[str, Any]:
        """``ours`` plans FlashInfer's call; ``ours_prepare`` is all that a batch takes, with the slots of its rows."""
        other, plan = self._ours.batch(self._case.length), self._ours.backend.init_mha_chunk_metadata
        calls: dict[str, Call] = {
            "stock": self._raw.plan,
            "ours": lambda _: plan(self._batch),
            "ours_prepare": lambda _: self._mla.prepare(other),
        }
        return {
            "us": medians(host_us(calls, 30, 1)),
            "busy": {name: while_busy(call, self._rig.load) for name, call in calls.items()},
        }


class Memory:
    """One layer's prefill after long prefixes: what it takes of the device's memory, by chunks and in one shot."""

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
        """What stands, whatever is run: ``backend_bytes`` is all that building the backend took, workspace included."""
        return {
            "workspace": [asdict(use) for use in self._ours.workspace.report()],
            "workspace_bytes": self._ours.workspace.nbytes,
            "backend_bytes": self._ours.backend_bytes,
            "pool_bytes": self._ours.pool.nbytes,
        }

    def peak(self, path: ExtendPath) -> dict[str, Any]:
        """Bytes that preparing a batch leaves on the device, and the most that one layer adds while it runs."""
        policy = ExtendPolicy(chunk_capacity=CAPACITY, forced=path)
        mla, batch = MLAAttention(self._ours.backend, self._ours.pool, policy), self._ours.batch(NEW)
        (layer,) = self._ours.layers
        before = torch.cuda.memory_allocated()
        mla.prepare(batch)
        prepared = torch.cuda.memory_allocated() - before

        def run() -> Tensor:
            return mla.attend(self._q, self._rows, layer, self._weights, batch)

        run()  # cuBLAS takes its workspace at the first call
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = run()
        torch.cuda.synchronize()
        found = {
            "calls": len(batch.mla_plan.calls),
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


@dataclass
class Report:
    """Everything found so far; written anew with every result."""

    path: Path | None
    found: dict[str, Any]
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def put(self, name: str, value: Any) -> None:
        self.found[name], self.found["seconds"] = value, self.seconds
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")


def attempt(measure: Callable[[], Any]) -> Any:
    """What was measured, or the error in its place."""
    try:
        return measure()
    except Exception as error:  # kernels fail in any way there is, and the other cases are worth having
        trace = traceback.format_exc(limit=-4)
        print(trace, file=sys.stderr, flush=True)
        return {"error": f"{type(error).__name__}: {error}"[:400], "traceback": trace[-4000:]}


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


def errors(found: Mapping[str, Any]) -> list[str]:
    """Every error in a case, with the part that has it, in a line each."""
    parts = {f"{name}: ": part for name, part in found.items() if isinstance(part, dict)}
    return [
        prefix + part["error"].partition("\n")[0][:120]
        for prefix, part in {"": found, **parts}.items()
        if "error" in part
    ]


def compile_kernels(rig: Rig) -> dict[str, Any]:
    """Seconds until each of FlashInfer's modules is there, compiled where no cache has it."""
    found = {}
    for name, make in {"import": lambda: __import__("flashinfer"), "decode": lambda: Decode(Case(16, 1, PAGE), rig),
                       "prefill": lambda: Prefill(Case(16, 1, PAGE), rig)}.items():  # fmt: skip
        started = time.monotonic()
        made = attempt(make)
        found[name] = made if isinstance(made, dict) else time.monotonic() - started
    return found


# What is printed


def value(row: Mapping[str, Any], path: str, form: str = ".1f") -> str:
    """A number deep in a row, by its dotted path, or a dash where there is none; ``MiB`` is a form for bytes."""
    found: Any = row
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, int | float):
        return "–"
    return f"{found / 2**20:.1f}" if form == "MiB" else format(found, form)


def print_table(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str]]) -> None:
    if not rows:
        return
    print(f"\n{title}")
    print(" " * 22 + " ".join(f"{heading:>9}" for heading in columns))
    for row in rows:
        case = Case(row["heads"], row["requests"], row["length"])
        cells = (value(row, path, form) for path, form in columns.values())
        print(f"{case!s:<22}" + " ".join(f"{cell:>9}" for cell in cells), *errors(row)[:1])


DECODE_COLUMNS = {
    "raw": ("eager.us.raw", ".1f"),
    "ours": ("eager.us.ours", ".1f"),
    "host raw": ("host.us.raw", ".1f"),
    "added": ("host.added_us.ours", ".1f"),
    "+write": ("host.added_us.ours_writing", ".1f"),
    "graph raw": ("graph.us.raw", ".1f"),
    "again": ("graph.ratio.raw_again", ".3f"),
    "ours/raw": ("graph.ratio.ours", ".3f"),
    "calls": ("graph.ratio.ours_calls_only", ".3f"),
    "writing": ("graph.ratio.ours_writing", ".3f"),
    "differ": ("graph.difference.ours", ".0e"),
}
PLAN_COLUMNS = {
    "stock": ("plan.us.stock", ".0f"),
    "in graph": ("plan.us.stock_in_graph", ".0f"),
    "ours": ("plan.us.ours", ".0f"),
    "replay": ("plan.us.ours_replay", ".0f"),
    "b.stock": ("plan.busy.stock.median_us", ".0f"),
    "b.graph": ("plan.busy.stock_in_graph.median_us", ".0f"),
    "b.ours": ("plan.busy.ours.median_us", ".0f"),
    "b.replay": ("plan.busy.ours_replay.median_us", ".0f"),
    "b.max": ("plan.busy.ours_replay.max_us", ".0f"),
    "busy yet": ("plan.busy.ours_replay.device_still_busy", "d"),
}
PREFILL_COLUMNS = {
    "raw TF/s": ("eager.tflop_per_s.raw", ".0f"),
    "ours TF/s": ("eager.tflop_per_s.ours", ".0f"),
    "ours/raw": ("eager.ratio.ours", ".3f"),
    "again": ("eager.ratio.raw_again", ".3f"),
    "differ": ("eager.difference", ".0e"),
    "plan raw": ("plan.us.stock", ".0f"),
    "ours": ("plan.us.ours", ".0f"),
    "prepare": ("plan.us.ours_prepare", ".0f"),
    "b.raw": ("plan.busy.stock.median_us", ".0f"),
    "b.ours": ("plan.busy.ours.median_us", ".0f"),
    "b.prepare": ("plan.busy.ours_prepare.median_us", ".0f"),
}
MEMORY_COLUMNS = {
    "workspace": ("memory.workspace_bytes", "MiB"),
    "backend": ("memory.backend_bytes", "MiB"),
    "prepared": ("chunked.prepared_bytes", "MiB"),
    "chunked": ("chunked.peak_bytes", "MiB"),
    "one shot": ("one_shot.peak_bytes", "MiB"),
    "calls": ("chunked.calls", "d"),
    "µs": ("time.us.chunked", ".0f"),
    "one µs": ("time.us.one_shot", ".0f"),
    "differ": ("time.difference", ".0e"),
}


def print_report(found: Mapping[str, Any]) -> None:
    decode = found.get("decode", [])
    print_table("Decode: µs on the device and the host, ratios in graphs", decode, DECODE_COLUMNS)
    print_table("Decode plans: µs on the host, idle and (b.) behind 6 ms of work", decode, PLAN_COLUMNS)
    print_table("Prefill as MHA; plans in µs on the host", found.get("prefill", []), PREFILL_COLUMNS)
    print_table(f"Prefill of {NEW} after {PREFIX}: MiB, and µs on the device", found.get("memory", []), MEMORY_COLUMNS)
    print(f"\ncopy {value(found, 'ceilings.copy_gb_per_s', '.0f')} GB/s, matmul "
          f"{value(found, 'ceilings.matmul_tflop_per_s', '.0f')} TFLOP/s; FlashInfer imported in "
          f"{value(found, 'compile_s.import')} s, its kernels there after {value(found, 'compile_s.decode')} s and "
          f"{value(found, 'compile_s.prefill')} s; {value(found, 'seconds', '.0f')} s in all")  # fmt: skip
    at_64 = [row for row in decode if row["requests"] == 64]
    for name, goal, numbers in (
        ("host µs added to a call", "≤ 15", numbers_at(decode, "host.added_us.ours")),
        ("ratio in a graph", "≤ 1.02", numbers_at(decode, "graph.ratio.ours")),
        ("raw to itself", "noise", numbers_at(decode, "graph.ratio.raw_again")),
        ("µs of a replay's plan at batch 64", "≤ 40", numbers_at(at_64, "plan.us.ours_replay")),
    ):
        if numbers:
            print(f"{name}: median {statistics.median(numbers):.3f}, worst {max(numbers):.3f} ({goal})")
    complaints = [row["plan"]["torch_complains"] for row in decode if "torch_complains" in row.get("plan", {})]
    said = {text for plans in complaints if (text := plans["ours_replay"]) is not None}
    print(f"torch's check of {len(complaints)} replays' plans for synchronising calls: {said or 'no complaint'}")


def numbers_at(rows: Iterable[Mapping[str, Any]], path: str) -> list[float]:
    texts = (value(row, path, ".6g") for row in rows)
    return [float(text) for text in texts if text != "–"]


def describe(commit: str | None) -> dict[str, Any]:
    """Where and with what this runs."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    file = Path(__file__).resolve().parents[1] / ".gpu" / "commit"
    if commit is None and file.exists():
        commit = file.read_text().strip()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return {
        "what": "flashinfer_mla against FlashInfer called directly; bf16, kv_lora 512 + rope 64, pages of 64; medians",
        "device": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "versions": versions,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="two decode cases and one prefill, in about a minute")
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    parser.add_argument("--limit", type=float, default=330, help="seconds after which no further case begins")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("mla_h200 measures kernels of an NVIDIA Hopper GPU, and torch sees no CUDA device here")
    if torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"mla_h200 measures kernels for SM 90, and this is a {torch.cuda.get_device_name()}")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    torch.manual_seed(0)
    report = Report(arguments.json, describe(arguments.commit))
    with torch.inference_mode():
        rig = Rig(torch.device("cuda", 0))
        report.put("ceilings", attempt(rig.ceilings))
        report.put("compile_s", compile_kernels(rig))
        decode, prefill = (QUICK_DECODE, QUICK_PREFILL) if arguments.quick else (DECODE, PREFILL)
        measure_all("decode", Decode, decode, rig, report, arguments.limit)
        measure_all("prefill", Prefill, prefill, rig, report, arguments.limit)
        # Last, and the largest at the very end: whatever breaks the device there has nothing left to take along.
        measure_all("memory", Memory, () if arguments.quick else MEMORY, rig, report, arguments.limit)
    print_report(report.found)


if __name__ == "__main__":
    main()
