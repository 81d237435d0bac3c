"""The stage of ``attnplug check``: requests in scattered pages of a poisoned pool, and their results in float64."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug.cli.reference import attention_float64
from attnplug.contract.backend import AttentionBackend, ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.geometry import Geometry
from attnplug.contract.mode import ForwardMode
from attnplug.declare.errors import BackendError
from attnplug.declare.model import AttentionKind, LayerSpec
from attnplug.declare.problem import DType
from attnplug.kv import INDEX_KEYS, IndexKeyPool, KVPools, MHAPool, MLAPool, PageAllocator, SlotTable, torch_dtype
from attnplug.kv.workspace import WorkspaceOwner
from attnplug.layers.model_attention import plan_forward

CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Step:
    """One batch: how many new tokens each request gets; requests that are absent get none."""

    title: str
    mode: ForwardMode
    new_tokens: dict[int, int]


# Request 0 starts without a prefix and then decodes; 1 comes in two parts; 2 arrives while the others run.
STEPS = (
    Step("prefill, no prefix", ForwardMode.EXTEND, {0: 37, 1: 100}),
    Step("prefill with prefix", ForwardMode.EXTEND, {1: 29}),
    Step("mixed", ForwardMode.MIXED, {0: 1, 1: 33, 2: 50}),
    Step("decode", ForwardMode.DECODE, {2: 1, 0: 1, 1: 1}),
)


LONGEST = max(sum(step.new_tokens.get(request, 0) for step in STEPS) for request in (0, 1, 2))
"""Rows of the longest request at the end."""

_ROUNDING = {DType.FLOAT32: 0.0, DType.FLOAT16: 5e-3, DType.BFLOAT16: 2e-2}
CHECKED_DTYPES = tuple(_ROUNDING)


def allowed_error(dtype: DType, terms: int) -> float:
    """The largest error, relative to the largest value, that rounding explains.

    Every kernel sums in float32. ``terms`` counts the products of a logit and the rows, and rounding errors grow with
    its square root. Measured errors were at most a fifth of what this allows: over 110 seeds of torch_native and of
    plain einsum, and over 60 of MLA sums taken one term after the other. Results in a short type are rounded too.
    """
    return 4 * torch.finfo(torch.float32).eps * math.sqrt(terms) + _ROUNDING[dtype]


@dataclass(frozen=True, slots=True)
class Result:
    """One layer in one step: the largest errors and the time of plan and forward, or what went wrong."""

    layer: str
    step: str
    rows: int
    tolerance: float
    error: float = math.nan
    lse_error: float | None = None
    plan_ms: float = math.nan
    forward_ms: float = math.nan
    failure: str | None = None

    @property
    def holds(self) -> bool:
        # written so that NaN fails
        return self.error <= self.tolerance and (self.lse_error is None or self.lse_error <= self.tolerance)


class Clock:
    """The time, once a device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self._wait = torch.cuda.synchronize if device.type == "cuda" else None

    def now(self) -> float:
        if self._wait is not None:
            self._wait()
        return time.perf_counter()


class Scene:
    """Requests with random rows in permuted pages of a poisoned pool: anything that is wrongly read becomes NaN."""

    def __init__(
        self, layer: LayerSpec, dtype: DType, kv_dtype: DType, page_size: int, device: torch.device, seed: int
    ) -> None:
        self.layer, self.kv_dtype, self.device, self.page_size = layer, kv_dtype, device, page_size
        self.dtype = torch_dtype(dtype)
        self.tolerance = allowed_error(dtype, (layer.head_dim if layer.mla is None else layer.mla.row_dim) + LONGEST)
        self._clock = Clock(device)
        self.workspace = WorkspaceOwner()
        self._random = torch.Generator().manual_seed(seed)
        pages = 4 * (CONTEXT // page_size + 4)
        self.pools = _poisoned_pools(layer, pages, page_size, dtype, kv_dtype, device)
        allocator = PageAllocator(pages)
        self.table = SlotTable(allocator, page_size=page_size, max_requests=3, max_pages=pages, device=device)
        # Pages are returned in random order, so that no request's pages are neighbours.
        taken = allocator.allocate(pages)
        order = torch.randperm(pages, generator=self._random).tolist()
        allocator.release([taken[index] for index in order])
        self.rows = {request: self.table.admit() for request in (0, 1, 2)}
        self.keys: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
        self.values: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}

    def run(self, name: str, step: Step, backend: AttentionBackend, with_lse: bool) -> Result:
        for request, count in step.new_tokens.items():
            self.pools.copy_pages(self.table.extend(self.rows[request], count))
        q, k, v = self._inputs(step)
        batch = self._batch(step)
        started = self._clock.now()
        plan_forward(backend, batch)
        planned = self._clock.now()
        forward = backend.forward_decode if step.mode.is_decode else backend.forward_extend
        asked = self.extras(step, backend, batch)
        judging = self._clock.now()
        self.judge(step)
        judged = self._clock.now()
        out = forward(q, k, v, self.layer, batch, extras=asked)
        finished = self._clock.now()
        wanted, wanted_lse = self._wanted(step, q)
        error, lse_error = largest_error(out, wanted), None
        if out.dtype != q.dtype:
            raise BackendError(f"the result is {out.dtype}, but q is {q.dtype}; they must be the same")
        if with_lse:  # often another path of the same backend, so its output is checked again
            lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float32, device=self.device)
            extras = replace(asked or ForwardExtras(), lse=lse)
            again = forward(q, None, None, self.layer, batch, save_kv_cache=False, extras=extras)
            error = worse(error, largest_error(again, wanted))
            lse_error = largest_error(lse, wanted_lse)
        return Result(
            layer=name,
            step=step.title,
            rows=q.shape[0],
            error=error,
            lse_error=lse_error,
            tolerance=self.tolerance,
            plan_ms=1e3 * (planned - started),
            forward_ms=1e3 * (finished - planned - (judged - judging)),
        )

    def extras(self, step: Step, backend: AttentionBackend, batch: ForwardBatch) -> ForwardExtras | None:
        """What the layer needs beyond q, k and v."""
        return None

    def judge(self, step: Step) -> None:
        """Raise BackendError for a wrong answer to what ``extras`` asked of the backend, before it is used."""

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random, dtype=torch.float32).to(self.dtype)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, Tensor | None]:
        """Random q, k and v of a step on the device; keys and values are remembered as the cache will hold them."""
        layer, tokens = self.layer, sum(step.new_tokens.values())
        if layer.mla is not None:
            # Absorbing spreads a query of head_dim over a whole cache row; its length stays, and so do the logits'.
            shrink = (layer.head_dim / layer.mla.row_dim) ** 0.5
            q = self._normal(tokens, layer.num_heads, layer.mla.row_dim) * shrink
            k = self._normal(tokens, 1, layer.mla.row_dim)
            v, remembered = None, k[..., : layer.mla.kv_lora_rank]
        else:
            q = self._normal(tokens, layer.num_heads, layer.head_dim)
            k = self._normal(tokens, layer.num_kv_heads, layer.head_dim)
            v = remembered = self._normal(tokens, layer.num_kv_heads, layer.v_head_dim)
        lengths = list(step.new_tokens.values())
        for request, keys, values in zip(step.new_tokens, k.split(lengths), remembered.split(lengths), strict=True):
            kept = self._kept(keys)
            self.keys[request].append(kept)
            self.values[request].append(self._kept(values) if v is not None else kept[..., : values.shape[-1]])
        return q.to(self.device), k.to(self.device), None if v is None else v.to(self.device)

    def _kept(self, rows: Tensor) -> Tensor:
        """Rows as the cache will hold them, in float64."""
        if self.kv_dtype.is_element:
            return rows.to(torch_dtype(self.kv_dtype)).double()
        tokens = len(rows)
        pool = MLAPool([self.layer], num_pages=tokens, page_size=1, dtype=self.kv_dtype, device="cpu")
        pool.write(self.layer.layer_id, torch.arange(tokens), rows)
        return pool.read_rows(self.layer.layer_id, torch.arange(tokens)).double().unsqueeze(1)

    def _batch(self, step: Step) -> ForwardBatch:
        rows = [self.rows[request] for request in step.new_tokens]
        page_table, seq_lens = self.table.batch(rows)
        new, lens = list(step.new_tokens.values()), self.table.lengths_cpu(rows).tolist()
        return ForwardBatch(Geometry.of_lengths(step.mode, page_table, new, lens, self.page_size, seq_lens=seq_lens))

    def _wanted(self, step: Step, q: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        outputs = []
        for request, queries in zip(step.new_tokens, q.split(list(step.new_tokens.values())), strict=True):
            keys, values = torch.cat(self.keys[request]), torch.cat(self.values[request])
            outputs.append(
                attention_float64(
                    queries,
                    keys,
                    values,
                    scale=layer.scale,
                    first_position=keys.shape[0] - queries.shape[0],
                    window=layer.sliding_window,
                    cap=layer.logit_cap,
                )
            )
        return torch.cat([out for out, _ in outputs]), torch.cat([lse for _, lse in outputs])


def _poisoned_pools(
    layer: LayerSpec, pages: int, page_size: int, dtype: DType, kv_dtype: DType, device: torch.device
) -> KVPools:
    """A pool for the layer and all before it, filled with NaN."""
    layers = [replace(layer, layer_id=number) for number in range(layer.layer_id + 1)]
    if layer.kind is AttentionKind.MLA:
        mla = MLAPool(layers, num_pages=pages, page_size=page_size, dtype=kv_dtype, device=device)
        for each in layers:
            _poison(mla.rows(each.layer_id))
        if layer.indexer is None:
            return KVPools(mla=mla)
        keys = IndexKeyPool(layers, num_pages=pages, page_size=page_size, dtype=dtype, device=device)
        for each in layers:
            _poison(keys.keys(each.layer_id))
        return KVPools(mla=mla, caches={INDEX_KEYS: keys})
    mha = MHAPool(layers, num_pages=pages, page_size=page_size, dtype=kv_dtype, device=device)
    for each in layers:
        _poison(mha.keys(each.layer_id))
        _poison(mha.values(each.layer_id))
    return KVPools(mha=mha)


def _poison(memory: Tensor) -> None:
    """Make every number NaN, whatever types the bytes have."""
    if memory.dtype is torch.uint8:
        memory.fill_(0xFF)
    else:
        memory.copy_(torch.full((), float("nan"), dtype=torch.float32))


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest magnitude where that is above 1. NaN anywhere gives NaN."""
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        shape = tuple(found.shape) if isinstance(found, Tensor) else repr(found)
        raise BackendError(f"the result has shape {shape} and should have {tuple(wanted.shape)}")
    difference = (found.detach().cpu().double() - wanted).abs().max()
    return float(difference / wanted.abs().max().clamp(min=1.0))


def worse(one: float, other: float) -> float:
    """The larger error; NaN is the largest."""
    return max(one, other, key=lambda error: math.inf if math.isnan(error) else error)
