"""The engine: generates tokens for texts, conversations or token ids."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from attnplug import Serving, UsageError
from attnplug.host import Selection, compile_progress
from attnplug_engine.completion import Completion, StartUp, Statistics, Usage
from attnplug_engine.execution import signals
from attnplug_engine.execution.compilations import Compilation, CompilationMark
from attnplug_engine.execution.compile_ahead import compile_ahead
from attnplug_engine.execution.extend_times import measured_extends
from attnplug_engine.options import EngineOptions
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
from attnplug_engine.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from attnplug_engine.scheduling.step import RoundResult, StepResult
from attnplug_engine.sizing import MemoryPlan, capacity
from attnplug_engine.speculation.rounds import RoundRunner
from attnplug_engine.start_up import capture_graphs, equalize_pages, make_scheduler, warm_up
from attnplug_engine.step_loop import StepLoop
from attnplug_engine.text.chat import Chat
from attnplug_engine.text.encoder import Prompt, PromptEncoder, naming_prompt
from attnplug_engine.text.tokenizer import end_tokens
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
        on_gpu = prepared.runtime.module is not None
        compilations = CompilationMark() if on_gpu else None  # importing Triton takes a second
        self.registry = prepared.registry
        self.vocab_size = prepared.loaded.module.vocab_size
        self._encoder = PromptEncoder(model, self.vocab_size)
        self.tokenizer = self._encoder.tokenizer
        self.stop_token_ids = frozenset() if options.ignore_eos else end_tokens(model, prepared.loaded.config)
        serving = Serving(
            chunked_prefill_size=options.step_tokens(on_gpu=on_gpu),
            disable_radix_cache=not options.prefix_cache,
        )
        with compile_progress(on_compile):
            self.selection, self.runner = prepared.build(
                lambda selection: capacity(
                    prepared.loaded.spec,
                    options,
                    selection,
                    prepared.dtype,
                    prepared.kv_dtype,
                    prepared.device,
                    prepared.draft_cache,
                ),
                serving,
                options.extend_policy,
                check_layers=options.check_layers,
                seed=options.seed,
                two_batch_overlap=options.two_batch_overlap,
            )
            runner = self.runner
            runner.extend_times = measured_extends(prepared.ranking, self.selection, runner.attention, runner.spec)
            self.rounds: RoundRunner | None = None
            """Runs the steps if the engine speculates."""
            self.draft_selection: Selection | None = None
            if (speculation := options.speculation) is not None:
                built = prepared.build_draft(self.runner, speculation, serving, options.extend_policy)
                self.draft_selection, draft = (None, None) if built is None else built
                self.rounds = RoundRunner(self.runner, draft, speculation, plan_stream=options.plan_stream)
        ahead = compile_ahead(model, options, prepared.device, parallel, on_compile, runner.capacity.num_pages)
        self.graphs = capture_graphs(self.runner, self.rounds, options, on_capture)
        """Captured graphs."""
        if parallel.size > 1:
            equalize_pages(runner)
        page_size, states = self.runner.capacity.page_size, self.runner.states
        self.cache = PrefixCache(self.runner.allocator, page_size, states) if options.prefix_cache else None
        overlap = on_gpu if options.overlap is None else options.overlap
        depth = MAX_IN_FLIGHT if overlap else 1
        self._next_id = 0
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        mixed = warm_up(runner, self.rounds, options, self.vocab_size, depth, on_warm_up) if on_gpu else None
        scheduler = make_scheduler(runner, self.rounds, options, self.cache, mixed)
        self.loop = StepLoop(runner, self.rounds, scheduler, depth)
        compiled = () if compilations is None else tuple(compilations.since())
        self.start_up = StartUp(time.perf_counter() - started, (*ahead.compiled, *compiled), ahead.problem)
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
                raise UsageError("stop texts need the checkpoint's tokenizer.json, and it has none; use stop_token_ids")
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
