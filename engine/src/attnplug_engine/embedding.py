"""The embedder: pooled hidden states of a model, one vector per text or list of token ids."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnplug import ForwardMode, PoolError, Serving, UsageError
from attnplug.host import Selection, compile_progress
from attnplug_engine.checkpoints.pooling import EmbeddingRules, Pooling, read_rules
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.completion import StartUp
from attnplug_engine.execution.compilations import Compilation, CompilationMark
from attnplug_engine.execution.compile_ahead import compile_ahead
from attnplug_engine.memory.capacity import Capacity, bytes_per_page
from attnplug_engine.models.decoder import LoadedModel
from attnplug_engine.options import EmbedOptions, EngineOptions
from attnplug_engine.parallel.collectives import SINGLE, TensorParallel
from attnplug_engine.prepare import Prepared, prepare
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_engine.scheduling.warm_up import embedding_batches
from attnplug_engine.sizing import cache_budget, page_and_context
from attnplug_engine.text.encoder import PromptEncoder, naming_prompt
from attnplug_engine.text.errors import PromptError

Prompt = str | Sequence[int]

STEP_TOKENS = 8192
"""Most tokens of whole prompts that run together. A longer prompt runs alone."""

_GPU_CACHE_SHARE = 0.5
"""Largest share of free memory for the cache; activations of a long prompt need some as well."""


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Embedding of one prompt: ``vector [hidden]`` float32 on the CPU."""

    index: int
    vector: Tensor
    prompt_tokens: int


class Embedder:
    """A model that embeds: ``Embedder("tiny:llama").embed(["a text", [1, 2, 3]])``.

    Settings are the fields of :class:`EmbedOptions`. On a GPU, ``on_compile(done, total)`` is called while kernels are
    compiled, and ``on_warm_up`` while prompts of every kind run, so that no prompt waits for a compiler. Under tensor
    parallelism every rank makes the same calls and gets the same vectors. Nothing stays in the cache from one prompt to
    the next.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: EmbedOptions | None = None,
        *,
        parallel: TensorParallel = SINGLE,
        on_compile: Callable[[int, int], None] | None = None,
        on_warm_up: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        started = time.perf_counter()
        model = os.fspath(model)
        given = replace(options or EmbedOptions(), **settings)
        checked = given.for_engine()
        self.rules = read_rules(_folder(model), given.pooling, given.normalize)
        self._named_prompt = given.prompt_name
        self._prefix = _prefix(self.rules, given.prompt_name)
        prepared = prepare(model, checked, parallel, is_embedding=True)
        _check_causal(model, prepared.loaded)
        on_gpu = prepared.runtime.module is not None
        compilations = CompilationMark() if on_gpu else None
        self.vocab_size = prepared.loaded.module.vocab_size
        self._encoder = PromptEncoder(model, self.vocab_size)
        self._chunk_size = None if checked.chunked_prefill_size == -1 else checked.chunked_prefill_size
        with compile_progress(on_compile):
            self.selection, self.runner = prepared.build(
                lambda selection: _capacity(prepared, checked, selection),
                Serving(is_embedding=True, chunked_prefill_size=checked.chunked_prefill_size, disable_radix_cache=True),
            )
        self.capacity = self.runner.capacity
        self._gather = _gather_exactly if checked.batch_invariant else _gather
        ahead = compile_ahead(model, given, prepared.device, parallel, on_compile)
        if on_gpu:
            self.warm_up(on_warm_up)
        compiled = () if compilations is None else tuple(compilations.since())
        self.start_up = StartUp(time.perf_counter() - started, (*ahead.compiled, *compiled), ahead.problem)
        self._started_at = CompilationMark() if on_gpu else None

    @property
    def compilations_since_start(self) -> list[Compilation]:
        """Kernels that were compiled or loaded since start-up, by any code of this process. A prompt waited (E1)."""
        return [] if self._started_at is None else self._started_at.since()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Embed prompts of every kind once, so that the first prompt compiles nothing (E1). Done at start on a GPU."""
        batches = list(embedding_batches(self.capacity, STEP_TOKENS))
        for done, prompts in enumerate(batches):
            if progress is not None:
                progress(done, len(batches))
            try:
                for _ in self.stream(prompts):
                    pass
            except torch.OutOfMemoryError:
                if sum(map(len, prompts)) <= STEP_TOKENS:
                    raise
                # Prompts of this length do not fit, so none of them will wait for a compiler.
        self.runner.backend_usage.clear()

    def embed(self, prompts: Sequence[Prompt]) -> list[Embedding]:
        """Return one embedding per prompt, in their order."""
        if isinstance(prompts, str) or not all(isinstance(prompt, str | Sequence) for prompt in prompts):
            raise UsageError(f"prompts is {prompts!r:.60}; give a list of prompts, each a text or a list of token ids")
        tokens = []
        for number, prompt in enumerate(prompts):
            with naming_prompt(f"prompt {number}"):
                tokens.append(self.tokens(prompt))
        return list(self.stream(tokens))

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's tokens, with the text that goes before it. Raises UsageError or PoolError if it cannot be
        embedded."""
        if self._named_prompt is not None and not isinstance(prompt, str):
            raise PromptError(f"the prompt {self._named_prompt!r} goes before texts, and this one is token ids")
        found = tuple(self._encoder.encode(self._prefix + prompt if isinstance(prompt, str) else prompt))
        if not found:
            raise PromptError("an empty prompt has no hidden state to embed; give at least one token")
        if len(found) > self.capacity.context_length:
            raise PromptError(
                f"the prompt has {len(found)} tokens, more than the context of {self.capacity.context_length} "
                "(`context_length`, and the model's own)",
                settings=["context_length"],
            )
        if self._pages(len(found)) > self.capacity.num_pages:
            room = self.capacity.num_pages * self.capacity.page_size
            raise PoolError(f"the prompt has {len(found)} tokens, and the memory left for their cache holds {room}")
        return found

    def stream(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[Embedding]:
        """Embed the results of :meth:`tokens`; yield embeddings in the order of the prompts."""
        requests = [Request(index, tokens, SamplingParams(max_tokens=1)) for index, tokens in enumerate(prompts)]
        for together in self._batches(requests):
            yield from self._embed(together)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.capacity.page_size)

    def _batches(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Group prompts that have cache rows at the same time, in order: as many as fit, at least one."""
        together: list[Request] = []
        tokens = pages = 0
        for request in requests:
            length = len(request.prompt)
            full = len(together) == self.capacity.max_batch or tokens + length > STEP_TOKENS
            if together and (full or pages + self._pages(length) > self.capacity.num_pages):
                yield together
                together, tokens, pages = [], 0, 0
            together.append(request)
            tokens, pages = tokens + length, pages + self._pages(length)
        if together:
            yield together

    def _embed(self, requests: list[Request]) -> Iterator[Embedding]:
        """Run prompts that fit together, in one step or, if prompts are chunked, in several."""
        table, states = self.runner.table, self.runner.states
        gathered: dict[int, Tensor] = {}
        try:
            for request in requests:
                request.row = table.admit()
                request.slot = None if states is None else states.allocate()
            for entries in _steps(requests, self._chunk_size):
                for entry, rows in zip(entries, self._run(entries), strict=True):
                    before = gathered.get(entry.request.id)
                    gathered[entry.request.id] = self._gather(self.rules.pooling, before, rows)
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
            self.runner.table.extend(row, len(entry.token_ids))
        slots = tuple(request.slot for request in requests if request.slot is not None)
        hidden = self.runner.hidden_states(Step(ForwardMode.EXTEND, entries, (), rows, slots))
        return torch.split(hidden, [len(entry.token_ids) for entry in entries])

    def _finished(self, requests: list[Request], gathered: dict[int, Tensor]) -> Iterator[Embedding]:
        if not requests:
            return
        vectors = torch.stack([gathered.pop(request.id) for request in requests])
        if not vectors.is_floating_point():
            vectors = vectors.double().mul_(_MEAN_STEP)
        if self.rules.pooling is Pooling.MEAN:
            lengths = torch.tensor([len(request.prompt) for request in requests], device=vectors.device)
            vectors = vectors / lengths.unsqueeze(1)
        vectors = vectors.float()
        if self.rules.normalize:
            # The order of a norm's sum may depend on the number of vectors.
            parts = vectors.split(1) if self.runner.model.batch_invariant else (vectors,)
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


_MEAN_STEP = 2.0**-32
"""Resolution of a mean under ``batch_invariant``. A sum overflows at 2**31."""


def _gather_exactly(pooling: Pooling, before: Tensor | None, rows: Tensor) -> Tensor:
    """Update the pooled state like ``_gather``; a sum is int64, in steps, so its order does not matter."""
    if pooling is not Pooling.MEAN:
        return _gather(pooling, before, rows)
    steps = rows.double().div_(_MEAN_STEP).round_().long().sum(0)
    return steps if before is None else before + steps


def _folder(model: str) -> Path | None:
    if model.startswith(TINY):
        return None
    return (
        Path(model) if os.path.isdir(model) else Path(model).parent
    )  # os.path: Path.is_dir raises for a name that is too long


def _prefix(rules: EmbeddingRules, name: str | None) -> str:
    prefix = rules.prefix(name)
    if prefix and not rules.pools_prompt and rules.pooling is Pooling.MEAN:
        raise UsageError(
            f"{rules.source} asks for a mean that leaves out the prompt {prefix!r}, which is not supported; put "
            "another text before your prompts yourself, or use another `pooling`",
            settings=["pooling"],
        )
    return prefix


def _check_causal(model: str, loaded: LoadedModel) -> None:
    """Raise for embedding models with bidirectional attention: they would be embedded wrongly."""
    if loaded.config.get("is_causal") is False:
        raise UsageError(
            f"{model}: the config's 'is_causal' is false: tokens attend to those after them, which no model here does"
        )


def _capacity(prepared: Prepared, options: EngineOptions, selection: Selection) -> Capacity:
    """Return a capacity for the longest prompt, and for as many shorter ones as run together."""
    spec = prepared.loaded.spec
    page_size, context = page_and_context(spec, options, selection)
    num_pages = max(-(-context // page_size), STEP_TOKENS // page_size + options.max_batch)
    if spec.full_layers:
        page = bytes_per_page(spec, page_size, prepared.kv_dtype, prepared.dtype)
        num_pages = max(min(num_pages, cache_budget(prepared.device, _GPU_CACHE_SHARE) // page), 1)
    whole = max(context, STEP_TOKENS)
    chunk = options.step_tokens(on_gpu=prepared.runtime.module is not None)
    step = whole if chunk == -1 else min(chunk, whole)
    slots = options.max_batch if spec.linear_layers else 0
    return Capacity(num_pages, page_size, options.max_batch, step, context, slots)
