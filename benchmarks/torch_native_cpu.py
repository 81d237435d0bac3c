"""torch_native on the CPU against torch's dense attention on contiguous rows: cost of pages and plans.

Both alternate in one process; only the ratio of medians counts. The dense side gets contiguous keys and values,
without pages, writes or lengths: it is a lower bound, not a competitor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnplug import AttentionKind, DType, ForwardBatch, ForwardMode, Geometry, LayerSpec, MHAPool, ModelSpec, Role
from attnplug.host import HostContext, KVPools, Limits, WorkspaceOwner, load_registry, plan_forward
from attnplug.kernels import torch_dtype
from attnplug.torch_native.backend import TorchNativeBackend

PAGE = 64
LAYER = LayerSpec(0, AttentionKind.MHA, 16, 4, 64, 64, 64**-0.5)


@dataclass(frozen=True)
class Shape:
    requests: int
    before: int
    new: int

    def __str__(self) -> str:
        if self.new == 1:
            return f"decode {self.requests} × {self.before}"
        return f"prefill {self.requests} × {self.new}" + (f" after {self.before}" if self.before else "")


SHAPES = (
    Shape(1, 512, 1),
    Shape(1, 4096, 1),
    Shape(8, 512, 1),
    Shape(32, 512, 1),
    Shape(32, 2048, 1),
    Shape(1, 0, 512),
    Shape(1, 0, 2048),
    Shape(4, 512, 128),
)


def milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)


def measure(shape: Shape, dtype: DType) -> tuple[float, float, float]:
    """Median milliseconds of planning, of our forward, and of dense attention."""
    total = shape.before + shape.new
    pages = -(-total // PAGE)
    pool = MHAPool([LAYER], num_pages=pages * shape.requests, page_size=PAGE, dtype=dtype, device="cpu")
    pool.keys(0).normal_()
    pool.values(0).normal_()
    host = HostContext(
        model=ModelSpec("bench", "bench", (LAYER,), total),
        device=torch.device("cpu"),
        dtype=torch_dtype(dtype),
        kv_dtype=dtype,
        page_size=PAGE,
        limits=Limits(shape.requests, shape.requests * shape.new, total),
        pools=KVPools(mha=pool),
        workspace=WorkspaceOwner(),
    )
    spec = load_registry().backends["torch_native"].spec
    roles = frozenset({Role.PREFILL, Role.DECODE})
    backend = TorchNativeBackend(host.for_backend(spec.name, spec.capabilities, roles=roles))
    tokens = shape.requests * shape.new
    q, k, v = (torch.randn(tokens, heads, 64, dtype=torch_dtype(dtype)) for heads in (16, 4, 4))
    decode = shape.new == 1
    geometry = Geometry.of_lengths(
        ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        torch.randperm(pages * shape.requests).int().view(shape.requests, pages),
        [shape.new] * shape.requests,
        [total] * shape.requests,
        PAGE,
    )
    batch = ForwardBatch(geometry)
    plan_forward(backend, batch)
    forward = backend.forward_decode if decode else backend.forward_extend
    dense_q = q.view(shape.requests, shape.new, 16, 64).transpose(1, 2)
    dense_k, dense_v = (torch.randn(shape.requests, 4, total, 64, dtype=q.dtype) for _ in range(2))
    seen = torch.ones(shape.new, total, dtype=torch.bool).tril(shape.before)

    def dense() -> object:
        if decode or shape.before == 0:
            return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, is_causal=not decode, enable_gqa=True)
        return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, attn_mask=seen, enable_gqa=True)

    times: dict[str, list[float]] = {"plan": [], "ours": [], "dense": []}
    until = time.perf_counter() + 2.0
    while time.perf_counter() < until or len(times["ours"]) < 5:
        times["plan"].append(milliseconds(lambda: backend.init_forward_metadata(batch)))
        times["ours"].append(milliseconds(lambda: forward(q, k, v, LAYER, batch)))
        times["dense"].append(milliseconds(dense))
    return tuple(statistics.median(each[1:]) for each in times.values())


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, heads 16/4 × 64, pages of {PAGE}")
    for dtype in (DType.FLOAT32,):
        print(f"\n{dtype.value:<26}{'plan ms':>9}{'ours ms':>9}{'dense ms':>10}{'ours/dense':>12}")
        for shape in SHAPES:
            plan, ours, dense = measure(shape, dtype)
            print(f"{shape!s:<26}{plan:>9.3f}{ours:>9.3f}{dense:>10.3f}{ours / dense:>12.2f}")


if __name__ == "__main__":
    main()
