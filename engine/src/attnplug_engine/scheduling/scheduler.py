"""Scheduler for continuous batching: decides which tokens of which requests run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Never

from attnplug import ForwardMode, PoolError, UsageError
from attnplug.host import AttnplugError
from attnplug.kernels import PageCopy
from attnplug.sparse import Coordinator
from attnplug_engine.request import FinishReason, Request, RequestState
from attnplug_engine.scheduling.kv_cache_manager import KVCacheManager
from attnplug_engine.scheduling.mixed_steps import MixedSteps, PrefillBudget
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_engine.scheduling.state_slots import StateSlots
from attnplug_engine.scheduling.step import BAD_LOGITS, PENDING, Step, StepEntry, StepResult
from attnplug_engine.text.errors import PromptError

MAX_IN_FLIGHT = 2
_UNKNOWN = (PENDING,)


class StepError(AttnplugError):
    """A step was requested or finished out of order, or with tokens that do not belong to it. Nothing changed."""


def unchunked_step_tokens(context_length: int, max_batch: int) -> int:
    """Return the tokens of the largest step if prompts are not chunked: the longest prompt, and all other requests
    decoding."""
    return context_length + max_batch - 1


class Scheduler:
    """Serves requests first come, first served, as many at a time as rows and pages allow.

    A step runs every decoding request and fills up to ``max_step_tokens`` with prefill. While requests decode, which
    wait for the step, prefill is limited by ``mixed_steps``. At least one token of a prefill runs, so a step has at
    most ``max(max_step_tokens, max_batch)`` tokens. With ``whole_prompts`` a prefill is not
    chunked (A6); ``max_step_tokens`` must then hold the longest prompt beside all decoding requests. A request is
    admitted if there are pages, free or evictable, for all its tokens so far and one more for each running request. If
    a decoding request cannot get its next page, the latest admitted request is preempted: it loses its row, waits at
    the front of the queue, and computes its prompt and output again.

    Steps in flight. A step is in flight from ``next_step`` until it is finished or dropped. Once it is launched, the
    next one may be scheduled: a decoding request then runs a ``PENDING`` token. Steps finish in order. A request that
    reaches its length in a step in flight is not scheduled again. One that ends by a stop token may have an entry in
    the next step, whose token is ignored; its row, pages and slot can be reused at once, because the device runs steps
    in launch order. Nothing of a step in flight is cached, and nothing is preempted while a step is in flight:
    ``next_step`` then returns None and has to be called again after ``finish_step``.

    Termination. Running requests followed by waiting ones are always in order of arrival: admission moves the first
    waiting request behind the last running one, and preemption moves it back. So at most one running request is
    prefilling, the last: none is admitted behind an incomplete prefill. The oldest request with tokens left to schedule
    is in every step: either it decodes, or it prefills and no other request decodes. Older requests have all their
    tokens in flight and end when these are finished. With nothing in flight it is the oldest of all and always gets its
    pages: all others are preempted before it, and alone it has the whole pool (unreferenced pages are evictable), which
    ``add`` found large enough for its last token. So there is always a step to schedule or to finish. Each computes at
    least one token of that request, which is never preempted, and it ends within ``max_length`` steps; then the next
    request is the oldest.

    Linear states. For a model with linear layers, ``states`` has a slot for every running request, and the prefix cache
    keeps snapshots in the remaining ones (see ``StateSlots``). Prefills stop at checkpoints even with
    ``whole_prompts``: with a prefix cache, prompts run in parts anyway. A state cannot be rolled back, so dropping
    steps preempts all running requests.

    Pages that are allocated elsewhere before the scheduler is built are not counted on; allocate none later.
    """

    _speculates = False
    """True if decoding requests run in speculative rounds, which verify several tokens at once."""
    _prefill_tail_rows = 0
    """Rows behind the last token of a prefill that its step also writes."""
    _pages_per_step = 1
    """Pages that a running request may need for its next step."""

    def __init__(
        self,
        table: SlotTable,
        allocator: PageAllocator,
        cache: PrefixCache | None,
        *,
        max_batch: int,
        max_step_tokens: int,
        context_length: int,
        whole_prompts: bool = False,
        mixed_steps: MixedSteps | None = None,
        states: StateAllocator | None = None,
        checkpoint: int = 1024,
        lookahead: int = 0,
        coordinator: Coordinator | None = None,
    ) -> None:
        """``lookahead`` are cache rows that a request may need beyond the one before its last token (lookahead)."""
        limits = {"max_batch": max_batch, "max_step_tokens": max_step_tokens, "context_length": context_length}
        for name, value in limits.items():
            if value < 1:
                raise UsageError(f"{name}={value} is not allowed; give 1 or more")
        if max_batch > table.max_requests:
            raise UsageError(f"max_batch={max_batch} is more than the {table.max_requests} rows of the slot table")
        if whole_prompts and max_step_tokens < (most := unchunked_step_tokens(context_length, max_batch)):
            raise UsageError(f"max_step_tokens={max_step_tokens} is too few for whole prompts; give {most} or more")
        if checkpoint < 1:
            raise UsageError(f"checkpoint={checkpoint} is not a number of tokens; give 1 or more")
        self._kv_cache, self._cache = KVCacheManager(table, allocator, cache, coordinator), cache
        self._states: StateSlots | None = None
        if states is not None:
            self._states = StateSlots(
                states, cache, page_size=table.page_size, max_batch=max_batch, checkpoint=checkpoint
            )
        self._page_size = table.page_size
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._whole_prompts = whole_prompts
        self.mixed_steps = None if whole_prompts else mixed_steps
        self._context_length = min(context_length, table.max_pages * table.page_size - lookahead)
        self._lookahead = lookahead
        self._pool_pages = self._kv_cache.available_pages
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[Step] = deque()  # oldest first
        # The first waiting request did not fit, and no row was released since: no need to try again at every step.
        self._blocked = False
        self._retiring = False  # a running request is finished and still has its row
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """True if there is an unfinished request."""
        return bool(self._requests)

    @property
    def in_flight(self) -> int:
        """Number of steps that are neither finished nor dropped."""
        return len(self._in_flight)

    @property
    def running(self) -> tuple[Request, ...]:
        """Running requests in order of admission. An aborted one is included as long as it has its row."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Waiting requests, the next to be admitted first."""
        return tuple(self._waiting)

    @property
    def preemptions(self) -> int:
        """Number of times that a request lost its row and had to compute its tokens again."""
        return self._preemptions

    def holds(self, request: Request) -> bool:
        """Return True if a request was added here and is not finished."""
        return self._requests.get(request.id) is request

    def add(self, request: Request) -> None:
        """Queue a new request. Raises UsageError or PoolError if it can never be served."""
        if request.id in self._requests or request.state is not RequestState.WAITING:
            raise UsageError(f"request {request.id} was added before; give every request an id of its own")
        prompt = len(request.prompt)
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token")
        if prompt >= self._context_length:
            raise PromptError(
                f"the prompt has {prompt} tokens, and the context holds {self._context_length}, new tokens included; "
                f"shorten the prompt to {self._context_length - 1} tokens or fewer"
            )
        length = min(request.max_length, self._context_length)
        # The last token ends the request and is never computed.
        needed = -(-(length - 1 + self._lookahead) // self._page_size)
        if needed > self._pool_pages:
            proposed = f" with room for {self._lookahead} proposed" if self._lookahead else ""
            raise PoolError(
                f"{prompt} prompt tokens and up to {length - prompt} new ones{proposed} need {needed} pages, and there "
                f"are {self._pool_pages} (of {self._page_size} tokens each); lower `max_tokens`, or give more "
                "`num_pages`",
                settings=["max_tokens", "num_pages"],
            )
        request.max_length = length
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORTED) -> Request | None:
        """End a request now; return it, or None if there is no such request (any more).

        If steps are in flight, it keeps its row until the next step is scheduled or one is finished, and its tokens of
        these steps are ignored. No ``StepResult`` reports it. Pages of a request that ends by an error are not cached.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._blocked = False
        self._finish(request, reason, self._computed(request))
        if not self._in_flight:
            self._retire()
        return request

    def next_step(self) -> Step | None:
        """Return the next step to run. It is in flight from now on; launch it before any other call.

        None while steps are in flight: finish one and call again. None with none in flight: there is no work.
        """
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise StepError(f"{MAX_IN_FLIGHT} steps are in flight; call finish_step or drop_steps first")
        self._retire()
        entries: list[StepEntry] = []
        copies: list[PageCopy] = []
        preemptions = self._preemptions
        if not self._decode(entries, copies):
            return None
        decoding = len(entries)
        if preemptions == self._preemptions and (self._waiting or decoding < len(self._running)):
            self._prefill(entries, copies)
        if not entries:
            return self._raise_starved() if self._requests and not self._in_flight else None
        rounds = decoding if self._speculates else 0
        if not self._speculates:
            # A preempted request that found all but its newest token in the cache decodes from the start.
            for request, _, token_ids, sampled in entries[decoding:]:
                decoding += bool(request.output) and sampled and len(token_ids) == 1
            if 0 < decoding < len(entries):  # attention may run requests with one new token apart from the others
                entries.sort(key=lambda entry: len(entry.token_ids) > 1)
        mode = ForwardMode.MIXED if decoding else ForwardMode.EXTEND
        if decoding == len(entries):
            mode = ForwardMode.DECODE
        rows: tuple[int, ...] = tuple([entry[0].row for entry in entries])  # type: ignore[misc] # every running request has a row
        slots: tuple[int, ...] = ()
        snapshots: tuple[tuple[int, int], ...] = ()
        if self._states is not None:
            slots = tuple([entry[0].slot for entry in entries])  # type: ignore[misc] # every running request has a slot
            snapshots = self._states.reserve(entries[rounds:])
        step = Step(mode, tuple(entries), tuple(copies), rows, slots, snapshots, rounds)
        self._in_flight.append(step)
        return step

    def finish_step(self, step: Step, tokens: Sequence[int]) -> StepResult:
        """Process the output of the oldest step in flight: a token for each of its ``sampled_requests``.

        A request whose token is ``BAD_LOGITS`` ends by an error; the others are not affected.
        """
        self._check_finished(step, tokens)
        self._in_flight.popleft()
        if step.snapshots:
            self._keep_snapshots(step, tokens)
        new: dict[int, int] = {}
        finished: list[Request] = []
        running = RequestState.RUNNING  # hoisted: the lookup costs as much as the rest of the line
        sampled = iter(tokens)
        for request, position, token_ids, is_sampled in step.entries:
            if not is_sampled:
                continue
            token = next(sampled)
            if request.state is not running:  # it ended in flight
                continue
            end = position + len(token_ids)
            if token == BAD_LOGITS:
                self._finish(request, FinishReason.ERROR, end)
                finished.append(request)
                continue
            output = request.output
            if not output or len(token_ids) > 1:
                self._kv_cache.cache(request, end, in_use=True)
            output.append(token)
            new[request.id] = token
            if token in request.params.stop_token_ids:
                self._finish(request, FinishReason.STOP, end)
            elif end + 1 >= request.max_length:
                self._finish(request, FinishReason.LENGTH, end)
            else:
                continue
            finished.append(request)
        self._retire()
        return StepResult(new, tuple(finished))

    def drop_steps(self) -> None:
        """Roll back all steps in flight, after one of them could not run. Requests get the same tokens as without them.

        Requests that were prefilling wait again. So do all running requests if they have linear states, or if a page
        was to be copied, because the copy may not have happened.
        """
        if not self._in_flight:
            return
        lost = self._states is not None
        while self._in_flight:
            step = self._in_flight.pop()
            lost = lost or bool(step.copies)
            self._roll_back(step)
            for _, slot in step.snapshots:
                self._free_snapshot(slot)
        self._retire()
        # Only the last running request may be prefilling, and the steps may have had several.
        kept = 0
        if not lost:
            kept = next(
                (n for n, request in enumerate(self._running) if not self._decodes(request)), len(self._running)
            )
        while len(self._running) > kept:
            self._preempt_last()
        for request in self._running:  # a coordinator may hold rows that are computed again
            self._kv_cache.forget(request)

    def _roll_back(self, step: Step) -> None:
        """Restore the requests of an unfinished step to their state before it."""
        for request, position, _, _ in step.entries:
            if request.state is RequestState.RUNNING:
                self._kv_cache.truncate(request, position)

    def _computed(self, request: Request) -> int:
        """Return the number of a request's tokens that finished steps have computed."""
        in_flight = (entry.position for step in self._in_flight for entry in step.entries if entry.request is request)
        return next(in_flight, request.computed)

    def _decodes(self, request: Request) -> bool:
        """Return True if a running request has completed its prefill."""
        return request.decoding

    def _decode(self, entries: list[StepEntry], copies: list[PageCopy]) -> bool:
        """Schedule a token of every decoding request. If there are not enough pages, the latest admitted requests are
        preempted.

        Returns False, without changes, if there are not enough pages and steps in flight forbid preemption.
        """
        while True:
            # All but the last are decoding. A request without tokens left to compute ends with a step in flight.
            decoding = [request for request in self._running if request.computed + 1 < request.max_length]
            if decoding and not decoding[-1].decoding:
                decoding.pop()
            if self._kv_cache.extend_each(decoding, copies):
                break
            if self._in_flight:
                return False
            if len(self._running) == 1:
                return True
            self._preempt_last()
        if self._in_flight:  # request.pending, without the calls
            known = [request.computed < len(request.prompt) + len(request.output) for request in decoding]
            entries += [
                StepEntry(request, request.computed, (request.output[-1],) if is_known else _UNKNOWN, True)
                for request, is_known in zip(decoding, known, strict=True)
            ]
        else:
            entries += [StepEntry(request, request.computed, (request.output[-1],), True) for request in decoding]
        for request in decoding:
            request.computed += 1
        return True

    def _prefill(self, entries: list[StepEntry], copies: list[PageCopy]) -> None:
        """Continue the running prefill, then admit requests; stop at a prefill that is not complete."""
        running = self._running
        budget = PrefillBudget(max(self._max_step_tokens - len(entries), 1), self.mixed_steps if entries else None)
        if running and not self._decodes(running[-1]) and not self._chunk(running[-1], budget, entries, copies):
            return
        while budget.chunk(0) and self._waiting and len(running) < self._max_batch and not self._blocked:
            request = self._waiting[0]
            if self._whole_prompts and request.length > budget.tokens:
                return
            if not self._admit(request):
                self._blocked = bool(running)
                return
            if not self._chunk(request, budget, entries, copies):
                return

    def _chunk(self, request: Request, budget: PrefillBudget, entries: list[StepEntry], copies: list[PageCopy]) -> bool:
        """Schedule as much of a prefill as budget and pages allow; return True if it is complete."""
        left = request.length - request.computed
        tokens = min(left, max(budget.chunk(request.computed), 1))
        if self._states is not None:
            tokens = min(tokens, self._states.next_checkpoint(request, request.computed) - request.computed)
        tail = self._prefill_tail_rows if tokens == left else 0
        if not self._kv_cache.extend(request, tokens + tail, copies):
            # All evictable pages are free now. A prefill that gets no page keeps those it has and waits for the next
            # step; a decoding request that needs them preempts it.
            if self._whole_prompts:
                return False
            room = self._kv_cache.free_pages * self._page_size + -request.computed % self._page_size
            tokens = min(room, tokens - bool(tail))
            if not tokens or not self._kv_cache.extend(request, tokens, copies):
                return False
        start, end = request.computed, request.computed + tokens
        entries.append(StepEntry(request, start, request.tokens(start, end), tokens == left))
        request.computed = end
        budget.spend(tokens, start)
        return tokens == left

    def _admit(self, request: Request) -> bool:
        """Give the first waiting request a row that begins with its cached prefix; return False if there are not enough
        pages."""
        cache = self._cache
        tokens = request.tokens(0, request.length)
        pages: list[int] = []
        cached, snapshot = 0, None
        if cache is not None and self._states is None:
            pages, cached = self._match(cache, tokens)
        elif cache is not None:
            pages, cached, snapshot = cache.match_snapshot(tokens)
        needed = -(-(request.length + self._prefill_tail_rows) // self._page_size) - len(pages)
        if not self._kv_cache.has_room(needed + self._pages_per_step * len(self._running), keeping=pages):
            return False
        if self._states is not None:
            request.slot = self._states.take(snapshot)
            if request.slot is None:
                return False
        self._kv_cache.admit(request, pages, cached)
        request.state = RequestState.RUNNING
        self._running.append(self._waiting.popleft())
        if not request.preemptions:
            request.cached_tokens = cached
            if cache is not None:
                cache.count_lookup(len(request.prompt), cached)
        return True

    def _match(self, cache: PrefixCache, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the cached prefix with which a request may begin."""
        return cache.match(tokens)

    def _preempt_last(self) -> Request:
        request = self._running.pop()
        self._release(request)
        request.state = RequestState.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)
        self._preemptions += 1
        return request

    def _finish(self, request: Request, reason: FinishReason, computed: int) -> None:
        """End a request. ``computed`` is the number of its tokens that finished steps have computed."""
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.computed = computed
        self._retiring = request.row is not None or self._retiring
        del self._requests[request.id]

    def _retire(self) -> None:
        """Release the rows of running requests that are finished."""
        if not self._retiring:
            return
        self._retiring = False
        for request in self._running:
            if request.state is RequestState.FINISHED:
                self._release(request)
        self._running = [request for request in self._running if request.state is RequestState.RUNNING]

    def _release(self, request: Request) -> None:
        """Release a request's row; its whole computed pages go to the cache."""
        if request.finish_reason is not FinishReason.ERROR:
            self._kv_cache.cache(request, request.computed, in_use=False)
        self._kv_cache.release(request)
        if self._states is not None and request.slot is not None:
            self._states.release(request.slot)
            request.slot = None
        self._blocked = False

    def _keep_snapshots(self, step: Step, tokens: Sequence[int]) -> None:
        """Give a finished step's snapshots to the cache, except those of requests that ended meanwhile or end with
        it."""
        assert self._states is not None
        bad = [request for request, token in zip(step.sampled_requests, tokens, strict=True) if token == BAD_LOGITS]
        for source, slot in step.snapshots:
            entry = step.entries[step.state_slots.index(source)]
            request, end = entry.request, entry.position + len(entry.token_ids)
            if request.state is RequestState.RUNNING and request not in bad:
                self._kv_cache.cache(request, end, in_use=True)
                self._states.keep(request.tokens(0, end), slot)
                self._blocked = False
            else:
                self._free_snapshot(slot)

    def _free_snapshot(self, slot: int) -> None:
        assert self._states is not None
        self._states.release(slot)
        self._blocked = False

    def _check_finished(self, step: Step, tokens: Sequence[int]) -> None:
        if not self._in_flight or step is not self._in_flight[0]:
            raise StepError("this step is not the oldest in flight; finish steps in order, each once")
        sampled = len(step.entries) if step.mode.is_decode else len(step.sampled_requests)
        if len(tokens) != sampled:
            raise StepError(f"the step samples a token for {sampled} requests, and {len(tokens)} were given")

    def _raise_starved(self) -> Never:
        """Raise: no request can run. The pages that ``add`` counted on suffice, so something else must hold them."""
        request = self._running[0] if self._running else self._waiting[0]
        raise PoolError(
            f"request {request.id} holds {self._kv_cache.count_pages(request)} pages and needs "
            f"{-(-request.length // self._page_size)}; {self._kv_cache.free_pages} of {self._kv_cache.num_pages} are "
            "free and no other request runs, so the remaining pages are allocated outside the scheduler; allocate such "
            "pages before it is built, or release them"
        )
