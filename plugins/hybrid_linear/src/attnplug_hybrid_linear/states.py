"""What every backend of this plugin asks of its pool and of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, ForwardMode, PlanError, PoolError


class States:
    """The states of a model's linear layers, by layer."""

    def __init__(self, context: BackendContext) -> None:
        if context.pools.linear is None:
            raise PoolError(f"backend {context.name} runs linear attention, but was given no pool of linear states")
        self._pool = context.pools.linear

    def recurrent(self, layer_id: int) -> Tensor:
        """``[slots, heads, key_dim, value_dim]`` float32."""
        states = self._pool.recurrent(layer_id)
        if states is None:
            raise PoolError(f"layer {layer_id} has no heads, so no recurrent state; it is a convolution alone")
        return states

    def conv(self, layer_id: int) -> Tensor:
        """``[slots, conv_channels, conv_width]``."""
        states = self._pool.conv(layer_id)
        if states is None:
            raise PoolError(f"layer {layer_id} has no convolution: its conv_width is 0")
        return states


def slots_of(batch: ForwardBatch) -> Tensor:
    """``[requests]``: the state slot of each request, -1 where it is padded."""
    slots = batch.state_slots
    if slots is None and batch.batch_size == 0:
        return torch.zeros(0, dtype=torch.int64, device=batch.seq_lens.device)
    if slots is None or slots.shape != (batch.batch_size,):
        given = "none" if slots is None else f"state_slots of shape {tuple(slots.shape)}"
        raise PlanError(
            f"linear attention needs a state slot for each of the batch's {batch.batch_size} requests, "
            f"-1 where one is padded; it has {given}"
        )
    return slots


def check_accepted(batch: ForwardBatch, accepted: Tensor) -> None:
    if accepted.shape != (batch.batch_size,):
        raise PlanError(
            f"accepted has shape {tuple(accepted.shape)}; give one number for each of the batch's "
            f"{batch.batch_size} requests"
        )


def nothing_to_commit(mode: ForwardMode) -> PlanError:
    return PlanError(
        f"a batch in mode {mode} has nothing to commit: states are committed once, after a target verify; "
        "other modes advance them at once"
    )
