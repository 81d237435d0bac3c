"""Engine and embedder: generate tokens, or embed, with a model on any installed backend."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnplug import PoolError, UsageError
from attnplug.host import compile_progress
from attnplug_engine.checkpoints.pooling import read_rules
from attnplug_engine.checkpoints.random import TINY
from attnplug_engine.checkpoints.safetensors import checkpoint_folder
from attnplug_engine.completion import Completion, Usage
from attnplug_engine.execution import signals
from attnplug_engine.execution.compilations import Compilation, CompilationMark
from attnplug_engine.execution.compile_ahead import compile_ahead
from attnplug_engine.options import EmbedOptions, EngineOptions
from attnplug_engine.parallel.collectives import SINGLE, TensorParallel
from attnplug_engine.prepare import prepare
from attnplug_engine.request import (
    DEFAULT_MAX_TOKENS,
    FinishReason,
    Follower,
    Request,
    SamplingParams,
    Update,
)
from attnplug_engine.scheduling.prefix_cache import CacheStatistics, PrefixCache
from attnplug_engine.scheduling.scheduler import Scheduler
from attnplug_engine.scheduling.step import RoundResult, StepResult
from attnplug_engine.serving.embedding import Embedding, EmbeddingLoop
from attnplug_engine.serving.sizing import MemoryPlan
from attnplug_engine.serving.start_up import capture_graphs, equalize_pages, start_loop
from attnplug_engine.serving.statistics import StartUp, Statistics
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.encoder import NO_STOP_TEXTS, Prompt, naming_prompt
from attnplug_engine.text.errors import PromptError
from attnplug_engine.text.transcript import Transcript


class Engine:
    """A model that generates on any installed backend.

    >>> engine = Engine("tiny:llama", attention_backend="torch_native")
    >>> engine.generate(["Hello"], max_tokens=4)  # a list with one Completion

    Settings are the fields of :class:`EngineOptions`. ``progress(done, total)`` is called while a checkpoint's tensors
    are read, ``on_memory`` with the estimated memory before that, ``on_compile`` while backends' kernels are compiled,
    ``on_capture`` while CUDA graphs are captured, and ``on_warm_up`` while requests of every kind compile the other
    kernels, on a GPU. Under tensor parallelism every rank makes the same calls: each runs the same schedule and samples
    the same tokens.

    An engine may be shared by iterators and by threads (of one rank). Each step runs all requests, and every request's
    tokens are kept for each of its followers.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        parallel: TensorParallel = SINGLE,
        progress: Callable[[int, int], None] | None = None,
        on_memory: Callable[[MemoryPlan], None] | None = None,
        on_compile: Callable[[int, int], None] | None = None,
        on_capture: Callable[[int, int], None] | None = None,
        on_warm_up: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        started = time.perf_counter()
        self.options = options = replace(options or EngineOptions(), **settings)
        model = os.fspath(model)
        prepared = prepare(model, options, parallel, progress=progress, on_memory=on_memory)
        on_gpu = prepared.choice.runtime.module is not None
        compilations = CompilationMark() if on_gpu else None  # importing Triton takes a second
        self.registry = prepared.choice.registry
        self.vocab_size = prepared.loaded.module.vocab_size
        self._encoder = prepared.encoder
        self.tokenizer = self._encoder.tokenizer
        self.stop_token_ids = prepared.end_tokens
        with compile_progress(on_compile):
            self.selection, self.runner = prepared.build()
            self.rounds, self.draft_selection = prepared.build_rounds(self.runner)
            """Runner of speculative rounds and selection of the draft's backend; None if there are none."""
        ahead = compile_ahead(
            model, options, prepared.choice.device, parallel, on_compile, self.runner.capacity.num_pages
        )
        self.graphs = capture_graphs(self.runner, self.rounds, options, on_capture)
        """Captured graphs."""
        if parallel.size > 1:
            equalize_pages(self.runner)
        page_size, states = self.runner.capacity.page_size, self.runner.states
        self.cache = PrefixCache(self.runner.allocator, page_size, states) if options.prefix_cache else None
        self.loop = start_loop(self.runner, self.rounds, options, self.cache, on_warm_up)
        self._next_id = 0
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        compiled = () if compilations is None else tuple(compilations.since())
        self.start_up = StartUp(time.perf_counter() - started, (*ahead.compiled, *compiled), ahead.not_recorded)
        self._started_at = CompilationMark() if on_gpu else None

    @property
    def compilations_since_start(self) -> list[Compilation]:
        """Kernels that were compiled or loaded since start-up, by any code of this process. A request waited (E1)."""
        return [] if self._started_at is None else self._started_at.since()

    def add(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Queue a prompt for the next step. It also ends at the checkpoint's end-of-text tokens. Raises UsageError or
        PoolError."""
        if not self.stop_token_ids <= params.stop_token_ids:
            params = replace(params, stop_token_ids=params.stop_token_ids | self.stop_token_ids)
        tokens = tuple(self._encoder.encode(prompt))
        transcript = None
        if params.stop:
            if self.tokenizer is None:
                raise UsageError(NO_STOP_TEXTS)
            transcript = Transcript(self.tokenizer, params.stop)
            # Decoded text never contains special tokens, so a stop text that is one means the token.
            special = self.tokenizer.special_tokens
            named = {special[text] for text in params.stop if text in special}
            params = replace(params, stop_token_ids=params.stop_token_ids | named)
        with self._queue_lock, self._lock, signals.deferred():
            request = Request(self._next_id, tokens, params, transcript=transcript)
            self.loop.add(request)
            self._next_id += 1
        return request

    def abort(self, request: Request) -> None:
        """End a request now; it keeps the tokens that it has."""
        with self._lock, signals.deferred():
            self.loop.abort(request)

    def step(self) -> StepResult | RoundResult | None:
        """Run one step; return None if there is no work.

        With overlap, the next step is launched before this one is awaited. A request whose logits are not finite ends
        with an error; the others are not affected. If a step fails, all steps in flight are rolled back and its error
        is raised; their requests may continue. An interrupt is raised after the step.
        """
        with self._lock, signals.deferred():
            return self.loop.step()

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> Iterator[Update]:
        """Generate for all prompts. Yields each token as it is sampled, and each prompt's end."""
        if isinstance(prompts, str) or not all(isinstance(prompt, str | Sequence | Chat) for prompt in prompts):
            raise UsageError(
                f"prompts is {prompts!r:.60}; give a list of prompts, each a text, a Chat or a list of token ids"
            )
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts were given with {len(each)} sampling parameters")
        requests: list[Request] = []
        try:
            for number, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
                with naming_prompt(f"prompt {number}"):
                    requests.append(self.add(prompt, one))
        except BaseException:  # all or none
            for request in requests:
                self.abort(request)
            raise
        yield from self.follow(requests)

    def follow(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Run until these requests are finished. Yields all their tokens, in order, and their ends.

        Closing the iterator early aborts those of its requests that have no other follower.
        """
        updates: deque[Update] = deque()
        followers = [Follower(updates, index) for index in range(len(requests))]
        unfinished = len(requests)
        try:
            with self._lock:
                self._check_own(requests)
                for request, follower in zip(requests, followers, strict=True):
                    for token in request.output:
                        follower.notify(request, token)
                    if request.finish_reason is None:
                        request.followers.append(follower)
                    else:
                        follower.notify(request, None)
            while unfinished:
                if not updates:
                    self._advance(updates)
                    continue
                update = updates.popleft()
                unfinished -= update.token is None
                yield update
        finally:
            with self._lock, signals.deferred():
                for request, follower in zip(requests, followers, strict=True):
                    if follower in request.followers:
                        request.followers.remove(follower)
                        if not request.followers:
                            self.abort(request)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Generate for all prompts; return completions in their order. ``sampling`` are fields of ``SamplingParams``,
        shared by all."""
        if "stop_token_ids" in sampling:
            sampling["stop_token_ids"] = frozenset(sampling["stop_token_ids"])
        if isinstance(stop := sampling.get("stop"), str | list):
            sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        if params is None:
            params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
        elif sampling:
            raise UsageError(f"give params or {', '.join(sampling)}, not both")
        ended = {update.index: update.request for update in self.stream(prompts, params) if update.token is None}
        return [self.completion(index, ended[index]) for index in range(len(prompts))]

    def completion(self, index: int, request: Request) -> Completion:
        """Return the completion of a finished request."""
        assert request.finish_reason is not None
        text = None if self.tokenizer is None else self.tokenizer.decode(request.output)
        if request.transcript is not None:
            text = request.transcript.text
        error = None
        if request.finish_reason is FinishReason.ERROR:
            error = f"the logits of prompt {index} are not finite after {len(request.output)} tokens"
            if not self.options.check_layers:
                error += "; check_layers (--check-layers) stops at the first layer that is at fault"
        return Completion(
            index,
            list(request.output),
            text,
            request.finish_reason.value,
            Usage(len(request.prompt), len(request.output), request.cached_tokens),
            error,
            None if request.params.logprobs is None else list(request.logprobs),
        )

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def statistics(self) -> Statistics:
        return self.loop.statistics

    @property
    def cache_statistics(self) -> CacheStatistics | None:
        return None if self.cache is None else self.cache.statistics

    def _check_own(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.finish_reason is None and not self.scheduler.holds(request):
                raise UsageError(f"request {request.id} is not this engine's; follow what its add() returned")

    def _advance(self, updates: deque[Update]) -> None:
        """Run a step, unless another thread's step brought updates while this one waited."""
        with self._queue_lock:  # fair: a thread that steps in a loop would starve others
            self._lock.acquire()
        try:
            if not updates:
                result = self.step()
                assert result is not None, "an unfinished request is work"
        finally:
            self._lock.release()


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
        options = replace(options or EmbedOptions(), **settings)
        folder = None if model.startswith(TINY) else checkpoint_folder(model)
        self.rules = read_rules(folder, options.pooling, options.normalize)
        self._prompt_name, self._prefix = options.prompt_name, self.rules.prefix(options.prompt_name)
        prepared = prepare(model, options.for_engine(), parallel, is_embedding=True)
        self.vocab_size = prepared.loaded.module.vocab_size
        self._encoder = prepared.encoder
        on_gpu = prepared.choice.runtime.module is not None
        compilations = CompilationMark() if on_gpu else None
        with compile_progress(on_compile):
            self.selection, self.runner = prepared.build()
        self.capacity = self.runner.capacity
        chunk_size = None if options.chunked_prefill_size == -1 else options.chunked_prefill_size
        self._loop = EmbeddingLoop(self.runner, self.rules, chunk_size)
        ahead = compile_ahead(model, options, prepared.choice.device, parallel, on_compile)
        if on_gpu:
            self.warm_up(on_warm_up)
        compiled = () if compilations is None else tuple(compilations.since())
        self.start_up = StartUp(time.perf_counter() - started, (*ahead.compiled, *compiled), ahead.not_recorded)
        self._started_at = CompilationMark() if on_gpu else None

    @property
    def compilations_since_start(self) -> list[Compilation]:
        """Kernels that were compiled or loaded since start-up, by any code of this process. A prompt waited (E1)."""
        return [] if self._started_at is None else self._started_at.since()

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Embed prompts of every kind once, so that the first prompt compiles nothing (E1). Done at start on a GPU."""
        self._loop.warm_up(progress)

    def embed(self, prompts: Sequence[str | Sequence[int]]) -> list[Embedding]:
        """Return one embedding per prompt, in their order."""
        if isinstance(prompts, str) or not all(isinstance(prompt, str | Sequence) for prompt in prompts):
            raise UsageError(f"prompts is {prompts!r:.60}; give a list of prompts, each a text or a list of token ids")
        tokens = []
        for number, prompt in enumerate(prompts):
            with naming_prompt(f"prompt {number}"):
                tokens.append(self.tokens(prompt))
        return list(self.stream(tokens))

    def tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's tokens, with the text that goes before it. Raises UsageError or PoolError if it cannot be
        embedded."""
        if self._prompt_name is not None and not isinstance(prompt, str):
            raise PromptError(f"the prompt {self._prompt_name!r} goes before texts, and this one is token ids")
        found = tuple(self._encoder.encode(self._prefix + prompt if isinstance(prompt, str) else prompt))
        if not found:
            raise PromptError("an empty prompt has no hidden state to embed; give at least one token")
        if len(found) > self.capacity.context_length:
            raise PromptError(
                f"the prompt has {len(found)} tokens, more than the context of {self.capacity.context_length} "
                "(`context_length`, and the model's own)",
                settings=["context_length"],
            )
        if not self._loop.fits(len(found)):
            room = self.capacity.num_pages * self.capacity.page_size
            raise PoolError(f"the prompt has {len(found)} tokens, and the memory left for their cache holds {room}")
        return found

    def stream(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[Embedding]:
        """Embed the results of :meth:`tokens`; yield embeddings in the order of the prompts."""
        return self._loop.stream(prompts)
