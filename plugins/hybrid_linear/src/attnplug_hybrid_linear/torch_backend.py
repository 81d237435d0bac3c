"""Linear attention with torch operations: states are gathered by slot, taken through the new tokens, and put back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from attnplug import (
    BackendContext,
    BackendId,
    Claims,
    ForwardBatch,
    ForwardMode,
    Geometry,
    LayerSpec,
    LinearInputs,
    Plan,
)
from attnplug_hybrid_linear.convolution import convolve, newest_rows
from attnplug_hybrid_linear.planner import Group, Grouping, plan_groups
from attnplug_hybrid_linear.recurrence import Tokens, advance
from attnplug_hybrid_linear.states import States, check_accepted, nothing_to_commit, slots_of


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a target verify keeps for its commit: each layer's inputs, group by group, by layer id."""

    tokens: dict[int, list[Tokens]] = field(default_factory=dict)
    conv_rows: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not self.tokens and not self.conv_rows

    def clear(self) -> None:
        self.tokens.clear()
        self.conv_rows.clear()


@dataclass(frozen=True, slots=True, eq=False)
class LinearMetadata:
    """The groups of a batch; ``verified`` is there for a target verify, and filled as its layers run."""

    grouping: Grouping
    verified: Verified | None


class TorchLinearBackend:
    """GDN, KDA, Lightning, Mamba2 and short convolutions. Holds the pool of states and nothing of any batch."""

    claims = Claims()

    def __init__(self, context: BackendContext) -> None:
        self.backend_id = BackendId(context.name)
        self._page_size = context.page_size
        self._states = States(context)

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        geometry = Geometry.of(batch, self._page_size)
        verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        return Plan(
            planner=self.backend_id,
            mode=batch.forward_mode,
            query_rows=geometry.query_rows,
            kv_rows=geometry.kv_rows,
            metadata=LinearMetadata(plan_groups(geometry.query_lens, slots_of(batch)), Verified() if verify else None),
        )

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        metadata: LinearMetadata = batch.plan_for(self.backend_id, x.shape[0]).metadata
        states = self._states.conv(layer.layer_id)
        kept, results = [], []
        for group in metadata.grouping.groups:
            rows, before = x[group.rows], states[group.slots]
            results.append(convolve(rows, before, weight, bias, silu=silu))
            if metadata.verified is None:
                _put(states, group, newest_rows(rows, before, group.lens))
            kept.append(rows)
        if metadata.verified is not None:
            metadata.verified.conv_rows[layer.layer_id] = kept
        return metadata.grouping.in_batch_order(results, x.new_zeros(1, x.shape[1]), x.shape[0])

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        v = inputs.v
        metadata: LinearMetadata = batch.plan_for(self.backend_id, v.shape[0]).metadata
        states = self._states.recurrent(layer.layer_id)
        kept, results = [], []
        for group in metadata.grouping.groups:
            tokens = _tokens(inputs, group, layer.scale)
            out, after = advance(tokens, states[group.slots])
            results.append(out.to(v.dtype))
            if metadata.verified is None:
                _put(states, group, after)
            kept.append(tokens)
        if metadata.verified is not None:
            metadata.verified.tokens[layer.layer_id] = kept
        return metadata.grouping.in_batch_order(results, v.new_zeros(1, *v.shape[1:]), v.shape[0])

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        check_accepted(forward_batch, accepted)
        metadata: LinearMetadata = forward_batch.plan_for(self.backend_id, forward_batch.num_tokens).metadata
        if forward_batch.forward_mode is ForwardMode.IDLE:
            return
        if metadata.verified is None or metadata.verified.empty:
            raise nothing_to_commit(forward_batch.forward_mode)
        groups = metadata.grouping.groups
        accepted = accepted.to(metadata.grouping.order.device, non_blocking=True)
        committed = [group.first(accepted) for group in groups]
        for layer_id, tokens in metadata.verified.tokens.items():
            states = self._states.recurrent(layer_id)
            for group, mine in zip(committed, tokens, strict=True):
                _put(states, group, advance(mine.only(group.live), states[group.slots])[1])
        for layer_id, rows in metadata.verified.conv_rows.items():
            states = self._states.conv(layer_id)
            for group, own in zip(committed, rows, strict=True):
                _put(states, group, newest_rows(own, states[group.slots], group.lens))
        metadata.verified.clear()


def _tokens(inputs: LinearInputs, group: Group, scale: float) -> Tokens:
    """A group's tokens, in memory of their own: whoever keeps them need not care what the model does to its inputs."""
    rows, decay, beta = group.rows, inputs.log_decay, inputs.beta
    tokens = Tokens.of(
        inputs.q[rows],
        inputs.k[rows],
        inputs.v[rows],
        decay if decay.dim() == 1 else decay[rows],
        None if beta is None else beta[rows],
        scale=scale,
        normalize=inputs.normalize,
    )
    return tokens.only(group.live)


def _put(states: Tensor, group: Group, after: Tensor) -> None:
    states[group.slots] = after.to(states.dtype)
