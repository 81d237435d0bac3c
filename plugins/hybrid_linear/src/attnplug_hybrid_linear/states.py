"""What both backends share: states by layer, plans from a batch's geometry, and the commit that follows a verify."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, ForwardMode, Geometry, Plan, PlanError, PlannedBackend, PoolError


@dataclass(slots=True, eq=False)
class Verified:
    """What the layers of a target verify keep for its commit, by layer id. Every plan has its own.

    That of a captured verify stays, because every replay fills it again.
    """

    captured: bool
    inputs: dict[int, Any] = field(default_factory=dict)
    conv_rows: dict[int, Any] = field(default_factory=dict)
    committed: bool = False

    @property
    def due(self) -> bool:
        return not self.committed and bool(self.inputs or self.conv_rows)

    def close(self) -> None:
        self.committed = True
        if not self.captured:
            self.inputs.clear()
            self.conv_rows.clear()


@dataclass(frozen=True, slots=True, eq=False)
class LinearMetadata:
    """``verified`` is set for a target verify, and filled as its layers run."""

    verified: Verified | None


class StateBackend(PlannedBackend):
    """The base of a backend over a pool of linear states. It keeps the pool, and nothing of any eager batch.

    Subclass contract: ``metadata`` and ``commit``, and the two hooks that run layers.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.pools.linear is None:
            raise PoolError(f"backend {context.name} runs linear attention, but was given no pool of linear states")
        self._pool = context.pools.linear

    @abstractmethod
    def metadata(self, query_lens: Sequence[int], state_slots: Tensor, verified: Verified | None) -> LinearMetadata:
        """The metadata of a plan, from each request's new tokens; ``state_slots`` ``[requests]`` is on the device."""

    @abstractmethod
    def commit(self, metadata: Any, verified: Verified, accepted: Tensor) -> None:
        """Advance every state by the first ``accepted`` ``[requests]`` of the rows that a verify kept."""

    def plan(self, geometry: Geometry) -> Plan:
        """Without ``new_lens`` every request has ``max_new`` tokens; only ragged batches need exact host lengths."""
        uniform = geometry.new_lens is None
        return self.plan_of(geometry, [geometry.max_new] * geometry.requests if uniform else geometry.query_lens)

    def plan_of(self, geometry: Geometry, query_lens: Sequence[int], *, captured: bool = False) -> Plan:
        verified = Verified(captured) if geometry.mode is ForwardMode.TARGET_VERIFY else None
        return Plan.of(self.backend_id, geometry, self.metadata(query_lens, _slots_of(geometry), verified))

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

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        requests, mode = forward_batch.batch_size, forward_batch.forward_mode
        if accepted.shape != (requests,):
            raise PlanError(
                f"accepted has shape {tuple(accepted.shape)}; give one number for each of the batch's "
                f"{requests} requests"
            )
        metadata: LinearMetadata = forward_batch.plan_for(self.backend_id, forward_batch.num_tokens).metadata
        if mode is ForwardMode.IDLE:
            return
        verified = metadata.verified
        if verified is None or not verified.due:
            raise PlanError(
                f"a batch in mode {mode} has nothing to commit: states are committed once, after a target verify; "
                "other modes advance them at once"
            )
        self.commit(metadata, verified, accepted.to(forward_batch.geometry.device, non_blocking=True))
        verified.close()


def _slots_of(geometry: Geometry) -> Tensor:
    """``[requests]``: the state slot of each request, -1 for a padded one."""
    slots, requests = geometry.state_slots, geometry.requests
    if slots is None and not requests:
        return torch.zeros(0, dtype=torch.int64, device=geometry.device)
    if slots is None or slots.shape != (requests,):
        given = "none" if slots is None else f"state_slots of shape {tuple(slots.shape)}"
        raise PlanError(
            f"linear attention needs a state slot for each of the batch's {requests} requests, "
            f"-1 for a padded one; it has {given}"
        )
    return slots
