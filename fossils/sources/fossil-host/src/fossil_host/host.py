"""The host: selects backends, owns the caches, runs steps, and compares each result with float64."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    DType,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    ForwardMode,
    Geometry,
    GraphLevel,
    LayerSpec,
    MHAPool,
    MLAPool,
    ModelSpec,
    Problem,
    Role,
)
from attnplug.host import (
    BackendRequest,
    ExtendPolicy,
    HostContext,
    KVPools,
    Limits,
    MLADims,
    MLAWeights,
    ModelAttention,
    WorkspaceOwner,
    build_selection,
    load_registry,
    select,
)
from attnplug.linear import LinearDims, LinearInputs, LinearStatePool

PAGE_SIZE, HEADS, DIM = 16, 4, 16
DIMS = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8)
TABLE = torch.tensor([[3, 1, 6], [2, 5, 4]], dtype=torch.int32)
FULL = {
    "mha": LayerSpec(0, AttentionKind.MHA, HEADS, 2, DIM, DIM, scale=DIM**-0.5),
    "mla": LayerSpec(0, AttentionKind.MLA, HEADS, HEADS, 24, DIM, scale=24**-0.5, mla=DIMS),
}
LINEAR = LayerSpec(
    1, AttentionKind.LIGHTNING, HEADS, HEADS, DIM, DIM, scale=DIM**-0.5, linear=LinearDims(HEADS, HEADS, DIM, DIM)
)


def serve(kind: str, backend: str, linear: str | None = None, path: ExtendPath | None = None) -> dict[str, float]:
    """Run two prefills and three decode steps; return the largest error of each step by its name.

    ``kind`` is ``mha`` or ``mla``. ``linear`` names a backend for a second layer, of Lightning attention. ``path`` is
    the extend path of MLA. If the backend can be captured, the last two decode steps are planned as a capture's and as
    a replay's.
    """
    return _Host(kind, backend, linear, path).run()


class _Host:
    def __init__(self, kind: str, backend: str, linear: str | None, path: ExtendPath | None) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.layer = FULL[kind]
        layers = (self.layer,) if linear is None else (self.layer, LINEAR)
        model = ModelSpec("fossil", "fossil", layers, context_length=64)
        request = BackendRequest(backend, {} if linear is None else {Role.LINEAR: linear})
        registry = load_registry()
        levels = registry.backends[backend].spec.capabilities.invariant if linear is None else frozenset()
        problem = Problem(
            model,
            device="cpu",
            dtype=DType.FLOAT32,
            kv_dtype=DType.FLOAT32,
            page_size=PAGE_SIZE,
            invariant=levels,
        )
        selection = select(registry, request, problem)
        sizes = {"num_pages": 8, "page_size": PAGE_SIZE, "dtype": DType.FLOAT32, "device": "cpu"}
        pools = KVPools(
            mha=MHAPool(layers, **sizes) if kind == "mha" else None,
            mla=MLAPool(layers, **sizes) if kind == "mla" else None,
            linear=None if linear is None else LinearStatePool(layers, num_slots=3, dtype=DType.FLOAT32, device="cpu"),
        )
        context = HostContext(
            model=model,
            device=torch.device("cpu"),
            dtype=torch.float32,
            kv_dtype=DType.FLOAT32,
            page_size=PAGE_SIZE,
            limits=Limits(max_requests=2, max_tokens=64, max_context=48),
            pools=pools,
            workspace=WorkspaceOwner(),
        )
        policy = ExtendPolicy(forced=path, chunk_capacity=12)
        self.attention = ModelAttention(build_selection(selection, context), pools, policy)
        self.weights = MLAWeights(self.draw(HEADS, 16, 32), self.draw(HEADS, 32, DIM))
        self.linear = linear is not None
        self.keys: list[list[Tensor]] = [[], []]
        self.values: list[list[Tensor]] = [[], []]
        self.states = [torch.zeros(HEADS, DIM, DIM, dtype=torch.float64) for _ in range(2)]

    def draw(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.random)

    def run(self) -> dict[str, float]:
        steps = {
            "prefill": self.step(ForwardMode.EXTEND, [9, 21], [9, 21]),
            "prefill with prefix": self.step(ForwardMode.EXTEND, [12, 3], [21, 24]),
            "decode": self.step(ForwardMode.DECODE, [1, 1], [22, 25]),
        }
        if not self.linear and self.attention.graph_level >= GraphLevel.DECODE:
            self.attention.reserve(2, 2)
            lens, table = torch.zeros(2, dtype=torch.int32), TABLE.clone()
            for name, first in (("capture", True), ("replay", False)):
                kv_lens = [23, 26] if first else [24, 27]
                lens.copy_(torch.tensor(kv_lens))
                geometry = Geometry(ForwardMode.DECODE, table, lens, PAGE_SIZE, rows=2, max_seq_len=48, max_new=1)
                batch = ForwardBatch(geometry)
                self.attention.capture(batch, in_capture=first)
                self.attention.refill(batch)
                steps[name] = self.attend(batch, [1, 1])
        return steps

    def step(self, mode: ForwardMode, new: list[int], total: list[int]) -> float:
        slots = torch.tensor([1, 2], dtype=torch.int32) if self.linear else None
        batch = ForwardBatch(Geometry.of_lengths(mode, TABLE, new, total, PAGE_SIZE, state_slots=slots))
        self.attention.plan(batch)
        return self.attend(batch, new)

    def attend(self, batch: ForwardBatch, new: list[int]) -> float:
        rows, layer = sum(new), self.layer
        if layer.mla is None:
            q, k, v = self.draw(rows, HEADS, DIM), self.draw(rows, 2, DIM), self.draw(rows, 2, DIM)
            extras = ForwardExtras(out=torch.empty(rows, HEADS, DIM))
            out = self.attention.attend(q, k, v, layer, batch, extras=extras)
        else:
            q, cached = self.draw(rows, HEADS, 24), self.draw(rows, DIMS.row_dim)
            k, v = self.weights.up_project(cached)
            out = self.attention.attend_mla(q, cached, layer, self.weights, batch)
        error = self.compare(q, k, v, out, new)
        return max(error, self.attend_linear(batch, new)) if self.linear else error

    def compare(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, new: list[int]) -> float:
        """Return the largest difference from causal attention in float64."""
        error, first = 0.0, 0
        for request, count in enumerate(new):
            rows = slice(first, first + count)
            first += count
            self.keys[request].append(k[rows].double())
            self.values[request].append(v[rows].double())
            keys, values = torch.cat(self.keys[request]), torch.cat(self.values[request])
            keys, values = (one.repeat_interleave(HEADS // one.shape[1], 1) for one in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * self.layer.scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - count + 1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            error = max(error, float((torch.einsum("hqk,khd->qhd", weights, values) - out[rows]).abs().max()))
        return error

    def attend_linear(self, batch: ForwardBatch, new: list[int]) -> float:
        rows, error, row = sum(new), 0.0, 0
        q, k, v = (self.draw(rows, HEADS, DIM) / 4 for _ in range(3))
        decay = torch.linspace(-0.5, -0.1, HEADS)
        out = self.attention.attend_linear(LinearInputs(q, k, v, decay), LINEAR, batch)
        for request, count in enumerate(new):
            for _ in range(count):
                state = self.states[request] * decay.double().exp()[:, None, None]
                state = state + torch.einsum("hk,hv->hkv", k[row].double(), v[row].double())
                wanted = LINEAR.scale * torch.einsum("hk,hkv->hv", q[row].double(), state)
                error = max(error, float((wanted - out[row]).abs().max()))
                self.states[request], row = state, row + 1
        return error
