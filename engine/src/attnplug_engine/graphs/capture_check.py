"""Start-up check of captured attention against the backend's own eager attention.

A backend that claims more than it supports reads the lengths or pages of the capture at every replay. That gives wrong
tokens and no error, so the check runs before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum

import torch
from torch import Tensor

from attnplug import (
    AttentionBackend,
    AttentionKind,
    BackendError,
    ExtendPath,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    LayerSpec,
    MLAPool,
    ModelSpec,
    Plan,
)
from attnplug.contract.batch import BatchPlan
from attnplug.host import (
    ForwardingBackend,
    HostLengths,
    KVPools,
    MLAWeights,
    ModelAttention,
    installed_format,
    planner_claims,
)
from attnplug.linear import DeltaInputs, DeltaWeights, LinearDims, LinearInputs
from attnplug.machine.runtime import runtime_of
from attnplug.sparse import IndexerDims, IndexInputs
from attnplug_engine.graphs.capture import CaptureFunction
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_sparse.hisparse import HiSparse
from attnplug_sparse.pools import INDEX_KEYS
from attnplug_sparse.selection import select_rows

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_MAX_PAGES = 64
"""Most pages of all requests of a check: a few thousand rows."""
_FEW = 4
"""Requests of a checked captured extend; their numbers of new tokens differ."""
_ROUNDS = 2


class CaptureFault(StrEnum):
    """Difference between a replay and an eager run of the same batch."""

    RESULT = "result"
    PADDING = "padding"
    WRITES = "writes"


class CaptureMismatch(BackendError):
    """A backend cannot be captured as it claims. ``fault`` is the difference, ``kind`` the layer's attention kind."""

    def __init__(self, message: str, fault: CaptureFault, kind: AttentionKind) -> None:
        super().__init__(message, settings=["disable_cuda_graph"])
        self.fault, self.kind = fault, kind


class CaptureCheck:
    """Runs one layer of each kind of a rank's ``model`` over random rows, captured and eager, and compares the
    outputs."""

    def __init__(
        self,
        model: ModelSpec,
        attention: ModelAttention,
        pools: KVPools,
        allocator: PageAllocator,
        dtype: torch.dtype,
        device: torch.device,
        coordinator: HiSparse | None = None,
    ) -> None:
        # A layer that shares another layer's selection attends as that layer does.
        layers = [layer for layer in model.layers if layer.indexer is None or layer.indexer.shares is None]
        alike = {replace(layer, layer_id=0): layer for layer in reversed(layers)}
        self._layers = list(alike.values())
        self._attention, self._pools, self._allocator = attention, pools, allocator
        self._dtype, self._device, self._coordinator = dtype, device, coordinator
        self._random = torch.Generator(device=device).manual_seed(17)

    def run(self, batch: ForwardBatch, capture: CaptureFunction) -> None:
        """Check the captured ``batch``, which holds padding before and after. Raises BackendError."""
        as_mha = batch.plan is not None and batch.plan.extend is not None
        for layer in self._layers:
            if as_mha and layer.mla is None:
                continue  # checked in the graph in which MLA layers run absorbed
            outs: list[Tensor] = []
            call = (self._mha_call if as_mha else self._call)(layer, batch.geometry.rows)

            def run(call: Callable[[ForwardBatch], Tensor] = call, outs: list[Tensor] = outs) -> None:
                self._attention.refill(batch)
                outs[:] = [call(batch)]

            replay = capture(run)
            for _ in range(_ROUNDS):
                with self._requests(layer, batch, prefixes=not as_mha) as eager:
                    before = self._states(layer, eager)
                    others = self._others(layer, eager)
                    self._plan_before_inputs(batch)
                    replay()
                    found = outs[0].clone()
                    strayed = not all(map(torch.equal, others, self._others(layer, eager)))
                    for part, values in before:
                        part.copy_(values)
                    self._plan_alike(eager, batch)
                    expected = call(eager)
                self._compare(layer, batch, found, expected, strayed=strayed)

    def _plan_alike(self, eager: ForwardBatch, captured: ForwardBatch) -> None:
        """Plan a batch with the backends that planned the captured one, independent of its lengths."""
        assert captured.plan is not None
        if captured.plan.extend is not None:
            self._attention.plan(eager, ExtendPath.CHUNKED)
            return
        plan = plan_alike(self._attention.backend, captured.plan.attention, eager)
        eager.plan = BatchPlan(plan, geometry=eager.geometry)

    def _plan_before_inputs(self, batch: ForwardBatch) -> None:
        """Plan as a step does: lengths, pages and slots are updated only inside the graph."""
        static = self._static(batch.geometry)
        given = [tensor.clone() for tensor in static]
        for tensor in static:
            tensor.fill_(-1)
        batch.geometry.seq_lens.fill_(self._attention.padding_length())
        self._attention.capture(batch)
        for tensor, values in zip(static, given, strict=True):
            tensor.copy_(values)

    def _call(self, layer: LayerSpec, rows: int) -> Callable[[ForwardBatch], Tensor]:
        """Return one layer's attention over fixed random inputs, limited to the rows of a batch."""
        if layer.linear is not None:
            return self._linear_call(layer, layer.linear, rows)
        backend, heads, kv_heads = self._attention.backend, layer.num_heads, layer.num_kv_heads
        values = None
        if layer.mla is not None:
            q, k = self._rand(rows, heads, layer.mla.row_dim), self._rand(rows, 1, layer.mla.row_dim)
        else:
            q, k = self._rand(rows, heads, layer.head_dim), self._rand(rows, kv_heads, layer.head_dim)
            values = self._rand(rows, kv_heads, layer.v_head_dim)
        extras = ForwardExtras(sinks=self._rand(heads).float()) if layer.sinks else None
        index = None if layer.indexer is None else self._index(layer.indexer, rows)

        def full(batch: ForwardBatch) -> Tensor:
            n = batch.geometry.rows
            new = None if values is None else values[:n]
            run = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
            asked = extras
            if index is not None:
                limited = IndexInputs(index.q[:n], None if index.k is None else index.k[:n], index.weights[:n])
                selected = select_rows(self._attention, limited, layer, batch)
                asked = replace(extras or ForwardExtras(), selected=selected)
            return run(q[:n], k[:n], new, layer, batch, extras=asked).flatten(1)

        return full

    def _mha_call(self, layer: LayerSpec, rows: int) -> Callable[[ForwardBatch], Tensor]:
        """Return one MLA layer's attention as MHA over fixed random inputs."""
        assert layer.mla is not None
        heads, rank, nope = layer.num_heads, layer.mla.kv_lora_rank, layer.mla.qk_nope_head_dim
        up = [self._rand(*shape) / rank**0.5 for shape in ((heads, nope, rank), (heads, rank, layer.v_head_dim))]
        weights = MLAWeights(*up)
        q, new = self._rand(rows, heads, layer.head_dim), self._rand(rows, layer.mla.row_dim)

        def run(batch: ForwardBatch) -> Tensor:
            n = batch.geometry.rows
            return self._attention.attend_mla(q[:n], new[:n], layer, weights, batch).flatten(1)

        return run

    def _index(self, dims: IndexerDims, rows: int) -> IndexInputs:
        q, k = self._rand(rows, dims.heads, dims.head_dim), self._rand(rows, dims.head_dim)
        return IndexInputs(q, k, self._rand(rows, dims.heads).float())

    def _linear_call(self, layer: LayerSpec, dims: LinearDims, rows: int) -> Callable[[ForwardBatch], Tensor]:
        attention, kind = self._attention, layer.kind
        delta = kind in (AttentionKind.GDN, AttentionKind.KDA)
        keys = (rows, dims.key_heads, dims.key_dim)
        q, k, v = self._rand(*keys), self._rand(*keys), self._rand(rows, dims.heads, dims.value_dim)
        by_channel = (dims.key_dim,) if kind is AttentionKind.KDA else ()
        shape = (dims.heads,) if kind is AttentionKind.LIGHTNING else (rows, dims.heads, *by_channel)
        decay, beta = -self._rand(*shape).float().abs(), self._rand(rows, dims.heads).sigmoid()
        x, weight = self._rand(rows, dims.conv_channels), self._rand(dims.conv_channels, dims.conv_width)
        whole = self._whole_layer(dims, x, weight, by_channel) if delta and dims.conv_width else None

        def linear(batch: ForwardBatch) -> Tensor:
            n, outs = batch.geometry.rows, []
            if whole is not None:
                rows_of = {name: getattr(whole, name)[:n] for name in ("rows", "decay", "beta", "gate")}
                out = attention.attend_delta(replace(whole, **rows_of), layer, batch)
                if out is not None:
                    outs.append(out)
            if dims.heads:
                decays, betas = decay[:n] if decay.dim() > 1 else decay, beta[:n] if delta else None
                inputs = LinearInputs(q[:n], k[:n], v[:n], decays, betas, normalize=delta)
                outs.append(attention.attend_linear(inputs, layer, batch).flatten(1))
            if dims.conv_width:
                outs.append(attention.convolve(x[:n], weight, None, layer, batch))
            return torch.cat(outs, 1)

        return linear

    def _whole_layer(self, dims: LinearDims, x: Tensor, weight: Tensor, by_channel: tuple[int, ...]) -> DeltaInputs:
        """Inputs of ``attend_delta``. It advances the states of the parts, which run after it."""
        rows, heads = x.shape[0], dims.heads
        rate, bias = -self._rand(heads).float().exp(), self._rand(heads, *by_channel).float()
        norm = self._rand(dims.value_dim).float()
        weights = DeltaWeights(weight, rate.unsqueeze(-1) if by_channel else rate, bias, norm, 1e-6, silu=True)
        decay, gate = self._rand(rows, heads, *by_channel), self._rand(rows, heads, dims.value_dim)
        return DeltaInputs(x, decay, self._rand(rows, heads), gate, weights)

    def _rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random, device=self._device).to(self._dtype)

    @contextmanager
    def _requests(self, layer: LayerSpec, batch: ForwardBatch, *, prefixes: bool) -> Iterator[ForwardBatch]:
        """Fill the captured batch with requests of random lengths over random rows, with or without ``prefixes``; yield
        the same batch for eager runs."""
        captured = batch.geometry
        size, width, page_size = captured.requests, captured.page_table.shape[1], captured.page_size
        new, room = captured.max_new, min(self._allocator.free_pages, _MAX_PAGES)
        live = size - size // 4
        if ragged := captured.new_lens is not None:
            live = min(live, _FEW)
            new = min(captured.rows // live, max(room // live, 1) * page_size)  # upper bound
        least = -(-new // page_size)  # pages of a request
        live = max(min(live, room // least), 1) if room >= least else 0
        each = min(room // max(live, 1), width)
        pages = self._allocator.allocate(live * each)
        longest = min(each * page_size, captured.max_seq_len)
        shares = torch.rand(2, live, generator=self._random, device=self._device).tolist()
        news = [1 + int(share * min(new, longest)) if ragged else new for share in shares[0]]
        lens = [count + int(share * (longest - count + 1)) for count, share in zip(news, shares[1], strict=True)]
        lens = lens if prefixes else news
        table = torch.tensor(pages, dtype=torch.int32, device=self._device).view(live, each)
        before = [tensor[:live].clone() for tensor in self._static(captured)]
        caches, table_rows = self._caches(layer), None
        try:
            self._write_random(layer, table.flatten().long(), page_size)
            if self._coordinator is not None and captured.table_rows is not None:
                table_rows = torch.arange(live, device=self._device)
                captured.table_rows[:live] = table_rows
                self._forget(live)
            captured.page_table[:live, :each] = table
            captured.seq_lens[:live] = torch.tensor(lens, dtype=torch.int32, device=self._device)
            new_lens = None
            if captured.new_lens is not None:
                captured.new_lens[:live] = torch.tensor(news, dtype=torch.int32, device=self._device)
                new_lens = captured.new_lens[:live].clone()
            if captured.tree is not None:  # every row sees itself and the first one
                captured.tree[:live] = (1 << torch.arange(new, device=self._device)) | 1
            slots = None
            if captured.state_slots is not None:
                slots = torch.arange(live, device=self._device)
                captured.state_slots[:live] = slots
            yield ForwardBatch(
                Geometry(
                    captured.mode,
                    table,
                    captured.seq_lens[:live].clone(),
                    page_size,
                    rows=sum(news),
                    max_seq_len=max(lens, default=0),
                    max_new=max(news, default=0) if ragged else new,
                    new_lens=new_lens,
                    host=HostLengths(news, lens),
                    state_slots=slots,
                    table_rows=table_rows,
                    tree=None if captured.tree is None else captured.tree[:live].clone(),
                )
            )
        finally:
            for tensor, values in zip(self._static(captured), before, strict=True):
                tensor[:live] = values
            self._forget(live)
            for cache in caches:
                _cells(cache)[table.flatten().long().to(cache.device)] = 0
            self._allocator.release(pages)

    def _forget(self, live: int) -> None:
        """Empty the hot buffers, because pages get other rows. The host may write host memory again afterwards."""
        if self._coordinator is not None:
            for row in range(live):
                self._coordinator.release(row)
            self._wait()

    def _wait(self) -> None:
        if (module := runtime_of(self._device).module) is not None:
            module.synchronize(self._device)

    @staticmethod
    def _static(captured: Geometry) -> list[Tensor]:
        also = (captured.new_lens, captured.state_slots, captured.tree, captured.table_rows)
        return [captured.page_table, captured.seq_lens, *(part for part in also if part is not None)]

    def _caches(self, layer: LayerSpec) -> Sequence[Tensor]:
        """Caches of the layer's rows, ``[pages, page_size, …]``, each of one dtype."""
        mha, mla = self._pools.mha, self._latent_pool(layer)
        if mla is not None:
            keys = () if layer.indexer is None else self._pools.cache(INDEX_KEYS).parts(layer.layer_id)
            return [*mla.parts(layer.layer_id), *keys]
        if layer.linear is None and mha is not None:
            return [part for parts in mha.parts(layer.layer_id) for part in parts]
        return []

    def _latent_pool(self, layer: LayerSpec) -> MLAPool | None:
        """Return the pool with all latent rows of an MLA layer, in host memory if they are there."""
        mla = self._pools.mla
        if layer.mla is None or mla is None or self._coordinator is None:
            return None if layer.mla is None else mla
        stored, layout = {layer.layer_id: self._coordinator.host_pages(layer.layer_id)}, "pages tokens heads dim"
        return MLAPool.over([layer], stored, layout, page_size=mla.page_size, dtype=installed_format(mla.dtype))

    def _write_random(self, layer: LayerSpec, pages: Tensor, size: int) -> None:
        """Write random rows of a layer to all slots of ``pages`` of ``size`` tokens. Random bytes could be NaN."""
        mha, mla, layer_id = self._pools.mha, self._latent_pool(layer), layer.layer_id
        if layer.linear is not None or not len(pages):
            return
        slots = (pages.unsqueeze(1) * size + torch.arange(size, device=pages.device)).flatten()
        if mla is not None and layer.mla is not None:
            host = mla.rows(layer_id).device
            mla.write(layer_id, slots.to(host), self._rand(len(slots), layer.mla.row_dim).to(host))
            if layer.indexer is not None:
                self._pools.cache(INDEX_KEYS).write(layer_id, slots, self._rand(len(slots), layer.indexer.head_dim))
        elif mha is not None:
            widths, heads = (layer.head_dim, layer.v_head_dim), layer.num_kv_heads
            mha.write(layer_id, slots, *(self._rand(len(slots), heads, width) for width in widths))

    def _states(self, layer: LayerSpec, batch: ForwardBatch) -> list[tuple[Tensor, Tensor]]:
        """Fill a linear layer's states of a batch's requests with random values; return views and copies of them."""
        linear = self._pools.linear
        if layer.linear is None or linear is None:
            return []
        held = [state for state in (linear.recurrent(layer.layer_id), linear.conv(layer.layer_id)) if state is not None]
        parts = [state[: batch.batch_size] for state in held]
        for part in parts:
            part.copy_(self._rand(*part.shape))
        return [(part, part.clone()) for part in parts]

    def _others(self, layer: LayerSpec, batch: ForwardBatch) -> list[Tensor]:
        """Copy what a step of these requests must not change: all rows except the new ones, and a linear layer's last
        slot, which is unused. Wrong writes of padded requests mostly go there."""
        geometry, linear, kept = batch.geometry, self._pools.linear, []
        requests = torch.arange(batch.batch_size, device=self._device).unsqueeze(1)
        back = torch.arange(geometry.max_new, device=self._device).expand(batch.batch_size, -1)
        if geometry.new_lens is not None:
            back = torch.minimum(back, geometry.new_lens.unsqueeze(1) - 1)
        last = geometry.seq_lens.long().unsqueeze(1) - 1 - back
        if self._coordinator is not None:
            self._wait()
        for cache in self._caches(layer):
            rows = _cells(cache)[geometry.page_table.long().to(cache.device)].flatten(1, 2)
            rows[requests.to(cache.device), last.to(cache.device)] = 0
            kept.append(rows.contiguous().view(torch.uint8))
        if layer.linear is not None and linear is not None and linear.num_slots > batch.batch_size:
            states = (linear.recurrent(layer.layer_id), linear.conv(layer.layer_id))
            kept += [state[-1].clone() for state in states if state is not None]
        return kept

    def _compare(
        self, layer: LayerSpec, batch: ForwardBatch, found: Tensor, expected: Tensor, *, strayed: bool
    ) -> None:
        assert batch.plan is not None
        plan, live = batch.plan.attention, len(expected)
        claims, name = planner_claims(self._attention.backend, plan), " and ".join(plan.planner_names())
        error = float((found[:live].double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
        if not error <= _TOLERANCE[self._dtype]:  # also true for NaN
            fault, what = CaptureFault.RESULT, f"differs from an eager run by {error:.1e} of its size"
        elif not self._attention.padding_length() and found[live:].any():
            fault, what = CaptureFault.PADDING, "gives padded requests something else than zero"
        elif strayed:
            fault, what = CaptureFault.WRITES, "writes to rows or states that are not its requests' newest"
        else:
            return
        where = f"layer {layer.layer_id}, {layer.kind}"
        size = f"{batch.batch_size} requests" if batch.geometry.new_lens is None else f"{batch.geometry.rows} tokens"
        raise CaptureMismatch(
            f"backend {name} claims cuda_graph {claims.cuda_graph.name}, but a replay of its captured "
            f"{batch.forward_mode} of {size} {what} ({where}): it "
            "cannot be captured as it claims; choose another backend, or turn graphs off by `disable_cuda_graph`",
            fault,
            layer.kind,
        )


def _cells(cache: Tensor) -> Tensor:
    """Return a view that torch can index: it indexes bytes everywhere, float8 only on some devices."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def plan_alike(backend: AttentionBackend, plan: Plan, batch: ForwardBatch) -> Plan:
    """Plan an eager batch with the same children that made ``plan``, this backend's plan of another batch."""
    if not isinstance(backend, ForwardingBackend):
        return backend.init_forward_metadata(batch)
    made = {
        label: plan_alike(child, part, batch)
        for label, child in backend.children.items()
        for part in plan.parts
        if part.planner is child.backend_id
    }
    return backend.plan_of(batch, made, "init_forward_metadata")
