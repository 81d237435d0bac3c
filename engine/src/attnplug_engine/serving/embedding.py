"""Embedding of prompts: batching, forward steps, and pooling of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug import ForwardMode, ModelSpec
from attnplug.host import Selection
from attnplug.machine.runtime import runtime_of
from attnplug_engine.checkpoints.pooling import EmbeddingRules
from attnplug_engine.execution.runner import ModelRunner
from attnplug_engine.memory.capacity import Capacity, bytes_per_page
from attnplug_engine.options import EngineOptions
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_engine.scheduling.warm_up import embedding_batches
from attnplug_engine.serving.sizing import cache_budget, page_and_context
from attnplug_engine.settings.pooling import Pooling

STEP_TOKENS = 8192
"""Most tokens of whole prompts that run together. A longer prompt runs alone."""

_GPU_CACHE_SHARE = 0.5
"""Largest share of free memory for the cache; activations of a long prompt need some as well."""


def embedding_capacity(
    spec: ModelSpec,
    options: EngineOptions,
    selection: Selection,
    dtype: torch.dtype,
    kv_dtype: str,
    device: torch.device,
) -> Capacity:
    """Return a capacity for the longest prompt, and for as many shorter ones as run together."""
    page_size, context = page_and_context(spec, options, selection)
    num_pages = max(-(-context // page_size), STEP_TOKENS // page_size + options.max_batch)
    if spec.full_layers:
        page = bytes_per_page(spec, page_size, kv_dtype, dtype)
        num_pages = max(min(num_pages, cache_budget(device, _GPU_CACHE_SHARE) // page), 1)
    whole = max(context, STEP_TOKENS)
    chunk = options.step_tokens(on_gpu=runtime_of(device).module is not None)
    step = whole if chunk == -1 else min(chunk, whole)
    slots = options.max_batch if spec.linear_layers else 0
    return Capacity(num_pages, page_size, options.max_batch, step, context, slots)


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Embedding of one prompt: ``vector [hidden]`` float32 on the CPU."""

    index: int
    vector: Tensor
    prompt_tokens: int


class EmbeddingLoop:
    """Runs prompts in batches that fit into a runner's cache, and pools their hidden states by a checkpoint's rules.

    ``chunk_size`` is the most tokens of a step; None for prompts that are not chunked. Nothing stays in the cache from
    one batch to the next.
    """

    def __init__(self, runner: ModelRunner, rules: EmbeddingRules, chunk_size: int | None) -> None:
        self._runner, self._capacity, self._rules, self._chunk_size = runner, runner.capacity, rules, chunk_size
        self._gather = _gather_exactly if runner.model.batch_invariant else _gather

    def fits(self, tokens: int) -> bool:
        """True if the cache has pages for a prompt of ``tokens`` tokens."""
        return self._pages(tokens) <= self._capacity.num_pages

    def warm_up(self, progress: Callable[[int, int], None] | None) -> None:
        """Embed prompts of every kind once."""
        batches = list(embedding_batches(self._capacity, STEP_TOKENS))
        for done, prompts in enumerate(batches):
            if progress is not None:
                progress(done, len(batches))
            try:
                for _ in self.stream(prompts):
                    pass
            except torch.OutOfMemoryError:
                if sum(map(len, prompts)) <= STEP_TOKENS:
                    raise
                # Prompts of this length do not fit, so their kernels are never needed.
        self._runner.backend_usage.clear()

    def stream(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[Embedding]:
        """Embed prompts that fit; yield embeddings in their order."""
        requests = [Request(index, tokens, SamplingParams(max_tokens=1)) for index, tokens in enumerate(prompts)]
        for together in self._batches(requests):
            yield from self._embed(together)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._capacity.page_size)

    def _batches(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Group prompts that have cache rows at the same time, in order: as many as fit, at least one."""
        together: list[Request] = []
        tokens = pages = 0
        for request in requests:
            length = len(request.prompt)
            full = len(together) == self._capacity.max_batch or tokens + length > STEP_TOKENS
            if together and (full or pages + self._pages(length) > self._capacity.num_pages):
                yield together
                together, tokens, pages = [], 0, 0
            together.append(request)
            tokens, pages = tokens + length, pages + self._pages(length)
        if together:
            yield together

    def _embed(self, requests: list[Request]) -> Iterator[Embedding]:
        """Run prompts that fit together, in one step or, if prompts are chunked, in several."""
        table, states = self._runner.table, self._runner.states
        gathered: dict[int, Tensor] = {}
        try:
            for request in requests:
                request.row = table.admit()
                request.slot = None if states is None else states.allocate()
            for entries in _steps(requests, self._chunk_size):
                for entry, rows in zip(entries, self._run(entries), strict=True):
                    before = gathered.get(entry.request.id)
                    gathered[entry.request.id] = self._gather(self._rules.pooling, before, rows)
                yield from self._finished([entry.request for entry in entries if entry.sampled], gathered)
        finally:
            for request in requests:
                if request.row is not None:
                    table.release(request.row)
                if states is not None and request.slot is not None:
                    states.release(request.slot)

    def _run(self, entries: tuple[StepEntry, ...]) -> tuple[Tensor, ...]:
        """Return hidden states ``[tokens, hidden]`` of each entry."""
        requests = [entry.request for entry in entries]
        rows = tuple(request.row for request in requests if request.row is not None)
        for row, entry in zip(rows, entries, strict=True):
            self._runner.table.extend(row, len(entry.token_ids))
        slots = tuple(request.slot for request in requests if request.slot is not None)
        hidden = self._runner.hidden_states(Step(ForwardMode.EXTEND, entries, (), rows, slots))
        return torch.split(hidden, [len(entry.token_ids) for entry in entries])

    def _finished(self, requests: list[Request], gathered: dict[int, Tensor]) -> Iterator[Embedding]:
        if not requests:
            return
        vectors = torch.stack([gathered.pop(request.id) for request in requests])
        if not vectors.is_floating_point():
            vectors = vectors.double().mul_(_FIXED_POINT)
        if self._rules.pooling is Pooling.MEAN:
            lengths = torch.tensor([len(request.prompt) for request in requests], device=vectors.device)
            vectors = vectors / lengths.unsqueeze(1)
        vectors = vectors.float()
        if self._rules.normalize:
            # The order of a norm's sum may depend on the number of vectors.
            parts = vectors.split(1) if self._runner.model.batch_invariant else (vectors,)
            vectors = torch.cat([F.normalize(part, dim=1) for part in parts])
        for request, vector in zip(requests, vectors.cpu(), strict=True):
            yield Embedding(request.id, vector, len(request.prompt))


def _steps(requests: list[Request], most: int | None) -> Iterator[tuple[StepEntry, ...]]:
    """Yield steps over the prompts in order, ``most`` tokens each; None means one step."""
    entries: list[StepEntry] = []
    left = most
    for request in requests:
        done, length = 0, len(request.prompt)
        while done < length:
            end = length if left is None else min(length, done + left)
            entries.append(StepEntry(request, done, request.prompt[done:end], sampled=end == length))
            left = None if left is None else left - (end - done)
            done = end
            if left == 0:
                yield tuple(entries)
                entries, left = [], most
    if entries:
        yield tuple(entries)


def _gather(pooling: Pooling, before: Tensor | None, rows: Tensor) -> Tensor:
    """Update the pooled state ``[hidden]`` float32 of a prompt with its hidden states ``rows [tokens, hidden]``."""
    if pooling is Pooling.LAST:
        return rows[-1].float()
    if pooling is Pooling.FIRST:
        return rows[0].float() if before is None else before
    total = rows.sum(dim=0, dtype=torch.float32)
    return total if before is None else before + total


_FIXED_POINT = 2.0**-32
"""Fixed-point resolution of mean pooling under ``batch_invariant``. An int64 sum overflows at 2**31."""


def _gather_exactly(pooling: Pooling, before: Tensor | None, rows: Tensor) -> Tensor:
    """Update the pooled state like ``_gather``. Sums are fixed-point int64, so their order does not change a bit."""
    if pooling is not Pooling.MEAN:
        return _gather(pooling, before, rows)
    total = rows.double().div_(_FIXED_POINT).round_().long().sum(0)
    return total if before is None else before + total
