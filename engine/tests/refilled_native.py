"""``torch_native`` and ``torch_sparse`` with the hooks of captured batches: planned anew at each replay.

On a CPU nothing is captured: a replay makes the same calls again. So padding, planning, sampling and feeding tokens
back run on the code path that CUDA graphs have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from naive_linear import WholeDeltaBackend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnplug import (
    AttentionBackend,
    BackendContext,
    Claims,
    ForwardBatch,
    ForwardExtras,
    Geometry,
    GraphLevel,
    LayerSpec,
    Plan,
    RaggedCall,
    Role,
)
from attnplug.host import HostContext, Selection
from attnplug.linear import LinearStatePool
from attnplug.sparse import IndexerDims, IndexInputs, SelectedPositions
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_engine import Engine
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_sparse.torch_sparse import TorchSparseBackend

NAME = "torch_native"
SPARSE = "torch_sparse"


class Refilled:
    """Tensors of a replay's plan."""

    groups = ()
    rows = 0


class Refilling:
    """Mixin for a reference backend."""

    def __init__(self, context: BackendContext, fill: int = 0) -> None:
        super().__init__(context)
        self.claims = replace(self.claims, cuda_graph=GraphLevel.UNIFORM)
        self.fill, self.planned = fill, 0

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.fill

    def plan(self, geometry: Geometry) -> Plan:
        self.planned += 1
        return super().plan(geometry)

    def capture(self, geometry: Geometry, memory: None) -> Plan:
        slots = torch.full((geometry.rows,), -1, dtype=torch.int64)
        return Plan.of(self.backend_id, geometry, Refilled(), slots)

    def refill(self, plan: Plan, geometry: Geometry) -> None:
        now = geometry.with_host_lengths()
        assert plan.new_slots is not None
        plan.new_slots.fill_(-1)
        plan.metadata.rows, plan.metadata.groups = now.rows, ()
        if now.rows:
            eager = super().plan(now)
            plan.metadata.groups = eager.metadata
            plan.new_slots[: now.rows] = eager.new_slots

    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new, extras: ForwardExtras) -> Tensor:
        refilled = plan.metadata
        if not isinstance(refilled, Refilled):
            return super().attend(q, layer, plan, new, extras)
        width = layer.v_head_dim if layer.mla is None else layer.mla.kv_lora_rank
        out = q.new_zeros(*q.shape[:2], width)
        if refilled.rows:
            now = replace(plan, metadata=refilled.groups, query_rows=refilled.rows)
            if extras.selected is not None:
                selected = extras.selected
                chosen = selected.positions if isinstance(selected, SelectedPositions) else selected.slots
                extras = replace(extras, selected=type(selected)(chosen[: refilled.rows]))
            out[: refilled.rows] = super().attend(q[: refilled.rows], layer, now, new, extras)
        return out


class AnyBatch(Refilling):
    """Captures extends, too."""

    def __init__(self, context: BackendContext, fill: int = 0) -> None:
        super().__init__(context, fill)
        self.claims = replace(self.claims, cuda_graph=GraphLevel.ALWAYS)


class AnyRagged(AnyBatch):
    """Captures ragged calls of MLA extends, too. Counts them; notes the rows that its last one had."""

    def __init__(self, context: BackendContext, fill: int = 0) -> None:
        super().__init__(context, fill)
        self.claims = replace(self.claims, ragged_graphs=True)
        self.captured_calls = 0

    def forward_ragged(self, q, k, v, layer, call, plan=None, lse=None):
        if call.padded_rows is None:
            return super().forward_ragged(q, k, v, layer, call, plan, lse)
        assert lse is None and not call.query_lens and call.query_indptr is call.kv_indptr
        call.check(q, k, v)
        lens = [length for length in call.query_indptr.diff().tolist() if length]
        live, out = sum(lens), q.new_zeros(*q.shape[:2], v.shape[-1])
        self.captured_calls += 1
        if live:
            now = RaggedCall.of(call.index, lens, lens, causal=True, device=q.device)
            out[:live] = super().forward_ragged(q[:live], k[:live], v[:live], layer, now)
        return out


class RefilledNative(Refilling, TorchNativeBackend):
    pass


class RefilledSparse(Refilling, TorchSparseBackend):
    def choose(self, index: IndexInputs, layer: LayerSpec, dims: IndexerDims, plan: Plan) -> SelectedPositions:
        refilled = plan.metadata
        if not isinstance(refilled, Refilled):
            return super().choose(index, layer, dims, plan)
        chosen = torch.full((index.q.shape[0], dims.topk), -1, dtype=torch.int32)
        if refilled.rows:
            now = replace(plan, metadata=refilled.groups, query_rows=refilled.rows)
            live = IndexInputs(index.q[: refilled.rows], None, index.weights[: refilled.rows])
            chosen[: refilled.rows] = super().choose(live, layer, dims, now).positions
        return SelectedPositions(chosen)


class RefilledDelta(WholeDeltaBackend):
    """Linear attention that reads its slots at every replay."""

    def __init__(self, pool: LinearStatePool) -> None:
        super().__init__(pool)
        self.claims = Claims(cuda_graph=GraphLevel.DECODE, needs_cpu_seq_lens=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        pass

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        return Plan.of(self.backend_id, forward_batch.geometry)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        pass

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0

    def _rows(self, batch: ForwardBatch) -> Iterator[tuple[int, int]]:
        if batch.geometry.host is not None:
            yield from super()._rows(batch)
            return
        slots = batch.geometry.state_slots.tolist()
        yield from ((slot, row) for row, slot in enumerate(slots) if slot >= 0)


def over(kind: Any, base: type = RefilledNative) -> Any:
    """A ``Refilling`` mixin over a reference backend. ``RefilledNative`` itself gives ``base``."""
    if isinstance(kind, partial):
        return partial(over(kind.func, base), *kind.args, **kind.keywords)
    if kind is RefilledNative:
        return base
    return kind if issubclass(kind, base) else type(kind.__name__, (kind, base), {})


def build(
    selection: Selection,
    context: HostContext,
    kind: Any = RefilledNative,
    linear: type[RefilledDelta] = RefilledDelta,
) -> AttentionBackend:
    role = Role.DRAFT if selection.problem.is_draft else Role.DECODE
    if role not in selection.choices:
        return HybridLinearBackend(None, linear(context.pools.linear), context.model)
    registered = selection.chosen(role)
    name = registered.spec.name
    assert name in (NAME, SPARSE)
    kind = over(kind, RefilledSparse if name == SPARSE else RefilledNative)
    roles = frozenset({Role.DRAFT} if selection.problem.is_draft else {Role.PREFILL, Role.DECODE})
    full = kind(context.for_backend(name, registered.spec.capabilities, roles=roles, options=None))
    if context.pools.linear is None:
        return full
    return HybridLinearBackend(full, linear(context.pools.linear), context.model)


class Recorded:
    """Fake capture that computes nothing, as a graph's: tensors made by the captured run are poison until a replay.

    Writes to memory that existed before do take place, though.
    """

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # a warm-up
        with _Made() as made:
            run()
        for tensor in made.tensors:
            if tensor.dtype is not torch.bool:
                tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 2)
        return run


class _Made(TorchDispatchMode):
    """Notes the tensors that operations make in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors((*args, *kwargs.values()))}
        out = func(*args, **kwargs)
        self.tensors += [tensor for tensor in _tensors(out) if tensor.untyped_storage().data_ptr() not in memory]
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    """Return the tensors of an operation's arguments or results. torch's ``tree_leaves`` takes ten times as long."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def captured(engine: Engine, sizes: tuple[int, ...], prefills: tuple[int, ...] = ()) -> Engine:
    """The engine with decode steps, or rounds, "captured" for these sizes, and prefills for these numbers of tokens."""
    if engine.rounds is not None:
        engine.rounds.capture(sizes, Recorded(), prefills=prefills)
    else:
        capture_steps(engine.runner, sizes, Recorded(), prefills=prefills)
    return engine
