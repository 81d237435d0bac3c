"""MLA prefill as MHA: choice of a batch's extend path, and its ragged calls (C1, C2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from attnplug import AttentionBackend, BackendError, ExtendPath, ForwardBatch, LayerSpec, Plan, RaggedCall
from attnplug.host import ExtendPolicy, bind_forward, bind_optional_hook
from attnplug.kernels import spread
from attnplug_sglang.planning import GroupedStep, mode_of


def extend_path(batch: Any, layer: Any, abilities: frozenset[ExtendPath], captured: bool) -> ExtendPath:
    """Choose the extend path of a batch. ``layer``: SGLang's, with its thresholds. ``captured``: inside a CUDA graph.

    Raises :class:`BackendError` if the batch needs the absorbed path and the backend lacks it.
    """
    if captured or not batch.forward_mode.is_extend_without_speculative() or batch.extend_seq_lens_cpu is None:
        if ExtendPath.ABSORBED not in abilities:
            raise BackendError(
                f"a batch of mode {batch.forward_mode.name} runs absorbed, but this backend supports only "
                f"{', '.join(sorted(abilities))}; select another one with --decode-attention-backend"
                + " or give --disable-cuda-graph"
                * captured
            )
        return ExtendPath.ABSORBED
    policy = ExtendPolicy(
        chunk_threshold=layer.chunked_prefix_cache_threshold,
        chunk_capacity=batch.get_max_chunk_capacity(),
        disable_chunked_prefix_cache=layer.disable_chunked_prefix_cache,
    )
    new = batch.extend_seq_lens_cpu
    total = [before + more for before, more in zip(batch.extend_prefix_lens_cpu, new, strict=True)]
    return policy.choose(mode_of(batch), new, total, abilities)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPart:
    """One ragged call. ``rows``: indices of its query rows; ``None`` if it has all rows."""

    call: RaggedCall
    rows: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RaggedPlan:
    """Calls of a batch: the causal one first, then one for each prefix chunk. ``queries`` counts the new tokens."""

    parts: tuple[RaggedPart, ...]
    plan: Plan | None
    queries: int


class RaggedPrefill:
    """Plans and runs the ragged calls of one backend."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._name = backend.backend_id.name
        self._run = bind_forward(self, "_run", backend, "forward_ragged")
        self._plan_chunks = bind_optional_hook(backend, "init_mha_chunk_metadata")

    def plan(self, batch: Any, step: GroupedStep) -> RaggedPlan:
        """Plan all calls of a batch, once per step."""
        if step.ragged is None:
            geometry = step.batches[0].geometry
            parts = tuple(_parts(batch, geometry.device))
            plan = None
            if self._plan_chunks is not None:
                calls = tuple(part.call for part in parts)
                plan = self._plan_chunks(ForwardBatch(replace(geometry, calls=calls)), False)
            step.ragged = RaggedPlan(parts, plan, sum(batch.extend_seq_lens_cpu))
        planned: RaggedPlan = step.ragged
        return planned

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, batch: Any, step: GroupedStep
    ) -> tuple[Tensor, Tensor | None]:
        """Run the batch's current call; return output ``[tokens, heads, v_head_dim]``, and LSE ``[tokens, heads]`` if
        requested.

        Requests without rows in a chunk, and padding, get zero and -inf.
        """
        if self._run is None:
            raise BackendError(f"SGLang runs layer {layer.layer_id} as MHA, but {self._name} has no forward_ragged")
        planned = self.plan(batch, step)
        part = planned.parts[1 + batch.prefix_chunk_idx if batch.attn_attend_prefix_cache else 0]
        queries = q[: planned.queries] if part.rows is None else q[part.rows]
        k, v = k[: part.call.kv_rows], v[: part.call.kv_rows]
        lse = None
        if batch.mha_return_lse:
            lse = torch.full(queries.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
        out: Tensor = self._run(queries, k, v, layer, part.call, planned.plan, lse)
        if queries.shape[0] == q.shape[0]:
            return out, lse
        place = slice(0, planned.queries) if part.rows is None else part.rows
        whole = out.new_zeros(q.shape[0], *out.shape[1:])
        whole[place] = out
        if lse is not None:
            whole_lse = lse.new_full((q.shape[0], lse.shape[1]), float("-inf"))
            whole_lse[place] = lse
            lse = whole_lse
        return whole, lse


def _parts(batch: Any, device: torch.device) -> Sequence[RaggedPart]:
    new, prefixes = list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu)
    one_shot = bool(batch.mha_one_shot)
    rows = [before + more if one_shot else more for before, more in zip(prefixes, new, strict=True)]
    parts = [_part(0, new, rows, device, causal=True)]
    if not one_shot and any(prefixes) and batch.num_prefix_chunks:
        for index in range(batch.num_prefix_chunks):
            start = index * batch.prefix_chunk_len
            spans = [min(max(before - start, 0), batch.prefix_chunk_len) for before in prefixes]
            parts.append(_part(1 + index, new, spans, device, causal=False))
    return parts


def _part(index: int, new: Sequence[int], rows: Sequence[int], device: torch.device, *, causal: bool) -> RaggedPart:
    """Return the call of the requests that have both queries and keys: kernels get no empty span (C3)."""
    live = [request for request, pair in enumerate(zip(new, rows, strict=True)) if all(pair)]
    queries, keys = [new[request] for request in live], [rows[request] for request in live]
    call = RaggedCall.of(index, queries, keys, causal=causal, device=device)
    if sum(queries) == sum(new):
        return RaggedPart(call, None)
    starts = list(accumulate(new, initial=0))
    return RaggedPart(call, spread([starts[request] for request in live], queries, device)[1])
