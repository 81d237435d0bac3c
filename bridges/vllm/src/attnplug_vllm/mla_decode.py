"""The decode part of MLA steps in vLLM: absorbed queries over the cache of a KV group.

A step only notes what it reads; it is planned when its first layer attends. A step that replays a full CUDA graph runs
no layer's Python, so it is not planned at all, except for what a backend does before a replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import ExtendPath, ForwardBatch, ForwardExtras, ForwardMode, Geometry, PlanError, Role
from attnplug.host import HostLengths, ModelAttention, TypicalLens, plan_forward, planner_claims
from attnplug_vllm.choice import serving_specs
from attnplug_vllm.memory import GroupAttention


@dataclass(slots=True, eq=False)
class DecodeStep:
    """The requests of a step that decode, with ``rows`` new tokens in all and at most ``max_new`` each.

    The first two are what vLLM's own metadata of a decode has, too. ``starts`` ``[requests + 1]`` are the first rows of
    requests. ``host`` are starts and lengths on the CPU, where backends are chosen by these or need them; exact ones if
    they need them. ``takes_parts`` says that the backend which planned takes queries in two parts. ``filled`` says for
    which run a captured step was last filled: the one that warms up, or the capture that follows with the same
    metadata.
    """

    block_table: Tensor
    seq_lens: Tensor
    group: DecodeGroup
    rows: int
    max_new: int
    max_seq_len: int
    starts: Tensor
    host: tuple[Tensor, Tensor] | None = None
    attention: ModelAttention | None = None
    batch: ForwardBatch | None = None
    takes_parts: bool = False
    captured: bool = False
    filled: bool | None = None

    def attend(self, q: Tensor, q_rope: Tensor | None, layer_name: str, lse: Tensor | None) -> Tensor:
        """One layer, ``[rows, heads, latent]``. The first one plans the step for all."""
        attention, batch = self.attention, self.batch
        if attention is None or batch is None:
            attention, batch = self.group.plan(self)
        elif self.captured and self.filled is not (capturing := torch.cuda.is_current_stream_capturing()):
            self.filled = capturing
            attention.refill(batch)
        if q_rope is not None and not self.takes_parts:
            q, q_rope = torch.cat((q, q_rope), -1), None
        backend = attention.backend
        run = backend.forward_decode if batch.forward_mode.is_decode else backend.forward_extend
        extras = None if q_rope is None and lse is None else ForwardExtras(lse=lse, q_rope=q_rope)
        return run(q, None, None, self.group.specs[layer_name], batch, save_kv_cache=False, extras=extras)


class DecodeGroup:
    """The decode backend of a KV group, and the batches that CUDA graphs have captured.

    Several may share the role, by batch. Then only what all of them declare is relied on.
    """

    def __init__(self, attention: GroupAttention, names: Mapping[str, int], captured_rows: int) -> None:
        self._group, self._captured_rows = attention, captured_rows
        by_id = {spec.layer_id: spec for spec in attention.model.layers}
        self.specs = {name: by_id[layer_id] for name, layer_id in names.items()}
        self.pages = -(-attention.model.context_length // attention.page_size)
        able = [spec.capabilities for spec in serving_specs(attention.selection, Role.DECODE)]
        self.extends = all(ExtendPath.ABSORBED in can.mla_extend for can in able)
        self.verifies = all(can.max_speculative_tokens for can in able)
        self.needs_lengths = any(can.needs_cpu_seq_lens for can in able)
        self.shared = len(able) > 1
        self._attention: ModelAttention | None = None
        self._batches: dict[tuple[int, int], ForwardBatch] = {}
        """Of the attention that is built now, by requests and rows."""

    def ready(self) -> ModelAttention:
        """The attention over the caches that are bound now; graphs over others are gone."""
        attention = self._group.ready()
        if attention is not self._attention:
            self._attention = attention
            self._batches.clear()
        return attention

    def plan(self, step: DecodeStep) -> tuple[ModelAttention, ForwardBatch]:
        """Plan a step that runs without a graph."""
        attention = self.ready()
        batch = ForwardBatch(self.geometry(step))
        plan_forward(attention.backend, batch)
        self._planned(step, attention, batch)
        return attention, batch

    def capture(self, step: DecodeStep) -> None:
        """Plan a step that a graph is about to capture. It reads lengths and pages where they lie at every replay."""
        attention = self.ready()
        if not self._batches:
            attention.reserve_graphs(self._captured_rows, self._captured_rows)
            if padding := attention.padding_length():
                raise PlanError(
                    f"backend {attention.backend.backend_id.name} captures graphs with padded requests of length "
                    f"{padding}, and vLLM's have none; set --compilation-config.cudagraph_mode PIECEWISE"
                )
        batch = ForwardBatch(self.geometry(step, captured=True))
        attention.plan_captured(batch, in_capture=True)
        self._batches[batch.batch_size, step.rows] = batch
        self._planned(step, attention, batch)
        step.captured = True

    @staticmethod
    def _planned(step: DecodeStep, attention: ModelAttention, batch: ForwardBatch) -> None:
        assert batch.plan is not None
        step.attention, step.batch = attention, batch
        step.takes_parts = "q_rope" in planner_claims(attention.backend, batch.plan.attention).extras

    def replay(self, step: DecodeStep) -> None:
        """Plan the replay of a graph, if a batch of this shape was captured. vLLM may still run it without the graph.

        Captured kernels read vLLM's tensors where they were; other ones are copied there.
        """
        batch = self._batches.get((step.block_table.shape[0], step.rows))
        if batch is None or self._group.ready() is not self._attention:
            return
        table, seq_lens = batch.geometry.page_table, batch.geometry.seq_lens
        if step.seq_lens.data_ptr() != seq_lens.data_ptr():
            seq_lens.copy_(step.seq_lens)
        if step.block_table.data_ptr() != table.data_ptr():
            table.copy_(step.block_table[:, : table.shape[1]])
        self._attention.plan_captured(batch)

    def geometry(self, step: DecodeStep, *, captured: bool = False) -> Geometry:
        table, rows = step.block_table, step.rows
        requests = table.shape[0]
        if table.shape[1] > self.pages:
            table = table[:, : self.pages]
        uniform = rows == requests * step.max_new
        if not uniform:
            mode = ForwardMode.EXTEND
        else:
            mode = ForwardMode.DECODE if step.max_new == 1 else ForwardMode.TARGET_VERIFY
        page_size, known = self._group.page_size, None if captured else step.host
        geometry = Geometry(
            mode,
            table,
            step.seq_lens,
            page_size,
            rows=rows,
            max_seq_len=min(step.max_seq_len, table.shape[1] * page_size),
            max_new=step.max_new,
            new_lens=None if uniform else step.starts.diff(),
            captured=captured,
            typical=_typical(known[1]) if known is not None and self.shared else None,
        )
        return geometry if known is None or not self.needs_lengths else _exact(geometry, *known)


def _typical(seq_lens: Tensor) -> TypicalLens:
    """Of requests that are there: those that only pad a batch have length 0."""
    return TypicalLens.of([length for length in seq_lens.tolist() if length])


def _exact(geometry: Geometry, starts: Tensor, seq_lens: Tensor) -> Geometry:
    """With exact lengths on the host. Requests that only pad the batch, at its end, are left out."""
    kv_lens, new_lens = seq_lens.tolist(), starts.diff().tolist()
    while new_lens and not new_lens[-1]:
        new_lens.pop()
    live = len(new_lens)
    lengths = HostLengths(new_lens, kv_lens[:live])
    if live < geometry.requests:
        geometry = geometry.split(live)[0]
    return replace(geometry, rows=sum(new_lens), host=lengths)
