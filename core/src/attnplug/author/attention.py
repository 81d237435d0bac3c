"""Base class of backends that attend over cached rows: everything but the kernel."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from attnplug.author.planned import PlannedBackend
from attnplug.author.served_layers import NO_EXTRAS, NewRows, ServedLayers, output_width
from attnplug.contract.backend import ForwardExtras
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.context import BackendContext
from attnplug.contract.plan import Plan
from attnplug.contract.sparse import require_entries
from attnplug.declare.claims import Claims
from attnplug.declare.errors import PlanError
from attnplug.declare.model import LayerSpec
from attnplug.declare.problem import ExtendPath


class PlannedAttention(PlannedBackend):
    """``forward_extend`` and ``forward_decode`` in terms of ``attend``.

    Looks up the plan and refuses another backend's, validates the call, writes the new rows to the cache, and returns
    zeros for padding (B5). Subclass contract: define ``plan`` and ``attend``. ::

        class MyBackend(PlannedAttention):
            def plan(self, geometry):
                return Plan.of(self.backend_id, geometry, make_metadata(geometry), geometry.new_slots())

            def attend(self, q, layer, plan, new, extras):
                return my_kernel(q, self.context.pools.mha.keys(layer.layer_id), ..., plan.metadata)
    """

    def __init__(self, context: BackendContext, claims: Claims | None = None) -> None:
        super().__init__(context, claims)
        self.layers = ServedLayers(context, self.claims.extras)

    @abstractmethod
    def attend(self, q: Tensor, layer: LayerSpec, plan: Plan, new: NewRows | None, extras: ForwardExtras) -> Tensor:
        """Run one layer over the planned rows, of which there is at least one.

        q is ``[plan.query_rows, heads, width]``; ``extras.q_rope`` and ``extras.selected`` have as many rows. ``new``
        is (k, v) with as many rows, already written to the cache; ``None`` if the cache had them before the call.
        Unless it is ``None``, write the entries that ``extras.entries`` complete. Fill ``extras.lse`` if given.
        Returns ``[plan.query_rows, heads, v_width]``, preferably in ``extras.out``; another tensor is copied there.
        """

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
        """Run one layer of a planned batch; see ``AttentionBackend.forward_extend``."""
        given_rows = self.layers.check(layer, q, None if extras is None else extras.q_rope)
        plain = extras is None and not layer.sinks and layer.indexer is None
        wanted = NO_EXTRAS if plain else self.layers.check_extras(layer, q, extras)
        rows, new = plan.query_rows, None
        if rows and self.takes_rows(plan, save_kv_cache):
            new = self.layers.new_rows(layer, k, v, rows)
            if save_kv_cache:
                require_entries(wanted.entries, layer, self.backend_id.name)
                if plan.new_slots is None and batch.geometry.calls:
                    raise PlanError(
                        f"the batch was planned to run as MHA, so {self.backend_id.name} has no plan to run it "
                        f"absorbed; plan it again for the path {ExtendPath.ABSORBED}"
                    )
                self.layers.write(layer, plan, new)
        if rows != given_rows or not rows:
            return self._padded(plan, q, layer, new, wanted)
        out = self.attend(q, layer, plan, new, wanted)
        return out if wanted is NO_EXTRAS else _copy_to(out, wanted.out)

    def takes_rows(self, plan: Plan, save_kv_cache: bool) -> bool:
        """Return True if a call needs k and v; most backends need them only to write them."""
        return save_kv_cache

    def _padded(self, plan: Plan, q: Tensor, layer: LayerSpec, new: NewRows | None, wanted: ForwardExtras) -> Tensor:
        rows, lse = plan.query_rows, wanted.lse
        out = q.new_empty(*q.shape[:2], output_width(layer)) if wanted.out is None else wanted.out
        out[rows:] = 0
        if lse is not None:
            lse[rows:] = float("-inf")
        if rows:
            part = wanted.first(rows, out)
            _copy_to(self.attend(q[:rows], layer, plan, new, part), part.out)
        return out


def _copy_to(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None or result is out:
        return result
    return out.copy_(result)
