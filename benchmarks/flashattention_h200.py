"""FlashAttention on an H200: the flashattention backend against flash-attn-4 and FlashInfer called directly.

GQA decode over a grid of batches: ours eager, ours in CUDA graphs of 20 calls over four layers' caches (as an engine
would capture it, with a page table for the longest context), and flash-attn-4 and FlashInfer in such graphs. ``parts``
is our number of KV splits per request; if it is 1, ours and flash-attn-4 make the same calls. Prefill without
prefix: GQA with the write to the cache, and MLA as MHA.

Sides alternate. Only ratios within one run count, and ``raw_again`` shows their noise. A case that fails is reported
with its error. Results are written as soon as they are available.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from attnplug_tune.raw_calls import RawScene
from gpu_clock import capture, device_us, host_us, medians
from gpu_report import Report, attempt, describe
from mla_h200 import measure_all
from mla_report import errors, value
from mla_sides import Rig, causal_pairs, difference, random, ratios
from torch import Tensor

from attnplug import (
    AttentionKind,
    BackendContext,
    DType,
    ForwardBatch,
    ForwardMode,
    Geometry,
    LayerSpec,
    MHAPool,
    ModelSpec,
    RaggedCall,
    Role,
)
from attnplug.contract.batch import BatchPlan
from attnplug.host import KVPools, Limits, MLADims, WorkspaceOwner, load_registry, plan_forward
from attnplug_flashattention.backend import FlashAttentionBackend
from attnplug_flashattention.kernels import load_fa4
from attnplug_flashattention.options import FlashAttentionOptions
from attnplug_flashattention.raw import RawFlashAttention

PAGE, MAX_CONTEXT = 64, 131072
LAYERS, CALLS, REPLAYS = 4, 20, 20
WHAT = "flashattention against flash-attn-4 and FlashInfer called directly; bf16, pages of 64; medians"
PACKAGES = (
    "torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "flashinfer-python",
    "attnplug",
    "attnplug-flashattention",
)


@dataclass(frozen=True)
class Case:
    """Requests of equal length."""

    requests: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} × {self.head_dim}/{self.v_head_dim}, {self.requests} × {self.length}"


DECODE = tuple(
    Case(*shape)
    for shape in ((1, 512), (1, 1024), (1, 4096), (1, 16384), (1, 65536), (2, 16384), (4, 4096), (8, 8192), (9, 16384),
                  (16, 4096), (64, 8192), (256, 2048))
)  # fmt: skip
PREFILL = (Case(4, 4096), Case(1, 16384), Case(16, 1024))
MLA = tuple(Case(r, n, h, h, 192, 128) for h, r, n in ((128, 1, 4096), (16, 4, 4096), (16, 1, 16384), (16, 16, 1024)))
QUICK = (Case(1, 16384), Case(16, 4096))


class Ours:
    """Our backend over caches of random rows in random pages."""

    def __init__(self, case: Case, device: torch.device, layers: int, **options: Any) -> None:
        self.case, self.device = case, device
        width = -(-case.length // PAGE)
        self.page_table = torch.randperm(case.requests * width).view(case.requests, width).int().to(device)
        self.layers = tuple(
            LayerSpec(number, AttentionKind.MHA, case.heads, case.kv_heads, case.head_dim, case.v_head_dim,
                      case.head_dim**-0.5)
            for number in range(layers)
        )  # fmt: skip
        self.pool = MHAPool(
            self.layers, num_pages=case.requests * width, page_size=PAGE, dtype=DType.BFLOAT16, device=device
        )
        for layer in self.layers:
            self.pool.keys(layer.layer_id).normal_()
            self.pool.values(layer.layer_id).normal_()
        self.context = BackendContext(
            name="flashattention",
            roles=frozenset({Role.PREFILL, Role.DECODE}),
            model=ModelSpec("benchmark", "benchmark", self.layers, MAX_CONTEXT),
            device=device,
            dtype=torch.bfloat16,
            kv_dtype=DType.BFLOAT16,
            page_size=PAGE,
            limits=Limits(case.requests, case.requests * case.length, MAX_CONTEXT),
            pools=KVPools(mha=self.pool),
            workspace=WorkspaceOwner(),
            declared=load_registry().backends["flashattention"].spec.capabilities,
            options=FlashAttentionOptions(**{"kernel": "fa4", **options}),
        )
        self.backend = FlashAttentionBackend(self.context)

    def batch(self, new: int | None = None) -> ForwardBatch:
        """Batch that extends each request by its last ``new`` rows; by default decodes its last row."""
        requests, length = self.case.requests, self.case.length
        mode = ForwardMode.DECODE if new is None else ForwardMode.EXTEND
        return ForwardBatch(
            Geometry.of_lengths(mode, self.page_table, [new or 1] * requests, [length] * requests, PAGE)
        )

    def captured(self) -> ForwardBatch:
        """Decode batch as an engine captures it: its page table is for the longest context."""
        geometry = self.batch().geometry
        table = torch.zeros(self.case.requests, MAX_CONTEXT // PAGE, dtype=torch.int32, device=self.device)
        table[:, : self.page_table.shape[1]] = self.page_table
        batch = ForwardBatch(replace(geometry, page_table=table, max_seq_len=MAX_CONTEXT, host=None, captured=True))
        self.backend.init_cuda_graph_state(self.case.requests, self.case.requests)
        batch.plan = BatchPlan(self.backend.init_forward_metadata_out_graph(batch, in_capture=True))
        self.backend.init_forward_metadata_in_graph(batch)
        return batch


class Decode:
    """One decode case: all sides on the same queries and caches."""

    def __init__(self, case: Case, rig: Rig, *, flashinfer: bool) -> None:
        self._case, self._rig, self._flashinfer = case, rig, flashinfer
        self._ours = Ours(case, rig.device, LAYERS)
        self._q = random(case.requests, case.heads, case.head_dim, device=rig.device)
        self._batch = self._ours.batch()
        plan_forward(self._ours.backend, self._batch)
        self._fa4 = RawFlashAttention(
            RawScene(
                self._ours.layers, self._ours.context.pools, PAGE, self._ours.page_table,
                (case.length,) * case.requests, 1, False, self._q, True,
            )
        )  # fmt: skip

    @cached_property
    def _captured(self) -> ForwardBatch:
        return self._ours.captured()

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        parts = {"eager": self.eager, "host": self.host, "graph": self.graphs}
        return {**parts, "flashinfer": self.flashinfer} if self._flashinfer else parts

    def _call(self, batch: ForwardBatch) -> Callable[[int], Tensor]:
        forward, layers, q = self._ours.backend.forward_decode, self._ours.layers, self._q
        return lambda number: forward(q, None, None, layers[number % LAYERS], batch, save_kv_cache=False)

    def _raw(self, number: int) -> Tensor:
        return self._fa4.run(number)

    def eager(self) -> dict[str, Any]:
        """One call on the device, with the cache not in L2."""
        ours = self._call(self._batch)
        off = difference(ours(0), self._raw(0))
        us = device_us({"raw": lambda: self._raw(0), "ours": lambda: ours(0)}, REPLAYS, self._rig.cold)
        divided = self._batch.plan.attention.metadata.cached.divided
        return {"us": us, "ratio": ratios(us), "difference": off, "parts": 1 if divided is None else divided.count}

    def host(self) -> dict[str, Any]:
        """One call on the host, and planning a step from lengths on the host."""
        plan = self._ours.backend.init_forward_metadata
        calls = {"raw": self._raw, "ours": self._call(self._batch), "plan": lambda _: plan(self._batch)}
        return {"us": medians(host_us(calls, 5, 20))}

    def _repeated(
        self, call: Callable[[int], Tensor], before: Callable[[], None] = lambda: None
    ) -> Callable[[], Tensor]:
        def body() -> Tensor:
            before()
            for number in range(CALLS):
                out = call(number)
            return out

        return body

    def _timed(self, bodies: Mapping[str, Callable[[], Tensor]], to: Tensor) -> dict[str, Any]:
        captured = {name: capture(body) for name, body in bodies.items()}
        replays = {name: graph.replay for name, (graph, _) in captured.items()}
        us = {name: found / CALLS for name, found in device_us(replays, REPLAYS, self._rig.warm).items()}
        return {"us": us, "difference": {name: difference(out, to) for name, (_, out) in captured.items()}}

    def graphs(self) -> dict[str, Any]:
        """A call inside a graph of 20, including the kernels that plan in the graph."""
        batch, backend = self._captured, self._ours.backend
        divided = batch.plan.attention.metadata.cached.divided
        bodies = {
            "raw": self._repeated(self._raw),
            "ours": self._repeated(self._call(batch), lambda: backend.init_forward_metadata_in_graph(batch)),
            "raw_again": self._repeated(self._raw),
        }
        found = self._timed(bodies, self._raw(CALLS - 1))
        moved = 2 * self._case.requests * self._case.length * self._case.kv_heads * self._case.head_dim * 2
        return {
            **found,
            "ratio": ratios(found["us"]),
            "parts": 1 if divided is None else divided.count,
            "gb_per_s": moved / found["us"]["ours"] / 1e3,
        }

    def flashinfer(self) -> dict[str, Any]:
        """FlashInfer's paged decode in such a graph, planned once for these lengths."""
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        case, device, pool = self._case, self._rig.device, self._ours.pool
        width = self._ours.page_table.shape[1]
        indptr = torch.arange(case.requests + 1, dtype=torch.int32, device=device) * width
        indices = self._ours.page_table.flatten()
        last = torch.full((case.requests,), case.length - (width - 1) * PAGE, dtype=torch.int32, device=device)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._rig.scratch, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, case.heads, case.kv_heads, case.head_dim, PAGE, q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )  # fmt: skip

        def run(number: int) -> Tensor:
            layer = number % LAYERS
            out: Tensor = wrapper.run(self._q, (pool.keys(layer), pool.values(layer)))
            return out

        found = self._timed({"flashinfer": self._repeated(run)}, self._raw(CALLS - 1))
        return {"us": found["us"]["flashinfer"], "difference": found["difference"]["flashinfer"]}


class Prefill:
    """One prefill without prefix: all sides on the same queries, keys and values."""

    def __init__(self, case: Case, rig: Rig, *, flashinfer: bool) -> None:
        self._case, self._rig, self._flashinfer = case, rig, flashinfer
        rows = case.requests * case.length
        self._q = random(rows, case.heads, case.head_dim, device=rig.device)
        self._k = random(rows, case.kv_heads, case.head_dim, device=rig.device)
        self._v = random(rows, case.kv_heads, case.v_head_dim, device=rig.device)
        self._indptr = torch.arange(case.requests + 1, dtype=torch.int32, device=rig.device) * case.length
        self._fa4 = load_fa4()
        mla = case.head_dim != case.v_head_dim
        self._forward, self._unwritten = self._as_mla() if mla else self._as_gqa()

    def _as_gqa(self) -> tuple[Callable[[], Tensor], ...]:
        """GQA prefill, with and without the cache write."""
        ours = Ours(self._case, self._rig.device, 1)
        batch = ours.batch(self._case.length)
        plan_forward(ours.backend, batch)
        forward = partial(ours.backend.forward_extend, self._q, self._k, self._v, ours.layers[0], batch)
        return forward, partial(forward, save_kv_cache=False)

    def _as_mla(self) -> tuple[Callable[[], Tensor], ...]:
        """MLA prefill. The cache write is the engine's, so both variants are the same."""
        case, device = self._case, self._rig.device
        dims = MLADims(512, case.head_dim - 64, 64)
        layer = LayerSpec(0, AttentionKind.MLA, case.heads, case.heads, case.head_dim, case.v_head_dim,
                          case.head_dim**-0.5, mla=dims)  # fmt: skip
        small = Ours(replace(case, requests=1, length=PAGE), device, 1)
        lens = [case.length] * case.requests
        call = RaggedCall.of(0, lens, lens, causal=True, device=device)
        forward = partial(small.backend.forward_ragged, self._q, self._k, self._v, layer, call)
        return forward, forward

    def parts(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {"eager": self.eager, "flashinfer": self.flashinfer} if self._flashinfer else {"eager": self.eager}

    def flashinfer(self) -> dict[str, Any]:
        """FlashInfer's ragged prefill, planned once."""
        from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

        case = self._case
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(self._rig.scratch, kv_layout="NHD", backend="fa3")
        wrapper.plan(
            qo_indptr=self._indptr,
            kv_indptr=self._indptr,
            num_qo_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim_qk=case.head_dim,
            head_dim_vo=case.v_head_dim,
            causal=True,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        off = difference(wrapper.run(self._q, self._k, self._v), self._forward())
        calls = {"flashinfer": lambda: wrapper.run(self._q, self._k, self._v), "ours": self._forward}
        us = device_us(calls, REPLAYS, self._rig.cold)
        return {"us": us, "ratio": ratios(us, "flashinfer"), "difference": off}

    def eager(self) -> dict[str, Any]:
        case = self._case

        def raw() -> Tensor:
            out, _ = self._fa4(
                self._q, self._k, self._v, cu_seqlens_q=self._indptr, cu_seqlens_k=self._indptr,
                max_seqlen_q=case.length, max_seqlen_k=case.length, causal=True,
            )  # fmt: skip
            return out

        off = difference(self._forward(), raw())
        sides = {"raw": raw, "ours": self._forward, "unwritten": self._unwritten, "raw_again": raw}
        us = device_us(sides, REPLAYS, self._rig.cold)
        pairs = case.heads * case.requests * causal_pairs(case.length, case.length)
        flops = 2 * pairs * (case.head_dim + case.v_head_dim)
        rate = {name: flops / found / 1e6 for name, found in us.items()}
        return {"us": us, "ratio": ratios(us), "tflop_per_s": rate, "difference": off}


def print_decode(rows: list[dict[str, Any]]) -> None:
    print("\nDecode: µs of a call in a graph; ratio to flash-attn-4 and to FlashInfer")
    for row in rows:
        case = Case(**{key: row[key] for key in asdict(QUICK[0])})
        ours, other = value(row, "graph.us.ours"), value(row, "flashinfer.us")
        against = f"{float(ours) / float(other):.2f}" if "–" not in (ours, other) else "–"
        cells = {
            "parts": value(row, "graph.parts", "d"),
            "fa4": value(row, "graph.us.raw"),
            "ours": ours,
            "flashinfer": other,
            "ours/fa4": value(row, "graph.ratio.ours", ".3f"),
            "again": value(row, "graph.ratio.raw_again", ".3f"),
            "ours/fi": against,
            "eager": value(row, "eager.us.ours"),
            "host": value(row, "host.us.ours"),
            "differ": value(row, "graph.difference.ours", ".0e"),
        }
        print(f"{case!s:<32}" + "  ".join(f"{name} {cell:>6}" for name, cell in cells.items()), *errors(row)[:1])


def print_prefill(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}: TFLOP/s")
    for row in rows:
        case = Case(**{key: row[key] for key in asdict(QUICK[0])})
        cells = {
            "fa4": value(row, "eager.tflop_per_s.raw", ".0f"),
            "ours": value(row, "eager.tflop_per_s.ours", ".0f"),
            "ours/fa4": value(row, "eager.ratio.ours", ".3f"),
            "unwritten": value(row, "eager.ratio.unwritten", ".3f"),
            "again": value(row, "eager.ratio.raw_again", ".3f"),
            "ours/fi": value(row, "flashinfer.ratio.ours", ".3f"),
            "differ": value(row, "eager.difference", ".0e"),
        }
        print(f"{case!s:<32}" + "  ".join(f"{name} {cell:>6}" for name, cell in cells.items()), *errors(row)[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="two decode cases and no prefill")
    parser.add_argument(
        "--flashinfer",
        choices=("none", "decode", "all"),
        default="decode",
        help="what is compared with FlashInfer too: its modules take half a minute to compile, those for prefill more",
    )
    parser.add_argument("--commit", metavar="TEXT", help="what was measured; .gpu/commit has it otherwise")
    parser.add_argument("--limit", type=float, default=80, help="seconds after which no further case begins")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("flashattention_h200 measures kernels of an NVIDIA Hopper GPU, and torch sees no CUDA device here")
    if torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"flashattention_h200 measures kernels for SM 90, and this is a {torch.cuda.get_device_name()}")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    torch.manual_seed(0)
    report = Report(arguments.json, describe(WHAT, PACKAGES, arguments.commit))
    with torch.inference_mode():
        rig = Rig(torch.device("cuda", 0))
        report.put("ceilings", attempt(rig.ceilings))
        started = time.monotonic()
        attempt(load_fa4)
        report.put("import_s", time.monotonic() - started)
        decode = partial(Decode, flashinfer=arguments.flashinfer != "none")
        prefill = partial(Prefill, flashinfer=arguments.flashinfer == "all")
        if not arguments.quick:
            measure_all("prefill", prefill, PREFILL, rig, report, arguments.limit)
            measure_all("mla_prefill", prefill, MLA, rig, report, arguments.limit)
        measure_all("decode", decode, QUICK if arguments.quick else DECODE, rig, report, arguments.limit)
    print_prefill("Prefill, GQA, written to the cache", report.found.get("prefill", []))
    print_prefill("Prefill, MLA as MHA", report.found.get("mla_prefill", []))
    print_decode(report.found["decode"])
    print(f"\n{report.seconds:.0f} s in all")


if __name__ == "__main__":
    main()
