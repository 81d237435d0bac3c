"""The ``torch`` backend: linear attention in torch. States are gathered by slot, advanced, and scattered back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, LayerSpec
from attnplug.linear import LinearInputs
from attnplug_hybrid_linear.convolution import convolve, newest_rows
from attnplug_hybrid_linear.planner import Grouping, RequestGroup, plan_groups
from attnplug_hybrid_linear.recurrence import Tokens, advance
from attnplug_hybrid_linear.states import LinearMetadata, StateBackend, VerifyInputs


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMetadata(LinearMetadata):
    """A plan's metadata: the groups of a batch. A verify keeps each layer's inputs per group."""

    grouping: Grouping


class TorchLinearBackend(StateBackend):
    """GDN, KDA, Lightning, Mamba2 and short convolutions, on any device. The reference for other backends.

    If levels of invariance beyond ``run`` are requested, requests run one by one and token by token, so that all
    operations have the same shapes in all batches. Chunks would depend on how a prompt was split: the state between
    them is that of a decode, which is not chunked.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._invariant = bool(context.invariant - {"run"})

    def metadata(
        self, query_lens: Sequence[int], state_slots: Tensor, verified: VerifyInputs | None
    ) -> GroupedMetadata:
        return GroupedMetadata(verified, plan_groups(query_lens, state_slots, alone=self._invariant))

    def forward_conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: LayerSpec, batch: ForwardBatch, silu: bool
    ) -> Tensor:
        metadata: GroupedMetadata = batch.plan_for(self.backend_id, x.shape[0]).metadata
        states = self.conv(layer.layer_id)
        kept, results = [], []
        for group in metadata.grouping.groups:
            rows, before = x[group.rows], states[group.slots]
            results.append(convolve(rows, before, weight, bias, silu=silu, by_token=self._invariant))
            if metadata.verified is None:
                _put(states, group, newest_rows(rows, before, group.lens))
            kept.append(rows)
        if metadata.verified is not None:
            metadata.verified.conv_rows[layer.layer_id] = kept
        return metadata.grouping.in_batch_order(results, x.new_zeros(1, x.shape[1]), x.shape[0])

    def forward_linear(self, inputs: LinearInputs, layer: LayerSpec, batch: ForwardBatch) -> Tensor:
        v = inputs.v
        metadata: GroupedMetadata = batch.plan_for(self.backend_id, v.shape[0]).metadata
        states = self.recurrent(layer.layer_id)
        kept, results = [], []
        for group in metadata.grouping.groups:
            tokens = self._tokens(inputs, group, layer.scale)
            out, after = _advance(tokens, states[group.slots])
            results.append(out.to(v.dtype))
            if metadata.verified is None:
                _put(states, group, after)
            kept.append(tokens)
        if metadata.verified is not None:
            metadata.verified.inputs[layer.layer_id] = kept
        return metadata.grouping.in_batch_order(results, v.new_zeros(1, *v.shape[1:]), v.shape[0])

    def commit(self, metadata: GroupedMetadata, verified: VerifyInputs, accepted: Tensor) -> None:
        groups = [group.first(accepted) for group in metadata.grouping.groups]
        for layer_id, tokens in verified.inputs.items():
            states = self.recurrent(layer_id)
            for group, kept in zip(groups, tokens, strict=True):
                live = group.live.split([each.q.shape[1] for each in kept], 1)
                accepted_tokens = [each.only(mask) for each, mask in zip(kept, live, strict=True)]
                _put(states, group, _advance(accepted_tokens, states[group.slots])[1])
        for layer_id, rows in verified.conv_rows.items():
            states = self.conv(layer_id)
            for group, own in zip(groups, rows, strict=True):
                _put(states, group, newest_rows(own, states[group.slots], group.lens))

    def _tokens(self, inputs: LinearInputs, group: RequestGroup, scale: float) -> list[Tokens]:
        """Copy a group's tokens: all together, or one by one."""
        parts = [group.token(number) for number in range(group.rows.shape[1])] if self._invariant else [group]
        return [_tokens(inputs, part, scale) for part in parts]


def _advance(tokens: Sequence[Tokens], state: Tensor) -> tuple[Tensor, Tensor]:
    """Advance ``state`` by some tokens after the other; returns the outputs of all, and the last state."""
    outputs = []
    for part in tokens:
        out, state = advance(part, state)
        outputs.append(out)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state


def _tokens(inputs: LinearInputs, group: RequestGroup, scale: float) -> Tokens:
    """Copy a group's tokens. A verify keeps them, and the model may overwrite its inputs."""
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


def _put(states: Tensor, group: RequestGroup, after: Tensor) -> None:
    states[group.slots] = after.to(states.dtype)
