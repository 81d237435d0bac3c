"""Running an MLA layer: absorbed decode, and the extend by the path that was planned for the batch (C1, C2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnplug.contract.backend import AttentionBackend, bind_optional_hook
from attnplug.contract.batch import ForwardBatch
from attnplug.contract.geometry import Geometry
from attnplug.contract.hooks import Hook
from attnplug.contract.plan import ForwardMode, made_plan
from attnplug.declare.claims import ExtendPath
from attnplug.declare.errors import BackendError, PlanError
from attnplug.declare.model import LayerSpec
from attnplug.kv import MLAPool
from attnplug.layers.forward_context import active_mla
from attnplug.mla.merge import merge_partial
from attnplug.mla.plan import ABSORBED, MLAExtendPlan, Part, plan_extend
from attnplug.mla.policy import ExtendPolicy


@dataclass(frozen=True, slots=True, eq=False)
class MLAWeights:
    """The up-projections of one layer, for this rank's heads.

    ``w_kc`` ``[heads, nope, kv_lora_rank]`` takes latents to keys, ``w_vc`` ``[heads, kv_lora_rank, v_head_dim]`` to
    values. Absorbed, the first goes into the query and the second into the output.
    """

    w_kc: Tensor
    w_vc: Tensor
    w_values: Tensor = field(init=False)
    """``[heads * v_head_dim, kv_lora_rank]``: ``w_vc`` as one matrix, laid out once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "w_values", self.w_vc.transpose(1, 2).reshape(-1, self.w_vc.shape[1]).contiguous())

    def absorb(self, q: Tensor) -> Tensor:
        """Queries ``[tokens, heads, nope + rope]`` → ``[tokens, heads, kv_lora_rank + rope]``."""
        nope, rank = self.w_kc.shape[1:]
        absorbed = q.new_empty(*q.shape[:2], rank + q.shape[-1] - nope)
        absorbed[..., :rank] = _product(q[..., :nope].transpose(0, 1), self.w_kc).transpose(0, 1)
        absorbed[..., rank:] = q[..., nope:]
        return absorbed

    def release(self, latent: Tensor) -> Tensor:
        """Attended latents ``[tokens, heads, kv_lora_rank]`` → ``[tokens, heads, v_head_dim]``."""
        return _product(latent.transpose(0, 1), self.w_vc).transpose(0, 1)

    def up_project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Cache rows ``[rows, kv_lora_rank + rope]`` → keys ``[rows, heads, nope + rope]`` and values."""
        heads, nope, rank = self.w_kc.shape
        latent, rope = rows[:, :rank], rows[:, rank:]
        keys = rows.new_empty(rows.shape[0], heads, nope + rope.shape[1])
        keys[..., :nope] = _product(latent, self.w_kc.flatten(0, 1).T).unflatten(1, (heads, nope))
        keys[..., nope:] = rope.unsqueeze(1)
        return keys, _product(latent, self.w_values.T).unflatten(1, (heads, -1))


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight``, of one matrix or of one for each head."""
    product = torch.bmm if weight.dim() == 3 else torch.mm
    if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # its kernels for the short types may be 200 times slower
        return product(rows.float(), weight.float()).to(rows.dtype)
    return product(rows, weight)


class MLAAttention:
    """The MLA layers of one model on one backend: holds the pool and the policy, binds the backend's hooks once."""

    def __init__(self, backend: AttentionBackend, pool: MLAPool, policy: ExtendPolicy | None = None) -> None:
        self._backend, self._pool, self._policy = backend, pool, policy or ExtendPolicy()
        self._plan_chunks: Hook | None = bind_optional_hook(backend, "init_mha_chunk_metadata")
        self._ragged: Hook | None = bind_optional_hook(backend, "forward_ragged")
        needed = backend.claims.mla_extend - {ExtendPath.ABSORBED}
        if needed and self._ragged is None:
            raise BackendError(
                f"backend {backend.backend_id.name} claims the extend paths {', '.join(sorted(needed))}, "
                "but has no forward_ragged"
            )

    def prepare(self, batch: ForwardBatch) -> None:
        """Once per batch, before its first layer: choose the path, prepare its calls, let the backend plan them."""
        batch.chunk_plan = None
        abilities, mode = self._backend.claims.mla_extend, batch.forward_mode
        if mode is not ForwardMode.EXTEND and (mode.is_decode or ExtendPath.ABSORBED in abilities):
            batch.mla_plan = ABSORBED  # what the policy would say too, without looking at the lengths
            return
        geometry = Geometry.of(batch, self._pool.page_size)
        path = self._policy.choose(batch.forward_mode, geometry.query_lens, geometry.kv_lens, abilities)
        if path is ExtendPath.ABSORBED or not geometry.query_rows:
            batch.mla_plan = ABSORBED
            return
        batch.mla_plan = plan_extend(geometry, path, self._policy.chunk_capacity)
        if self._plan_chunks is None:
            return
        plan = self._plan_chunks(batch, self._policy.disable_ragged)
        if plan is not None:
            who, hook = self._backend.backend_id, "init_mha_chunk_metadata"
            batch.chunk_plan = made_plan(plan, who, mode, batch.num_tokens, hook, delegated=True)

    def attend(self, q: Tensor, rows: Tensor, layer: LayerSpec, weights: MLAWeights, batch: ForwardBatch) -> Tensor:
        """One layer; see :func:`attend_mla`."""
        plan: MLAExtendPlan | None = batch.mla_plan
        if plan is None:
            raise PlanError(
                "the batch was not prepared for MLA; call MLAAttention.prepare(batch) before its first layer"
            )
        if plan.path is ExtendPath.ABSORBED:
            run = self._backend.forward_decode if batch.forward_mode.is_decode else self._backend.forward_extend
            return weights.release(run(weights.absorb(q), rows.unsqueeze(1), None, layer, batch))
        if q.shape[0] < plan.query_rows:
            raise PlanError(f"{q.shape[0]} query rows were given, but the batch was prepared for {plan.query_rows}")
        self._pool.write(layer.layer_id, plan.new_slots, rows[: plan.query_rows])
        out = self._as_mha(q[: plan.query_rows], rows[: plan.query_rows], layer, weights, batch, plan)
        if q.shape[0] == plan.query_rows:
            return out
        return torch.cat([out, out.new_zeros(q.shape[0] - plan.query_rows, *out.shape[1:])])

    def _as_mha(
        self, q: Tensor, rows: Tensor, layer: LayerSpec, weights: MLAWeights, batch: ForwardBatch, plan: MLAExtendPlan
    ) -> Tensor:
        first, chunks = plan.parts[0], plan.parts[1:]
        lse = self._new_lse(q) if chunks else None
        out = self._run(first, q, rows, layer, weights, batch, lse)
        if lse is None:
            return out
        merged = out.float()
        for part in chunks:
            queries = q if part.rows is None else q[part.rows]
            part_lse = self._new_lse(queries)
            part_out = self._run(part, queries, None, layer, weights, batch, part_lse)
            if part.rows is None:
                merged, lse = merge_partial(merged, lse, part_out, part_lse)
            else:
                merged[part.rows], lse[part.rows] = merge_partial(merged[part.rows], lse[part.rows], part_out, part_lse)
        return merged.to(q.dtype)

    def _run(
        self,
        part: Part,
        q: Tensor,
        rows: Tensor | None,
        layer: LayerSpec,
        weights: MLAWeights,
        batch: ForwardBatch,
        lse: Tensor | None,
    ) -> Tensor:
        """One ragged call. What it up-projects is alive only here, so memory is bounded by one chunk."""
        if part.slots is not None:
            rows = self._pool.read_rows(layer.layer_id, part.slots).to(q.dtype)
        assert rows is not None and self._ragged is not None
        keys, values = weights.up_project(rows)
        out: Tensor = self._ragged(q, keys, values, layer, batch, part.call, lse)
        return out

    @staticmethod
    def _new_lse(q: Tensor) -> Tensor:
        """NaN, so that rows which nobody fills turn into NaN, and not into whatever lay in memory."""
        return torch.full(q.shape[:2], float("nan"), dtype=torch.float32, device=q.device)


def attend_mla(q: Tensor, rows: Tensor, layer: LayerSpec, weights: MLAWeights, batch: ForwardBatch) -> Tensor:
    """An MLA layer on the active backend.

    q ``[tokens, heads, nope + rope]`` with its rope part rotated, rows ``[tokens, kv_lora_rank + rope]`` the new cache
    rows (normed latent, rotated key). Writes the rows and returns ``[tokens, heads, v_head_dim]``.
    """
    mla: MLAAttention = active_mla()
    return mla.attend(q, rows, layer, weights, batch)
