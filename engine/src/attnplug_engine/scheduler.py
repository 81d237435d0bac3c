"""Continuous batching: which tokens of which requests run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Never

from attnplug import ForwardMode, PoolError
from attnplug.host import AttnplugError, LinearStatePool, OutOfPages, PageAllocator, PageCopy, SlotTable, UsageError
from attnplug_engine.prefix_cache import PrefixCache
from attnplug_engine.request import FinishReason, Request, RequestState, Step, StepEntry, StepResult


class StepError(AttnplugError):
    """A step was asked for or finished out of order, or with tokens that do not belong to it. Nothing changed."""


def whole_step_tokens(context_length: int, max_batch: int) -> int:
    """The tokens of the largest step where prompts run in one piece: the longest, and all others decoding."""
    return context_length + max_batch - 1


class Scheduler:
    """Serves requests first come, first served, as many at a time as rows and pages allow.

    A step runs every decoding request, and fills up to ``max_step_tokens`` with prefill; at least one token of a
    prefill runs, so a step has at most ``max(max_step_tokens, max_batch)`` tokens. With ``whole_prompts`` a prefill
    runs in one piece, or not in this step (A6); ``max_step_tokens`` then has room for the longest beside all that may
    be decoding. A request is admitted when there are pages, free or evictable, for all its tokens so far and one more
    for each running request. When a decoding request cannot get its next page, the latest admitted request is
    preempted: it loses its row, waits at the front of the queue, and computes its prompt and output again.

    Why this always comes to an end. Running and then waiting requests are at all times in the order of their
    arrival: admission moves the first that waits after the last that runs, preemption moves it back. So at most
    one running request is prefilling, the last: none is admitted after a prefill that is not complete. The
    oldest request runs in every step: it decodes first; or it prefills, and then it is alone. It always gets its pages:
    everyone after it is preempted before it is, and alone it has the whole pool (what nobody holds is evictable),
    which ``add`` found large enough for its last token. So each step computes at least one token of the oldest
    request, which is never preempted, and it ends within ``max_length`` steps; then the next is the oldest.

    Linear states. For a model with linear layers ``states`` holds a slot for every running request, and the prefix
    cache keeps snapshots in the rest. A hit goes as far as a snapshot; so prefills stop at checkpoints, at whole pages:
    every ``checkpoint`` tokens, and at the last whole page of prompts with more than that. That cuts them even with
    ``whole_prompts``: where prefixes are cached a prompt is a part of itself anyway. A state cannot be taken back:
    where a step is dropped, all that runs is preempted and computed again.

    Pages that others hold when the scheduler is made are not counted on; hold none later. Between ``next_step`` and
    ``finish_step`` (or ``drop_step``) the step is in flight, and the rows of its requests stay as they are.
    """

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
        states: LinearStatePool | None = None,
        checkpoint: int = 1024,
    ) -> None:
        limits = {"max_batch": max_batch, "max_step_tokens": max_step_tokens, "context_length": context_length}
        for name, value in limits.items():
            if value < 1:
                raise UsageError(f"{name}={value} is not allowed; give 1 or more")
        if max_batch > table.max_requests:
            raise UsageError(f"max_batch={max_batch} is more than the {table.max_requests} rows of the slot table")
        if whole_prompts and max_step_tokens < (most := whole_step_tokens(context_length, max_batch)):
            raise UsageError(f"max_step_tokens={max_step_tokens} is too few for whole prompts; give {most} or more")
        if cache is not None and cache.page_size != table.page_size:
            raise UsageError(
                f"the prefix cache has pages of {cache.page_size} tokens and the slot table of {table.page_size}; "
                "build both with the same page size"
            )
        needed = max_batch + (cache is not None)  # a snapshot is kept while it is copied
        if states is not None and states.num_slots < needed:
            raise UsageError(
                f"{states.num_slots} slots for linear-attention states are too few for {max_batch} requests at a time: "
                f"give `state_slots` of {needed} or more, or lower `max_batch`",
                settings=["state_slots", "max_batch"],
            )
        if checkpoint < 1:
            raise UsageError(f"checkpoint={checkpoint} is not a number of tokens; give 1 or more")
        self._table, self._allocator, self._cache = table, allocator, cache
        self._states = states
        self._checkpoint = -(-checkpoint // table.page_size) * table.page_size
        self._page_size = table.page_size
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._whole_prompts = whole_prompts
        self._context_length = min(context_length, table.max_pages * table.page_size)
        self._pool_pages = allocator.free_pages + (len(cache) if cache is not None else 0)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[int, Request] = {}
        self._step: Step | None = None
        # The first that waits did not fit, and no row was released since: no need to look again at every step.
        self._blocked = False
        self._retiring = False  # a running request has finished and still has its row
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """In the order of their admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The next to be admitted first."""
        return tuple(self._waiting)

    @property
    def preemptions(self) -> int:
        """How many times a request has lost its row and had to compute its tokens again."""
        return self._preemptions

    def holds(self, request: Request) -> bool:
        """Whether a request was added here and is not finished."""
        return self._requests.get(request.id) is request

    def add(self, request: Request) -> None:
        """Queue a new request, or say why it can never be served."""
        if request.id in self._requests or request.state is not RequestState.WAITING:
            raise UsageError(f"request {request.id} was added before; give every request an id of its own")
        prompt = len(request.prompt)
        if not prompt:
            raise UsageError(f"request {request.id} has an empty prompt; give at least one token")
        if prompt >= self._context_length:
            raise UsageError(
                f"request {request.id} has a prompt of {prompt} tokens, and the context holds {self._context_length}, "
                f"new tokens included; shorten the prompt to {self._context_length - 1} tokens or fewer"
            )
        length = min(request.max_length, self._context_length)
        # The last token ends the request and is never computed.
        needed = -(-(length - 1) // self._page_size)
        if needed > self._pool_pages:
            raise PoolError(
                f"request {request.id} needs {needed} pages for {prompt} prompt tokens and up to {length - prompt} "
                f"new ones, and there are {self._pool_pages} (of {self._page_size} tokens each); lower its "
                f"max_tokens, or build the pool with more pages"
            )
        request.max_length = length
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORTED) -> Request | None:
        """End a request now; returns it, or ``None`` when there is none of this id (any more).

        While a step is in flight it keeps its row until the step is finished or dropped, and its token of that step
        is ignored. No ``StepResult`` reports it. Pages of a request that ends by an error are not cached.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._blocked = False
        self._finish(request, reason)
        if self._step is None:
            self._retire()
        return request

    def next_step(self) -> Step | None:
        """The next step to run, or ``None`` when there is no work. It is in flight until it is finished or dropped."""
        if self._step is not None:
            raise StepError("the step before has not been finished; call finish_step or drop_step first")
        entries: list[StepEntry] = []
        copies: list[PageCopy] = []
        preemptions = self._preemptions
        self._decode(entries, copies)
        decoding = len(entries)
        if preemptions == self._preemptions and (self._waiting or decoding < len(self._running)):
            self._prefill(entries, copies)
        if not entries:
            return self._refuse_to_starve() if self.has_work else None
        # A preempted request that found all but its newest token in the cache is decoding from the start.
        decoding += sum(entry.request.decoding for entry in entries[decoding:])
        mode = ForwardMode.MIXED if decoding else ForwardMode.EXTEND
        if decoding == len(entries):
            mode = ForwardMode.DECODE
        rows = tuple([entry.request.row for entry in entries])
        slots = () if self._states is None else tuple([entry.request.slot for entry in entries])
        self._step = Step(mode, tuple(entries), tuple(copies), rows, slots)  # type: ignore[arg-type] # who runs has both
        return self._step

    def finish_step(self, step: Step, sampled: Mapping[int, int]) -> StepResult:
        """Take in what the step computed, and the token that was sampled for each of its sampled requests."""
        self._check_in_flight(step)
        self._check_sampled(step, sampled)
        self._step = None
        tokens: dict[int, int] = {}
        finished: list[Request] = []
        running = RequestState.RUNNING  # looking up an enum's member costs as much as the rest of the line
        for request, position, token_ids, is_sampled in step.entries:
            if request.state is not running:  # aborted in flight
                continue
            request.computed = position + len(token_ids)
            if self._states is not None and request.computed == self._next_checkpoint(request, position):
                self._take_snapshot(self._states, request)
            if not is_sampled:
                continue
            output = request.output
            if self._cache is not None and (not output or len(token_ids) > 1):
                self._cache_pages(self._cache, request, in_use=True)
            token = sampled[request.id]
            output.append(token)
            tokens[request.id] = token
            if token in request.params.stop_token_ids:
                self._finish(request, FinishReason.STOP)
            elif len(request.prompt) + len(output) >= request.max_length:
                self._finish(request, FinishReason.LENGTH)
            else:
                continue
            finished.append(request)
        self._retire()
        return StepResult(tokens, tuple(finished))

    def drop_step(self, step: Step) -> None:
        """Take back a step that could not be run; its requests get the tokens they get without it.

        Those that were prefilling wait again, as all do that have a linear state. Only ``copies`` stay due: the rows
        have the new pages now.
        """
        self._check_in_flight(step)
        self._step = None
        for entry in step.entries:
            self._table.truncate(entry.request.row, entry.position)  # type: ignore[arg-type] # in flight: has a row
        self._retire()
        # Only the last that runs may be prefilling, and the step may have had several.
        # And a linear state cannot be taken back at all.
        kept = 0
        if self._states is None:
            kept = next((n for n, request in enumerate(self._running) if not request.decoding), len(self._running))
        while len(self._running) > kept:
            self._preempt_last()

    def _decode(self, entries: list[StepEntry], copies: list[PageCopy]) -> None:
        """Give every decoding request its token; when pages are too few, the latest admitted lose their rows."""
        while True:
            decoding = [  # request.decoding, without the calls
                request
                for request in self._running
                if request.output and request.computed == len(request.prompt) + len(request.output) - 1
            ]
            try:
                copies += self._table.extend_each([request.row for request in decoding])  # type: ignore[misc] # has one
                break
            except OutOfPages as error:
                if not self._evict(error):
                    if len(self._running) == 1:
                        return
                    self._preempt_last()
        entries += [StepEntry(request, request.computed, (request.output[-1],), True) for request in decoding]

    def _prefill(self, entries: list[StepEntry], copies: list[PageCopy]) -> None:
        """Go on with the prefill that is under way, then admit; stop after a prefill that is not complete."""
        running = self._running
        budget = max(self._max_step_tokens - len(entries), 1)
        if running and not running[-1].decoding:
            budget = self._chunk(running[-1], budget, entries, copies)
        while budget and self._waiting and len(running) < self._max_batch and not self._blocked:
            request = self._waiting[0]
            if self._whole_prompts and request.length > budget:
                return
            if not self._admit(request):
                self._blocked = bool(running)
                return
            budget = self._chunk(request, budget, entries, copies)

    def _chunk(self, request: Request, budget: int, entries: list[StepEntry], copies: list[PageCopy]) -> int:
        """Run as much of a prefill as budget and pages allow; what is left of the budget, 0 if it is not complete."""
        left = request.length - request.computed
        tokens = min(left, budget)
        if self._states is not None:
            tokens = min(tokens, self._next_checkpoint(request, request.computed) - request.computed)
        if not self._extend(request, tokens, copies):
            # What could be evicted is free now. A prefill that gets no page keeps those it has and waits for the
            # next step; a decoding request that needs them preempts it.
            if self._whole_prompts:
                return 0
            tokens = self._allocator.free_pages * self._page_size + -request.computed % self._page_size
            if not tokens or not self._extend(request, tokens, copies):
                return 0
        end = request.computed + tokens
        entries.append(StepEntry(request, request.computed, request.tokens(request.computed, end), tokens == left))
        return budget - tokens if tokens == left else 0

    def _admit(self, request: Request) -> bool:
        """Give the first waiting request a row, after the cached part of its tokens; not if pages are too few."""
        cache = self._cache
        tokens = request.tokens(0, request.length)
        pages: list[int] = []
        cached, snapshot = 0, None
        if cache is not None and self._states is None:
            pages, cached = cache.match(tokens)
        elif cache is not None:
            pages, cached, snapshot = cache.match_snapshot(tokens)
        needed = -(-request.length // self._page_size) - len(pages)
        lacking = needed + len(self._running) - self._allocator.free_pages
        if lacking > 0 and (cache is None or not cache.can_evict(lacking, frozenset(pages))):
            return False
        if self._states is not None:
            request.slot = self._new_slot(self._states, keeping=snapshot)
            if snapshot is not None:
                self._states.copy(snapshot, request.slot)
        request.row = self._table.admit(pages, cached)
        request.computed = cached
        request.state = RequestState.RUNNING
        self._running.append(self._waiting.popleft())
        if not request.preemptions:
            request.cached_tokens = cached
            if cache is not None:
                cache.count_lookup(len(request.prompt), cached)
        return True

    def _extend(self, request: Request, tokens: int, copies: list[PageCopy]) -> bool:
        """Make room for more tokens of a running request, out of the cache if need be; ``False`` changes no row."""
        row = request.row
        assert row is not None
        try:
            copies += self._table.extend(row, tokens)
        except OutOfPages as error:
            if not self._evict(error):
                return False
            copies += self._table.extend(row, tokens)
        return True

    def _evict(self, error: OutOfPages) -> bool:
        """Whether the cache could give what was lacking; it gives what it can."""
        lacking = error.asked - error.free
        return self._cache is not None and self._cache.evict(lacking) >= lacking

    def _preempt_last(self) -> Request:
        request = self._running.pop()
        self._release(request)
        request.state = RequestState.WAITING
        request.preemptions += 1
        self._waiting.appendleft(request)
        self._preemptions += 1
        return request

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._retiring = request.row is not None or self._retiring
        del self._requests[request.id]

    def _retire(self) -> None:
        """Take the rows from the running requests that are finished."""
        if not self._retiring:
            return
        self._retiring = False
        for request in self._running:
            if request.state is RequestState.FINISHED:
                self._release(request)
        self._running = [request for request in self._running if request.state is RequestState.RUNNING]

    def _release(self, request: Request) -> None:
        """Take a request's row; what it has computed of whole pages goes to the cache."""
        assert request.row is not None
        if self._cache is not None and request.finish_reason is not FinishReason.ERROR:
            self._cache_pages(self._cache, request, in_use=False)
        self._table.release(request.row)
        request.row = None
        if self._states is not None and request.slot is not None:
            self._states.release(request.slot)
            request.slot = None
        request.computed = 0
        self._blocked = False

    def _new_slot(self, states: LinearStatePool, keeping: int | None = None) -> int:
        """A slot of its own, with a zero state. There is always one: there are more slots than requests can run."""
        if not states.free_slots and self._cache is not None:
            self._cache.evict_snapshot(keeping)
        return states.allocate()

    def _next_checkpoint(self, request: Request, computed: int) -> int:
        """Where, after ``computed`` tokens, a state is next worth keeping; beyond the request if nowhere."""
        if self._cache is None:
            return self._context_length + 1
        multiple = (computed // self._checkpoint + 1) * self._checkpoint
        last = (len(request.prompt) - 1) // self._page_size * self._page_size
        # A short prompt is not worth a step of its own after its last page: nobody is admitted beside a prefill.
        return min(multiple, last) if self._checkpoint < last and computed < last else multiple

    def _take_snapshot(self, states: LinearStatePool, request: Request) -> None:
        """Keep a running request's state for those who come with the same tokens, should a slot be had."""
        assert self._cache is not None and request.slot is not None
        self._cache_pages(self._cache, request, in_use=True)
        tokens = request.tokens(0, request.computed)
        if not self._cache.wants_snapshot(tokens):
            return
        if not states.free_slots and not self._cache.evict_snapshot():
            return
        slot = states.allocate()
        states.copy(request.slot, slot)
        self._cache.add_snapshot(tokens, slot)

    def _cache_pages(self, cache: PrefixCache, request: Request, *, in_use: bool) -> None:
        assert request.row is not None
        full = request.computed // self._page_size
        if full:
            tokens = request.tokens(0, full * self._page_size)
            cache.insert(tokens, self._table.pages(request.row)[:full], in_use=in_use)

    def _check_in_flight(self, step: Step) -> None:
        if step is not self._step:
            raise StepError("this step is not in flight; give the one that next_step returned last, once")

    def _check_sampled(self, step: Step, sampled: Mapping[int, int]) -> None:
        ids = [entry.request.id for entry in step.entries if entry.sampled]
        if sampled.keys() == set(ids):
            return
        if unknown := sorted(sampled.keys() - ids):
            raise StepError(f"tokens were given for requests {unknown}, which this step does not sample")
        # A request that was aborted in flight needs no token.
        if missing := [request_id for request_id in ids if request_id in self._requests and request_id not in sampled]:
            raise StepError(f"the step samples a token for requests {missing}, and none was given")

    def _refuse_to_starve(self) -> Never:
        """Nobody can run: with the pages that ``add`` counted on this cannot be, so someone else holds them."""
        request = self._running[0] if self._running else self._waiting[0]
        held = 0 if request.row is None else len(self._table.pages(request.row))
        raise PoolError(
            f"request {request.id} holds {held} pages and needs {-(-request.length // self._page_size)}; "
            f"{self._allocator.free_pages} of {self._allocator.num_pages} are free and no other request runs, so the "
            f"others are held outside the scheduler; hold such pages before it is made, or give them back"
        )
