"""Sides that ``mla_h200.py`` compares over the same memory: our backends, and direct library calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from attnplug_tune.raw_calls import RawScene
from gpu_clock import device_us
from torch import Tensor

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, LayerSpec, MLAPool, ModelSpec, Role
from attnplug.host import HostContext, KVPools, Limits, MLADims, WorkspaceOwner, load_registry
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.raw import SCRATCH_BYTES, RawFlashInferMLA
from attnplug_flashmla.backend import FlashMLABackend
from attnplug_flashmla.raw import RawFlashMLA
from attnplug_triton_mla.backend import TritonMLABackend

PAGE = 64
DIMS = MLADims(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
QK_DIM, V_DIM = DIMS.qk_nope_head_dim + DIMS.qk_rope_head_dim, 128
SCALE = QK_DIM**-0.5
DTYPE = torch.bfloat16
KERNEL = "fa3"
MAX_CONTEXT = 131072

LAYERS = 4
CALLS = 20
"""Number of calls in a graph, cycling over the layers."""
REPLAYS = 30
HOST_CALLS = 50
"""Number of calls between two clock readings; too few to fill the launch queue, which would block the host."""
NEW, PREFIX, CAPACITY = 512, 32768, 16384
PACKAGES = (
    *("torch", "triton", "flashinfer-python", "sgl-flash-mla"),
    *("attnplug", "attnplug-engine", "attnplug-flashinfer-mla", "attnplug-flashmla", "attnplug-triton-mla"),
)
_ROTATING_BYTES = 6 << 30


@dataclass(frozen=True)
class Case:
    """Requests of equal length."""

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
    """(query, key) pairs of one request and head with ``new`` queries, the last of ``total`` rows."""
    return new * total - new * (new - 1) // 2


def prefill_flops(case: Case) -> int:
    return case.heads * case.requests * causal_pairs(case.length, case.length) * 2 * (QK_DIM + V_DIM)


def decode_bytes(case: Case) -> int:
    """Cache rows, queries and outputs, each moved once."""
    rows = case.length * DIMS.row_dim + case.heads * (DIMS.row_dim + DIMS.kv_lora_rank)
    return case.requests * rows * DTYPE.itemsize


def rotating_layers(case: Case) -> int:
    """Number of layers, so that every call of a graph reads another cache, as far as memory allows."""
    nbytes = case.requests * case.length * DIMS.row_dim * DTYPE.itemsize
    return min(CALLS, max(LAYERS, _ROTATING_BYTES // nbytes))


def ratios(times: Mapping[str, float], to: str = "raw") -> dict[str, float]:
    return {name: value / times[to] for name, value in times.items() if name != to}


def difference(out: Tensor, reference: Tensor) -> float:
    """‖out − reference‖ / ‖reference‖."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device)


class Rig:
    """State shared by all cases: device, scratch memory of the raw wrappers, and work that keeps the device busy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self._left, self._right = (random(8192, 8192, device=device) for _ in range(2))
        self._product = torch.empty_like(self._left)

    def warm(self) -> None:
        """Keep the device busy for 0.2 ms, so that the host runs ahead and launch latency is hidden."""
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
        """Bandwidth of a large copy, counting reads and writes, and the rate of an 8192³ bf16 product."""
        source = random(1 << 30, device=self.device)
        target = torch.empty_like(source)
        us = device_us({"copy": lambda: target.copy_(source), "product": self.multiply}, 20, self.warm)
        moved = 2 * source.numel() * source.element_size()
        return {"copy_gb_per_s": moved / us["copy"] / 1e3, "matmul_tflop_per_s": 2 * 8192**3 / us["product"] / 1e6}


BACKENDS: dict[str, Callable[..., Any]] = {
    "flashinfer_mla": FlashInferMLABackend,
    "flashmla": FlashMLABackend,
    "triton_mla": TritonMLABackend,
}


class Ours:
    """One of our backends over caches of random rows in random pages."""

    def __init__(self, case: Case, device: torch.device, layers: int, name: str = "flashinfer_mla") -> None:
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
        self._host = HostContext(
            model=ModelSpec("benchmark", "benchmark", self.layers, MAX_CONTEXT),
            device=device,
            dtype=DTYPE,
            kv_dtype=DType.BFLOAT16,
            page_size=PAGE,
            limits=Limits(case.requests, case.requests * case.length, MAX_CONTEXT),
            pools=KVPools(mla=self.pool),
            workspace=self.workspace,
        )
        self.backend = self.build(name)
        self.backend_bytes = torch.cuda.memory_allocated() - before

    def build(self, name: str, levels: frozenset[str] = frozenset()) -> Any:
        """A backend over these caches, with levels of invariance."""
        declared, roles = load_registry().backends[name].spec.capabilities, frozenset({Role.PREFILL, Role.DECODE})
        return BACKENDS[name](self._host.for_backend(name, declared, roles=roles, invariant=levels))

    def batch(self, new: int | None = None, *, captured: bool = False) -> ForwardBatch:
        """Batch that extends each request by its last ``new`` rows; by default decodes its last row.

        A captured batch has its lengths on the device only.
        """
        requests, length = self.case.requests, self.case.length
        mode = ForwardMode.DECODE if new is None else ForwardMode.EXTEND
        geometry = Geometry.of_lengths(mode, self.page_table, [new or 1] * requests, [length] * requests, PAGE)
        return ForwardBatch(replace(geometry, host=None, captured=True) if captured else geometry)

    def scene(self, q: Tensor, *, captured: bool) -> RawScene:
        """The same decode for a library that is called directly."""
        lengths = (self.case.length,) * self.case.requests
        return RawScene(self.layers, KVPools(mla=self.pool), PAGE, self.page_table, lengths, 1, False, q, captured)


@dataclass(frozen=True)
class Pair:
    """A backend of ours and its library: ``raw`` makes the library's side, for graphs or not."""

    name: str
    raw: Callable[[Ours, Tensor, Rig, bool], Any]


FLASHINFER = Pair(
    "flashinfer_mla", lambda ours, q, rig, graph: RawFlashInferMLA(ours.scene(q, captured=graph), KERNEL, rig.scratch)
)
FLASHMLA = Pair("flashmla", lambda ours, q, rig, graph: RawFlashMLA(ours.scene(q, captured=graph)))


def missing_flashmla() -> str | None:
    """Reason why FlashMLA cannot be measured; None if it can."""
    from attnplug_flashmla.kernels import load_library

    try:
        load_library()
    except Exception as error:  # not installed, or fails to load
        return f"FlashMLA is left out: {type(error).__name__}: {error}; pip install sgl-flash-mla --no-deps"
    return None


class RawPrefill:
    """FlashInfer's ragged prefill wrapper."""

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
