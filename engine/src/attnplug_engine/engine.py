"""The engine: generates tokens for texts, conversations or token ids."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnplug import GraphLevel, PoolError, Serving, UsageError
from attnplug.host import Selection, compile_progress
from attnplug.machine.runtime import runtime_of
from attnplug.wrappers.forwarding import limited_by
from attnplug_engine.completion import Completion, StartUp, Statistics, Usage
from attnplug_engine.execution import signals
from attnplug_engine.execution.compilations import Compilation, CompilationMark
from attnplug_engine.execution.extend_times import measured_extends
from attnplug_engine.execution.in_flight import StepInFlight
from attnplug_engine.graphs.capture import GraphCapture
from attnplug_engine.graphs.capture_sizes import PREFILL_SIZES, default_prefill_sizes, default_sizes
from attnplug_engine.graphs.decode import DecodeGraphs, GraphReport
from attnplug_engine.graphs.prefill import PrefillGraphs, captures_extends, prefilling_child
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_engine.options import EngineOptions
from attnplug_engine.parallel.collectives import SINGLE, TensorParallel
from attnplug_engine.prepare import prepare
from attnplug_engine.request import (
    DEFAULT_MAX_TOKENS,
    FinishReason,
    Follower,
    Request,
    SamplingParams,
    TokenLogprobs,
    Update,
)
from attnplug_engine.scheduling.mixed_steps import MixedSteps, prefill_seconds, timed_prompts
from attnplug_engine.scheduling.prefix_cache import CacheStatistics, PrefixCache
from attnplug_engine.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from attnplug_engine.scheduling.step import RoundResult, Step, StepResult
from attnplug_engine.scheduling.warm_up import warm_up_batches
from attnplug_engine.sizing import MemoryPlan, capacity
from attnplug_engine.speculation.in_flight import RoundsInFlight
from attnplug_engine.speculation.round_graphs import RoundGraphs
from attnplug_engine.speculation.rounds import RoundRunner
from attnplug_engine.speculation.scheduler import RoundScheduler
from attnplug_engine.speculation.statistics import RoundStatistics
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
        self.graphs = self._capture(on_capture)
        """Captured graphs."""
        if parallel.size > 1:
            self._equalize_pages(parallel)
        page_size, states = self.runner.capacity.page_size, self.runner.states
        self.cache = PrefixCache(self.runner.allocator, page_size, states) if options.prefix_cache else None
        overlap = on_gpu if options.overlap is None else options.overlap
        self._depth = MAX_IN_FLIGHT if overlap else 1
        self._in_flight: deque[tuple[Step, StepInFlight | RoundsInFlight]] = deque()  # oldest first
        self._stepping = False
        self._leaving: list[Request] = []  # aborted; the scheduler does not know yet
        self.statistics = self._statistics()
        self._next_id = 0
        self._observed: set[Request] = set()  # unfinished, with stop texts or log probabilities
        self._lock = threading.RLock()
        self._queue_lock = threading.Lock()
        mixed = self._warm_up(parallel, on_warm_up) if on_gpu else None
        self.scheduler: Scheduler = self._scheduler(self.cache, mixed)
        compiled = () if compilations is None else tuple(compilations.since())
        self.start_up = StartUp(time.perf_counter() - started, compiled)
        self._started_at = CompilationMark() if on_gpu else None

    @property
    def compilations_since_start(self) -> list[Compilation]:
        """Kernels that were compiled or loaded since start-up, by any code of this process. A request waited (E1)."""
        return [] if self._started_at is None else self._started_at.since()

    def _scheduler(self, cache: PrefixCache | None, mixed_steps: MixedSteps | None) -> Scheduler:
        runner, options, rounds = self.runner, self.options, self.rounds
        room, held = runner.capacity, (runner.table, runner.allocator, cache)
        limits: dict[str, Any] = dict(
            max_batch=room.max_batch,
            max_step_tokens=room.max_step_tokens,
            context_length=room.context_length,
            whole_prompts=options.chunked_prefill_size == -1,
            mixed_steps=mixed_steps,
            states=runner.states,
            checkpoint=options.state_checkpoint,
            coordinator=runner.coordinator,
        )
        if rounds is None:
            return Scheduler(*held, **limits)
        return RoundScheduler(*held, rounds.speculation, short_hits=rounds.proposer.ahead, **limits)

    def _statistics(self) -> Statistics:
        rounds = None if self.rounds is None else RoundStatistics(self.rounds.speculation.steps)
        return Statistics(rounds=rounds, backend_usage=self.runner.backend_usage)

    def _warm_up(
        self, parallel: TensorParallel, progress: Callable[[int, int], None] | None = None
    ) -> MixedSteps | None:
        """Run requests of every kind once, so that the first request compiles nothing (E1). Return the limit of mixed
        steps, the same on all ranks; None if prompts are not chunked."""
        # Ranks run the same requests, so they count the pages that all of them have.
        capacity = replace(self.runner.capacity, num_pages=self.runner.allocator.free_pages)
        self.scheduler = self._scheduler(None, None)
        batches = list(warm_up_batches(capacity))
        for done, batch in enumerate(batches):
            if progress is not None:
                progress(done, len(batches))
            self._run_warm_up(batch)
        prompts = () if self.options.chunked_prefill_size == -1 else timed_prompts(capacity, self.vocab_size)
        times = [(len(request.prompt), self._run_warm_up([request])) for request in prompts]
        self.runner.backend_usage.clear()
        self.statistics = self._statistics()
        if self.runner.coordinator is not None:
            self.runner.coordinator.reset_statistics()
        if not times:
            return None
        seconds = torch.tensor([prefill_seconds(times)], dtype=torch.float64, device=self.runner.device)
        if parallel.size > 1:  # ranks run one schedule: that of the slowest
            seconds = parallel.all_gather(seconds, 0)
        per_token, per_position = seconds.amax(0).tolist()
        return MixedSteps.of(per_token, per_position, self.options.inter_token_latency)

    def _run_warm_up(self, batch: Sequence[Request]) -> float:
        """Run requests to their ends; return the seconds until the first one has a token."""
        started = time.perf_counter()
        for request in batch:
            self.scheduler.add(request)
            if request.params.logprobs is not None:
                self._observed.add(request)
        try:
            while self._step() is not None and not batch[0].output:
                pass
            seconds = time.perf_counter() - started
            while self._step() is not None:
                pass
        except torch.OutOfMemoryError as error:
            most = self.runner.capacity.max_step_tokens
            raise PoolError(
                f"a step of {most} tokens does not fit into the memory beside weights and caches; lower "
                "`chunked_prefill_size` or `num_pages`",
                settings=["chunked_prefill_size", "num_pages"],
            ) from error
        return seconds

    def _capture(self, progress: Callable[[int, int], None] | None) -> GraphReport:
        runner, options, rounds = self.runner, self.options, self.rounds
        level, limits = runner.attention.graph_level, limited_by(runner.backend, "cuda_graph")
        backend, target_limits = runner.backend, limits
        if rounds is not None and rounds.draft is not None and rounds.draft.attention.graph_level < level:
            backend = rounds.draft.backend
            level, limits = rounds.draft.attention.graph_level, (backend.backend_id.name,)
        runtime = runtime_of(runner.device)
        if runtime.graph is None:
            return GraphReport(level, limits, why_none=f"the device is {runner.device.type}")
        if not options.captures:
            why = "every layer is checked" if options.check_layers else "turned off"
            return GraphReport(level, limits, why_none=why)
        if level is GraphLevel.NEVER or (rounds is not None and level < GraphLevel.UNIFORM):
            names = " and ".join(limits) or backend.backend_id.name
            what = "cannot be captured" if level is GraphLevel.NEVER else "captures decode only, not verify"
            return GraphReport(level, limits, why_none=f"{names} {what}")
        sizes = options.cuda_graph_batch_sizes or default_sizes(runner.capacity.max_batch)
        before = runtime.module.mem_get_info(runner.device)[0]
        capture, (prefills, why_no_prefill) = GraphCapture(runner.device), self._prefills(target_limits)
        graphs: DecodeGraphs | RoundGraphs
        prefill_graphs: PrefillGraphs | None = None
        keep_all = options.cuda_graph_prefill_sizes is not None
        if rounds is None:
            steps = capture_steps(runner, sizes, capture, progress, prefills=prefills, keep_all=keep_all)
            graphs, prefill_graphs = steps.decode, steps.prefill
        else:
            graphs = rounds.capture(sizes, capture, progress, prefills=prefills, keep_all=keep_all)
            prefill_graphs = rounds.prefill_graphs
        if prefills and prefill_graphs is None:
            why_no_prefill = "the GPU needs longer for it than the host"
        taken = max(before - runtime.module.mem_get_info(runner.device)[0], 0)
        return GraphReport(
            level,
            limits,
            graphs.sizes,
            taken,
            backends=graphs.backends,
            prefill_sizes=() if prefill_graphs is None else prefill_graphs.sizes,
            why_no_prefill=why_no_prefill,
            why_no_draft_prefill="" if rounds is None or prefill_graphs is None else rounds.why_no_draft_prefill,
            prefill_by=prefilling_child(runner.backend),
        )

    def _prefills(self, limits: Sequence[str]) -> tuple[tuple[int, ...], str]:
        """Return the token counts for which prefills are captured, and the reason if there are none."""
        runner, options, capacity = self.runner, self.options, self.runner.capacity
        most = capacity.max_rows if self.rounds is None else capacity.max_step_tokens
        asked = options.cuda_graph_prefill_sizes
        if options.disable_prefill_cuda_graph:
            return (), "turned off"
        if captures_extends(runner.backend):
            # The chunk size was checked before the model was known; its context may be shorter.
            sizes = default_prefill_sizes(most) if asked is None else PREFILL_SIZES.check(asked, most, "context_length")
            return sizes, ""
        names = " and ".join(limits) or runner.backend.backend_id.name
        if asked is not None:
            raise UsageError(
                f"`{PREFILL_SIZES.name}` asks for CUDA graphs of prefills, and {names} cannot capture them; leave it "
                "out, or choose backends that capture any batch: `attnplug backends` lists these with graphs always",
                settings=[PREFILL_SIZES.name, "attention_backend"],
            )
        return (), f"{names} cannot capture it"

    def _equalize_pages(self, parallel: TensorParallel) -> None:
        """Allocate surplus pages. Ranks run one schedule, so each uses as many pages as the rank with the least
        memory."""
        allocator = self.runner.allocator
        free = torch.tensor([allocator.free_pages], device=self.runner.device)
        allocator.allocate(allocator.free_pages - min(parallel.all_gather(free, 0).tolist()))

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
            self.scheduler.add(request)
            self._next_id += 1
            if transcript is not None or params.logprobs is not None:
                self._observed.add(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now; it keeps the tokens that it has."""
        with self._lock, signals.deferred():
            self._leaving.append(request)
            if not self._stepping:  # true if an iterator is garbage collected within a step
                self._abort_leaving()
                self._drop_unwanted()

    def step(self) -> StepResult | RoundResult | None:
        """Run one step; return None if there is no work.

        With overlap, the next step is launched before this one is awaited. A request whose logits are not finite ends
        with an error; the others are not affected. If a step fails, all steps in flight are rolled back and its error
        is raised; their requests may continue. An interrupt is raised after the step.
        """
        with self._lock, signals.deferred():
            self._stepping = True
            try:
                return self._step()
            except BaseException:
                self._drop()
                raise
            finally:
                self._abort_leaving()
                self._stepping = False
                self._drop_unwanted()

    def _step(self) -> StepResult | RoundResult | None:
        started = time.perf_counter()
        launched = self._in_flight
        while len(launched) < self._depth and (step := self.scheduler.next_step()) is not None:
            launched.append((step, self.runner.launch(step) if self.rounds is None else self.rounds.launch(step)))
        if not launched:
            return None
        step, running = launched[0]
        if isinstance(running, RoundsInFlight):
            return self._finish_round(step, running, started)
        tokens = running.tokens()
        logprobs = running.logprobs() if self._observed else {}
        launched.popleft()
        self._abort_leaving()
        result = self.scheduler.finish_step(step, tokens)
        self.statistics.add(step, len(result.tokens), time.perf_counter() - started, replayed=running.replayed)
        if self._observed:
            result = self._observe(result, step.sampled_requests, logprobs)
        self._notify(step, result)
        return result

    def _finish_round(self, step: Step, running: RoundsInFlight, started: float) -> RoundResult:
        """Finish a step of speculative rounds, which may give a request several tokens."""
        scheduler, counts = self.scheduler, self.statistics
        assert isinstance(scheduler, RoundScheduler) and counts.rounds is not None
        tokens = running.tokens()
        logprobs = running.logprobs() if self._observed else {}
        self._in_flight.popleft()
        self._abort_leaving()
        result = scheduler.finish_round(step, tokens, _completes_stop if self._observed else None)
        seconds, prefill = time.perf_counter() - started, running.replayed_prefill
        counts.add_rounds(step, result.tokens, seconds, replayed=running.replayed, replayed_prefill=prefill)
        if running.timing is not None:
            counts.rounds.add([len(new) for new in tokens[: step.rounds]], running.timing)
        for entry in step.entries:
            request = entry.request
            new = result.tokens.get(request.id, [])
            request.logprobs += logprobs.get(request.id, [])[: len(new)]
            for token in new:
                for follower in tuple(request.followers):
                    follower.notify(request, token)
        for request in result.finished:
            self._end(request)
        return result

    def _abort_leaving(self) -> None:
        """Abort requests between calls of the scheduler, never within one."""
        while self._leaving:
            request = self._leaving.pop()
            if self.scheduler.holds(request):
                self.scheduler.abort(request.id)
                self._end(request)

    def _drop_unwanted(self) -> None:
        """Drop the steps in flight if all their requests have ended."""
        if self._in_flight and not self.scheduler.has_work:
            self._drop()

    def _drop(self) -> None:
        self._in_flight.clear()
        self.scheduler.drop_steps()

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

    def _observe(
        self, result: StepResult, requests: Sequence[Request], logprobs: Mapping[int, TokenLogprobs]
    ) -> StepResult:
        """Record log probabilities, and end the requests whose new token completes a stop text."""
        finished = list(result.finished)
        for request in requests:
            token = result.tokens.get(request.id)
            if token is None:  # aborted in flight
                continue
            if request.id in logprobs:
                request.logprobs.append(logprobs[request.id])
            if request.transcript is None:
                continue
            request.transcript.push(token)
            if request.transcript.stopped:
                if self.scheduler.abort(request.id, FinishReason.STOP) is not None:
                    finished.append(request)
                request.finish_reason = FinishReason.STOP  # even if it has max_tokens tokens
        return StepResult(result.tokens, tuple(finished))

    def _notify(self, step: Step, result: StepResult) -> None:
        tokens = result.tokens
        for entry in step.entries:
            request = entry.request
            if request.followers and (token := tokens.get(request.id)) is not None:
                for follower in tuple(request.followers):  # copied: a garbage-collected iterator leaves the list
                    follower.notify(request, token)
        for request in result.finished:
            self._end(request)

    def _end(self, request: Request) -> None:
        """Notify followers of a finished request."""
        self._observed.discard(request)
        if request.transcript is not None:
            request.transcript.finish()
        for follower in tuple(request.followers):
            follower.notify(request, None)


def _completes_stop(request: Request, token: int) -> bool:
    """Push a new token; return True if it completes one of the request's stop texts."""
    transcript = request.transcript
    if transcript is None:
        return False
    transcript.push(token)
    return transcript.stopped
