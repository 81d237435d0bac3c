"""Decode part of MLA steps: absorbed queries over the cache of a KV group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnplug import ExtendPath, ForwardExtras, ForwardMode, Geometry, Role
from attnplug.host import HostLengths, planner_claims
from attnplug.sparse import IndexInputs, SelectedPositions, SelectedRows, SelectedSlots
from attnplug_vllm.geometry import typical_lengths
from attnplug_vllm.kv_group import GroupAttention
from attnplug_vllm.planner import GroupPlanner, PlannedBatch
from attnplug_vllm.selection import serving_specs


@dataclass(slots=True, eq=False)
class DecodeStep:
    """The requests of a step that decode, with ``rows`` new tokens in total and at most ``max_new`` each.

    vLLM reads ``block_table`` and ``seq_lens`` of its own decode metadata, too. ``starts`` ``[requests + 1]`` are the
    first rows of the requests. ``host`` has starts and lengths on the CPU if a backend needs them or is chosen by them;
    they are exact if a backend needs them. ``takes_q_rope``: the backend that planned takes queries in two parts.
    ``selected_by``: the numbers of selected rows in the buffer that sparse layers share.
    """

    block_table: Tensor
    seq_lens: Tensor
    group: DecodeGroup
    rows: int
    max_new: int
    max_seq_len: int
    starts: Tensor
    host: tuple[Tensor, Tensor] | None = None
    planned: PlannedBatch | None = None
    takes_q_rope: bool = False
    selected_by: type[SelectedPositions] | type[SelectedSlots] = SelectedPositions

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        layer_name: str,
        lse: Tensor | None,
        selected: SelectedRows | None = None,
    ) -> Tensor:
        """Run one layer. q ``[rows, heads, latent]`` with q_rope ``[rows, heads, rope]``, or q with both in one;
        returns ``[rows, heads, latent]`` and fills lse ``[rows, heads]``. ``selected`` are the rows that a sparse layer
        attends to. The first layer plans the step for all."""
        planned = self._current()
        if q_rope is not None and not self.takes_q_rope:
            q, q_rope = torch.cat((q, q_rope), -1) if q_rope.shape[-1] else q, None
        attention, layer = planned.attention, self.group.specs[layer_name]
        extras = None
        if not (q_rope is None and lse is None and selected is None):
            extras = ForwardExtras(lse=lse, q_rope=q_rope, selected=selected)
        return attention.attend(q, None, None, layer, planned.batch, save_kv_cache=False, extras=extras)

    def select(self, index: IndexInputs, layer_name: str) -> SelectedRows:
        """Select the rows of a sparse layer by the backend's own index. The index keys are in the cache."""
        planned = self._current()
        select = planned.attention.hooks["select"]
        assert select is not None, "an attention over index keys has it"
        rows: SelectedRows = select(index, self.group.specs[layer_name], planned.batch)
        return rows

    def _current(self) -> PlannedBatch:
        planned = self.planned
        if planned is None:
            return self.group.plan(self)
        if planned.captured:
            planned.refill()
        return planned


class DecodeGroup:
    """Decode backends of a KV group.

    Several backends may share the role, one per batch. vLLM is then promised only what all of them declare.
    """

    def __init__(self, attention: GroupAttention, names: Mapping[str, int], max_captured_rows: int) -> None:
        self.attention, self._page_size = attention, attention.page_size
        self.planner = GroupPlanner(attention, max_captured_rows, max_captured_rows)
        mla = attention.model.layers[0].mla
        self._has_rope = mla is not None and mla.qk_rope_head_dim > 0
        by_id = {spec.layer_id: spec for spec in attention.model.layers}
        self.specs = {name: by_id[layer_id] for name, layer_id in names.items()}
        self.pages = -(-attention.model.context_length // attention.page_size)
        declared = [spec.capabilities for spec in serving_specs(attention.selection, Role.DECODE)]
        self.extends = all(ExtendPath.ABSORBED in capabilities.mla_extend for capabilities in declared)
        self.max_verified = min(capabilities.max_speculative_tokens for capabilities in declared)
        # vLLM does not prefill sparse layers itself: backends plan all their rows here.
        sparse = any(layer.indexer is not None for layer in attention.model.layers)
        roles = (Role.DECODE, Role.PREFILL) if sparse else (Role.DECODE,)
        planning = [serving_specs(attention.selection, role) for role in roles]
        self.needs_lengths = any(spec.capabilities.needs_cpu_seq_lens for specs in planning for spec in specs)
        self.shared = any(len(specs) > 1 for specs in planning)

    def plan(self, step: DecodeStep) -> PlannedBatch:
        """Plan a step that runs without a graph."""
        return self._publish(step, self.planner.plan(self.geometry(step)))

    def capture(self, step: DecodeStep) -> None:
        """Plan a step that a graph is about to capture."""
        key = step.block_table.shape[0], step.rows
        self._publish(step, self.planner.capture(key, self.geometry(step, captured=True)))

    def replay(self, step: DecodeStep) -> None:
        """Plan the replay of a graph, if a batch of this shape was captured."""
        self.planner.replay((step.block_table.shape[0], step.rows), step.seq_lens, step.block_table)

    def _publish(self, step: DecodeStep, planned: PlannedBatch) -> PlannedBatch:
        plan = planned.batch.plan
        assert plan is not None
        claims = planner_claims(planned.attention.backend, plan.attention)
        step.takes_q_rope = self._has_rope and "q_rope" in claims.extras
        step.planned = planned
        return planned

    def geometry(self, step: DecodeStep, *, captured: bool = False) -> Geometry:
        """Geometry of a step. That of a captured step has upper bounds only."""
        table, rows = step.block_table, step.rows
        requests = table.shape[0]
        if table.shape[1] > self.pages:
            table = table[:, : self.pages]
        uniform = rows == requests * step.max_new
        if step.max_new == 1 and uniform:
            mode = ForwardMode.DECODE
        else:
            few = uniform and step.max_new <= self.max_verified
            mode = ForwardMode.TARGET_VERIFY if few else ForwardMode.EXTEND
        page_size, known = self._page_size, None if captured else step.host
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
            typical=typical_lengths(known[1]) if known is not None and self.shared else None,
        )
        return geometry if known is None or not self.needs_lengths else _with_exact_lengths(geometry, *known)


def _with_exact_lengths(geometry: Geometry, starts: Tensor, seq_lens: Tensor) -> Geometry:
    """Add exact lengths on the host and drop padded requests, which come last."""
    kv_lens, new_lens = seq_lens.tolist(), starts.diff().tolist()
    while new_lens and not new_lens[-1]:
        new_lens.pop()
    live = len(new_lens)
    lengths = HostLengths(new_lens, kv_lens[:live])
    if live < geometry.requests:
        geometry = geometry.split(live)[0]
    return replace(geometry, rows=sum(new_lens), host=lengths)
