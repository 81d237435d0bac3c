"""Base class of the linear backends: access to the state pool, planning, and the commit after a target verify."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext, ForwardBatch, ForwardMode, Geometry, Plan, PlanError, PoolError
from attnplug.linear import PlannedBackend


@dataclass(slots=True, eq=False)
class VerifyInputs:
    """Inputs of a target verify by layer id, kept in its plan for the commit.

    Those of a captured verify are kept after the commit, because every replay refills them.
    """

    captured: bool
    inputs: dict[int, Any] = field(default_factory=dict)
    conv_rows: dict[int, Any] = field(default_factory=dict)
    committed: bool = False

    @property
    def due(self) -> bool:
        """True if there are inputs that have not been committed."""
        return not self.committed and bool(self.inputs or self.conv_rows)

    def close(self) -> None:
        """Mark as committed, and release the inputs unless they are captured."""
        self.committed = True
        if not self.captured:
            self.inputs.clear()
            self.conv_rows.clear()


@dataclass(frozen=True, slots=True, eq=False)
class LinearMetadata:
    """A plan's metadata. ``verified`` is set for a target verify, and filled as its layers run."""

    verified: VerifyInputs | None


class StateBackend(PlannedBackend):
    """Base class of backends over a pool of linear states. It keeps no state of an eager batch.

    Subclass contract: define ``metadata`` and ``commit``, and the hooks ``forward_conv`` and ``forward_linear``.
    """

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if context.pools.linear is None:
            raise PoolError(f"backend {context.name} requires a pool of linear states")
        self._pool = context.pools.linear

    @abstractmethod
    def metadata(self, query_lens: Sequence[int], state_slots: Tensor, verified: VerifyInputs | None) -> LinearMetadata:
        """Return a plan's metadata for new tokens per request and device ``state_slots`` ``[requests]``."""

    @abstractmethod
    def commit(self, metadata: Any, verified: VerifyInputs, accepted: Tensor) -> None:
        """Advance all states by the first ``accepted`` ``[requests]`` rows of each request of a verify."""

    def plan(self, geometry: Geometry) -> Plan:
        """Plan a batch.

        Only ragged batches need exact host lengths; without ``new_lens`` all have ``max_new`` tokens.
        """
        uniform = geometry.new_lens is None
        return self.plan_of(geometry, [geometry.max_new] * geometry.requests if uniform else geometry.query_lens)

    def plan_of(self, geometry: Geometry, query_lens: Sequence[int], *, captured: bool = False) -> Plan:
        verified = VerifyInputs(captured) if geometry.mode is ForwardMode.TARGET_VERIFY else None
        return Plan.of(self.backend_id, geometry, self.metadata(query_lens, slots_of(geometry), verified))

    def recurrent(self, layer_id: int) -> Tensor:
        """Return the recurrent states ``[slots, heads, key_dim, value_dim]`` float32 of a layer."""
        states = self._pool.recurrent(layer_id)
        if states is None:
            raise PoolError(f"layer {layer_id} has no recurrent state: it is a convolution without heads")
        return states

    def conv(self, layer_id: int) -> Tensor:
        """Return the convolution states ``[slots, conv_channels, conv_width]`` of a layer."""
        states = self._pool.conv(layer_id)
        if states is None:
            raise PoolError(f"layer {layer_id} has no convolution: its conv_width is 0")
        return states

    def commit_states(self, forward_batch: ForwardBatch, accepted: Tensor) -> None:
        requests, mode = forward_batch.batch_size, forward_batch.forward_mode
        if accepted.shape != (requests,):
            raise PlanError(
                f"accepted has shape {tuple(accepted.shape)}; pass one number for each of the batch's "
                f"{requests} requests"
            )
        metadata: LinearMetadata = forward_batch.plan_for(self.backend_id, forward_batch.num_tokens).metadata
        if mode is ForwardMode.IDLE:
            return
        verified = metadata.verified
        if verified is None or not verified.due:
            raise PlanError(
                f"a batch in mode {mode} has nothing to commit: states are committed once, after a target verify; "
                "other modes advance them immediately"
            )
        self.commit(metadata, verified, accepted.to(forward_batch.geometry.device, non_blocking=True))
        verified.close()


def slots_of(geometry: Geometry) -> Tensor:
    """Return the state slots ``[requests]``, -1 for padded requests. Raises ``PlanError`` if the batch has none."""
    slots, requests = geometry.state_slots, geometry.requests
    if slots is None and not requests:
        return torch.zeros(0, dtype=torch.int64, device=geometry.device)
    if slots is None or slots.shape != (requests,):
        given = "none" if slots is None else f"state_slots of shape {tuple(slots.shape)}"
        raise PlanError(
            f"linear attention requires a state slot for each of the batch's {requests} requests, "
            f"-1 for a padded one; given: {given}"
        )
    return slots
