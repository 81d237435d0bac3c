"""Runner of a draft model with its own backend, on the target's pages, with its own or the target's pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnplug import AttentionBackend, ExtendPath, ForwardBatch, Serving
from attnplug.host import (
    ExtendPolicy,
    HostContext,
    KVPools,
    Limits,
    ModelAttention,
    Parallel,
    Selection,
    WorkspaceOwner,
    build_selection,
)
from attnplug.kernels import PageCopy
from attnplug_engine.execution.sampler import sample
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.memory.pools import build_pools
from attnplug_engine.models.decoder import kv_scales
from attnplug_engine.parallel.collectives import TensorParallel
from attnplug_engine.settings.speculation import Speculation
from attnplug_engine.speculation.draft_sampling import gumbel_topk
from attnplug_engine.speculation.drafts.model import DraftModel


def needs_lengths(backend: AttentionBackend, pools: KVPools) -> bool:
    """Return True if batches of a round need exact lengths on the host: for the backend, or to run MLA as MHA."""
    claims = backend.claims
    return claims.needs_cpu_seq_lens or (pools.mla is not None and ExtendPath.ABSORBED not in claims.mla_extend)


class DraftRunner:
    """Runs a draft model's batches. Page table and slots are the target's; layers and plans are its own.

    So are its pools, unless it reads the target's rows.
    """

    def __init__(
        self,
        model: DraftModel,
        target: KVPools,
        selection: Selection,
        capacity: Capacity,
        speculation: Speculation,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: str,
        index_dtype: str | None,
        workspace: WorkspaceOwner,
        parallel: TensorParallel,
        policy: ExtendPolicy,
        serving: Serving,
    ) -> None:
        self.model, self.capacity, self.device, self.dtype = model, capacity, device, dtype
        self._owns = not model.reads_target
        self.pools = KVPools(mha=target.mha)
        """Pools that its backend reads."""
        if self._owns:
            scales = kv_scales(model)
            self.pools = build_pools(model.spec, capacity, dtype, kv_dtype, device, index_dtype, scales=scales)
        rows = speculation.most_draft_rows
        context = HostContext(
            model=model.spec,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=capacity.page_size,
            limits=Limits(
                capacity.max_batch,
                max(capacity.max_step_tokens + capacity.max_batch, capacity.max_batch * rows),
                capacity.context_length + capacity.lookahead,
            ),
            pools=self.pools,
            workspace=workspace,
            parallel=Parallel(parallel.rank, parallel.size),
            serving=serving,
        )
        self.backend = build_selection(selection, context)
        self.attention = ModelAttention(self.backend, self.pools, policy)
        self.exact = needs_lengths(self.backend, self.pools)
        """True if batches of rounds need exact lengths on the host."""
        chooses_path = self.pools.mla is not None and self.backend.claims.mla_extend != {ExtendPath.ABSORBED}
        self.exact_prefill = self.exact or chooses_path

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages of the draft's own cache. The target copies its own pages."""
        if self._owns:
            self.pools.copy_pages(copies)

    def forward(self, batch: ForwardBatch, hidden: Tensor | None, step: int = 0) -> Tensor:
        """Return hidden states ``[rows, hidden]`` of a batch. Plans it unless it is marked as planned."""
        assert batch.input_ids is not None and batch.positions is not None
        with self.attention.running() as attention:
            attention.plan(batch)
            out: Tensor = self.model.forward(batch.input_ids, batch.positions, hidden, batch, step)
        return out

    def best(self, hidden: Tensor, sampling: SamplingMetadata, topk: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Return the ``topk`` best target tokens behind rows of a step and their log probabilities, ``[rows, topk]``.

        For requests that sample, the noise is that by which the target will choose.
        """
        return gumbel_topk(self.model.logits(hidden, step), sampling, topk, self.model.target_ids)

    def choose(self, hidden: Tensor, sampling: SamplingMetadata, step: int = 0) -> Tensor:
        """Return the token ``[rows]`` that the draft would sample; -1 if its logits are not finite."""
        if self.model.target_ids is None:
            return sample(self.model.logits(hidden, step), sampling)
        return self.best(hidden, sampling, 1, step)[0][:, 0]
