"""One step of a model: pools, backend and batch brought together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

import numpy as np
import torch
from torch import Tensor

from attnplug import (
    AttentionKind,
    DType,
    ExtendPath,
    ForwardBatch,
    Geometry,
    MHAPool,
    MLAPool,
    ModelSpec,
    PoolError,
    Serving,
    to_device,
)
from attnplug.host import (
    AttnplugError,
    ExtendPolicy,
    HostContext,
    HostLengths,
    KVPools,
    Limits,
    LinearStatePool,
    ModelAttention,
    PageAllocator,
    Parallel,
    Selection,
    SlotTable,
    WorkspaceOwner,
    build_selection,
    torch_dtype,
)
from attnplug_engine.models.architectures import LoadedModel
from attnplug_engine.parallel import SINGLE, TensorParallel
from attnplug_engine.request import BAD_LOGITS, PENDING, Request, Step, TokenLogprobs
from attnplug_engine.sampler import BadLogits, Sampler, token_logprobs


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much the runner makes room for."""

    num_pages: int
    page_size: int
    max_batch: int
    max_step_tokens: int
    context_length: int
    state_slots: int = 0
    """Slots for linear-attention states: one for each running request, and some for snapshots."""


class NotFinite(AttnplugError):
    """A layer produced NaN or infinity. ``layer_id`` is the first that did."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        super().__init__(f"the output of layer {layer_id} is not finite: it is the first layer with NaN or infinity")


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device is running, and what it will have sampled."""

    _requests: Sequence[Request]
    _sampled: Sequence[int]
    _logits: Tensor

    def tokens(self) -> list[int]:
        """A token for each of the step's ``sampled_requests``, ``BAD_LOGITS`` where none can be chosen. Waits."""
        return list(self._sampled)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By request id, for those that ask."""
        good = [row for row, token in enumerate(self._sampled) if token != BAD_LOGITS]
        requests = [self._requests[row] for row in good]
        chosen = {request.id: self._sampled[row] for row, request in zip(good, requests, strict=True)}
        return token_logprobs(self._logits[good], requests, chosen)


class ModelRunner:
    """A model with its pools and its backend; runs one step at a time, for whoever schedules.

    Built in the only order that types allow: pools, then coordinators (none yet), then backends, which capture both.
    ``serving`` tells them how steps will be made; what ``policy`` decides of it is filled in here. Batches have
    exact lengths on the host only if the backend needs them, or if they decide the path of an MLA extend.
    """

    def __init__(
        self,
        model: LoadedModel,
        selection: Selection,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: DType,
        parallel: TensorParallel = SINGLE,
        policy: ExtendPolicy | None = None,
        serving: Serving | None = None,
        check_layers: bool = False,
    ) -> None:
        policy = policy or ExtendPolicy()
        serving = replace(serving or Serving(), disable_chunked_prefix_cache=policy.disable_chunked_prefix_cache)
        self.model, self.capacity, self.device = model.module, capacity, device
        self.pools = build_pools(model.spec, capacity, dtype, kv_dtype, device)
        self.workspace = WorkspaceOwner()
        context = HostContext(
            model=model.spec,
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=capacity.page_size,
            limits=Limits(
                capacity.max_batch, max(capacity.max_step_tokens, capacity.max_batch), capacity.context_length
            ),
            pools=self.pools,
            workspace=self.workspace,
            parallel=Parallel(parallel.rank, parallel.size),
            serving=serving,
        )
        self.backend = build_selection(selection, context)
        self.attention = ModelAttention(self.backend, self.pools, policy)
        claims = self.backend.claims
        chooses_path = self.pools.mla is not None and claims.mla_extend != {ExtendPath.ABSORBED}
        self._exact_decode = claims.needs_cpu_seq_lens
        self._exact_extend = claims.needs_cpu_seq_lens or chooses_path
        self.allocator, self.table = build_table(capacity, device)
        self.sampler = Sampler()
        # By rows of the slot table: the token that was sampled last. Steps in flight take their PENDING tokens here.
        self._tokens = torch.zeros(capacity.max_batch + 1, dtype=torch.int64, device=device)
        if check_layers:
            self._check_every_layer()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Run a step: page copies, forward, sampling, snapshots of states. Steps run in the order of their launch."""
        logits, requests = self.run(step), step.sampled_requests
        sampled = self._sample(logits, requests)
        if requests:
            rows: Sequence[int] = step.rows
            if len(requests) < len(rows):
                rows = [row for row, entry in zip(rows, step.entries, strict=True) if entry.sampled]
            # What follows a token that could not be chosen is ignored, but it is looked up all the same.
            chosen = [0 if token == BAD_LOGITS else token for token in sampled]
            self._tokens.index_put_((to_device(rows, self.device),), to_device(chosen, self.device))
        if self.pools.linear is not None:
            for source, target in step.snapshots:
                self.pools.linear.copy(source, target)
        return Launched(requests, sampled, logits)

    def _sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        try:
            sampled = self.sampler.sample(logits, requests)
        except BadLogits as error:
            good = [row for row, request in enumerate(requests) if request.id not in error.request_ids]
            sampled = self.sampler.sample(logits[good], [requests[row] for row in good])
        return [sampled.get(request.id, BAD_LOGITS) for request in requests]

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Logits ``[sampled, vocab]`` float32 of the step's sampled rows, in their order."""
        hidden = self._hidden(step)
        if not step.mode.is_decode:  # which samples every row
            hidden = hidden[to_device(step.sampled_rows, self.device)]
        return self.model.logits(hidden)

    @torch.inference_mode()
    def hidden_states(self, step: Step) -> Tensor:
        """Hidden states ``[tokens, hidden]`` of a step after the last norm, one entry's rows after the other's."""
        return self._hidden(step)

    def _hidden(self, step: Step) -> Tensor:
        if step.copies:
            self.pools.copy_pages(step.copies)
        return self._forward(self.prepare(step))

    def prepare(self, step: Step) -> ForwardBatch:
        """The batch of a step, planned ahead of its forward and marked so (B2); writes nothing to the cache."""
        batch = self._batch(step)
        self.attention.plan(batch)
        batch.mark_forward_metadata_ready()
        return batch

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states ``[tokens, hidden]``. Plans the batch unless whoever made it has."""
        return self._forward(batch)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        assert batch.input_ids is not None and batch.positions is not None
        with self.attention.running() as attention:
            attention.plan(batch)
            return self.model.forward(batch.input_ids, batch.positions, batch)

    def _batch(self, step: Step) -> ForwardBatch:
        entries = step.entries
        tokens = [token for entry in entries for token in entry.token_ids]
        starts = [entry.position for entry in entries]
        if step.mode.is_decode:
            exact, counts, positions = self._exact_decode, [1] * len(entries), starts
        else:
            exact, counts = self._exact_extend, [len(entry.token_ids) for entry in entries]
            positions = [position for entry in entries for position in entry.positions]
        lengths, longest = list(map(add, starts, counts)), max(counts)
        uniform = len(tokens) == longest * len(entries)
        ids = to_device(tokens + positions, self.device)
        if PENDING in tokens:
            rows = [row for row, count in zip(step.rows, counts, strict=True) for _ in range(count)]
            known = ids[: len(tokens)]
            known.copy_(torch.where(known == PENDING, self._tokens[to_device(rows, self.device)], known))
        page_table, seq_lens = self.table.batch(step.rows)
        geometry = Geometry(
            step.mode,
            page_table,
            seq_lens,
            self.capacity.page_size,
            rows=len(tokens),
            max_seq_len=max(lengths),
            max_new=longest,
            new_lens=None if uniform else to_device(counts, self.device, np.int32),
            host=HostLengths(counts, lengths) if exact else None,
            state_slots=None if self.pools.linear is None else to_device(step.state_slots, self.device),
        )
        return ForwardBatch(geometry, ids[: len(tokens)], ids[len(tokens) :])

    def _check_every_layer(self) -> None:
        """For debugging: stop at the first layer whose output is not finite."""

        def checker(layer_id: int) -> None:
            def check(_module: object, _inputs: object, output: Tensor) -> None:
                if not bool(torch.isfinite(output).all()):
                    raise NotFinite(layer_id)

            self.model.layers[layer_id].register_forward_hook(check)

        for layer_id in range(len(self.model.layers)):
            checker(layer_id)


def build_table(capacity: Capacity, device: torch.device) -> tuple[PageAllocator, SlotTable]:
    """The pages, and which request has which."""
    # A config may claim any context, and the table is as wide; no request gets more pages than there are.
    width = min(-(-capacity.context_length // capacity.page_size), max(capacity.num_pages, 1 << 16))
    try:
        allocator = PageAllocator(capacity.num_pages)
        table = SlotTable(
            allocator,
            page_size=capacity.page_size,
            max_requests=capacity.max_batch,
            max_pages=width,
            device=device,
        )
    except MemoryError as error:
        raise PoolError(
            f"the table of {capacity.max_batch} requests with {width} pages of {capacity.page_size} tokens each, of "
            f"{capacity.num_pages} pages in all, cannot be allocated; lower `max_batch`, `context_length` or "
            "`num_pages`",
            settings=["max_batch", "context_length", "num_pages"],
        ) from error
    return allocator, table


def build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: DType,
    device: torch.device,
) -> KVPools:
    """The pools that the layers of a rank's ``spec`` need; ``dtype`` is the model's."""
    try:
        return _build_pools(spec, capacity, dtype, kv_dtype, device)
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise the first, and its subclass for CUDA
        needed = capacity.num_pages * bytes_per_page(spec, capacity.page_size, kv_dtype)
        what = f"{capacity.num_pages} pages of {capacity.page_size} tokens take {needed / 2**30:.1f} GiB"
        settings = ["num_pages"]
        if capacity.state_slots:
            states = capacity.state_slots * bytes_per_state(spec, dtype)
            what += f" and {capacity.state_slots} linear states {states / 2**30:.1f} GiB"
            settings += ["state_slots", "max_batch"]
        lower = " or ".join(f"`{setting}`" for setting in settings)
        raise PoolError(f"{what}, which cannot be allocated; lower {lower}", settings=settings) from error


def _build_pools(
    spec: ModelSpec,
    capacity: Capacity,
    dtype: torch.dtype,
    kv_dtype: DType,
    device: torch.device,
) -> KVPools:
    kinds = spec.kinds
    mha = mla = None
    if AttentionKind.MHA in kinds:
        mha = MHAPool(
            spec.layers, num_pages=capacity.num_pages, page_size=capacity.page_size, dtype=kv_dtype, device=device
        )
    if AttentionKind.MLA in kinds:
        mla = MLAPool(
            spec.layers, num_pages=capacity.num_pages, page_size=capacity.page_size, dtype=kv_dtype, device=device
        )
    linear = None
    if spec.linear_layers:
        state_dtype = DType(str(dtype).removeprefix("torch."))
        linear = LinearStatePool(spec.layers, num_slots=capacity.state_slots, dtype=state_dtype, device=device)
    return KVPools(mha=mha, mla=mla, linear=linear)


def bytes_per_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What one request's linear states take in all layers of a rank's ``spec`` together.

    Recurrent states are float32. What a convolution remembers are activations, in the model's own ``dtype``.
    """
    total = 0
    for layer in spec.linear_layers:
        dims = layer.linear
        assert dims is not None
        total += dims.heads * dims.key_dim * dims.value_dim * torch.float32.itemsize
        total += dims.conv_channels * dims.conv_width * dtype.itemsize
    return total


def bytes_per_page(spec: ModelSpec, page_size: int, kv_dtype: DType) -> int:
    """What one page takes in all layers of a rank's ``spec`` together."""
    row = 0
    for layer in spec.full_layers:
        if layer.mla is not None:
            row += layer.mla.row_dim
        else:
            row += layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    return row * page_size * torch_dtype(kv_dtype).itemsize
