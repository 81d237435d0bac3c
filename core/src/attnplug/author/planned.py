"""The two entries of a backend whose decode runs as its extend does."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from attnplug.contract.backend import ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.plan import BackendId, Plan
from attnplug.declare.model import LayerSpec


class PlannedBackend(ABC):
    """Finds the batch's plan, which is refused if it is not this backend's or not for the entry, and runs it.

    Subclass contract: ``backend_id`` is set in the constructor.
    """

    backend_id: BackendId

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=False)
        return self.run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        extras: ForwardExtras | None = None,
    ) -> Tensor:
        plan = batch.plan_for(self.backend_id, q.shape[0], decode=True)
        return self.run_plan(plan, q, k, v, layer, batch, save_kv_cache, extras)

    @abstractmethod
    def run_plan(
        self,
        plan: Plan,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool,
        extras: ForwardExtras | None,
    ) -> Tensor:
        """One layer of a planned batch, as ``AttentionBackend.forward_extend`` says."""
