"""Scheduler of a speculating engine: a decoding request runs in rounds of 1 to N tokens each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnplug.kernels import PageCopy
from attnplug.sparse import Coordinator
from attnplug_engine.request import FinishReason, Request, RequestState
from attnplug_engine.scheduling.mixed_steps import MixedSteps, PrefillBudget
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.scheduler import MAX_IN_FLIGHT, Scheduler
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_engine.scheduling.step import BAD_LOGITS, PENDING, RoundResult, Step, StepEntry, StepResult
from attnplug_engine.settings.speculation import Speculation

_UNKNOWN = (PENDING,)


def lookahead_rows(speculation: Speculation) -> int:
    """Return the cache rows that a request may need beyond its tokens: those that a round writes, and those that rounds
    in flight may commit."""
    return speculation.room + (MAX_IN_FLIGHT - 1) * speculation.nodes


class RoundScheduler(Scheduler):
    """Serves requests like ``Scheduler``, but decoding requests run in rounds.

    The number of tokens of a round is known when it is finished. Until then it counts as N: ``computed`` is an upper
    bound of the committed rows, and decreases when the round's count arrives. Before a round there is room for all rows
    that it may write beyond that bound; unused room stays with the request, because the next round needs it. A request
    is scheduled while it has a token left to compute even if each round in flight yields just one.

    Termination: every round yields at least one token. ``add`` reserves room beyond a request's last token, as much as
    the last round that may be scheduled needs, so alone it always gets its pages.

    A request begins its rounds when its prefill is complete, however few tokens that has: the end of a prefill leaves
    the first proposal. ``short_hits`` is the number of following tokens on which a draft's cache row depends: the last
    pages of a hit, with as many tokens, are computed again.
    """

    _speculates = True

    def __init__(
        self,
        table: SlotTable,
        allocator: PageAllocator,
        cache: PrefixCache | None,
        speculation: Speculation,
        *,
        max_batch: int,
        max_step_tokens: int,
        context_length: int,
        whole_prompts: bool = False,
        mixed_steps: MixedSteps | None = None,
        states: StateAllocator | None = None,
        checkpoint: int = 1024,
        short_hits: int = 0,
        coordinator: Coordinator | None = None,
    ) -> None:
        super().__init__(
            table,
            allocator,
            cache,
            max_batch=max_batch,
            max_step_tokens=max_step_tokens,
            context_length=context_length,
            whole_prompts=whole_prompts,
            mixed_steps=mixed_steps,
            states=states,
            checkpoint=checkpoint,
            lookahead=lookahead_rows(speculation),
            coordinator=coordinator,
        )
        self._nodes, self._room, self._prefill_tail_rows = speculation.nodes, speculation.room, speculation.tail
        self._pages_per_step = -(-speculation.room // table.page_size)
        self._short_hits = short_hits

    def finish_step(self, step: Step, tokens: Sequence[int]) -> StepResult:
        """Like ``finish_round``, for a step with one token for each of its ``sampled_requests``."""
        result = self.finish_round(step, [(token,) for token in tokens])
        return StepResult({number: new[-1] for number, new in result.tokens.items()}, result.finished)

    def finish_round(
        self,
        step: Step,
        tokens: Sequence[Sequence[int]],
        stops: Callable[[Request, int], bool] | None = None,
    ) -> RoundResult:
        """Process the output of the oldest step in flight: new tokens for each of its ``sampled_requests``.

        Tokens behind a stop token, behind one for which ``stops`` returns True, or beyond the request's length are
        dropped. ``BAD_LOGITS`` comes last and ends its request by an error.
        """
        last = [new[-1] for new in tokens]
        self._check_finished(step, last)
        self._in_flight.popleft()
        if step.snapshots:
            self._keep_snapshots(step, last)
        brought: dict[int, list[int]] = {}
        finished: list[Request] = []
        given = iter(tokens)
        for number, (request, position, token_ids, is_sampled) in enumerate(step.entries):
            if not is_sampled:
                continue
            new = next(given)
            request.steps_in_flight -= 1
            if request.state is not RequestState.RUNNING:  # ended in flight
                continue
            if number < step.rounds:
                request.computed -= self._nodes - len(new)
            elif new[-1] != BAD_LOGITS:
                self._kv_cache.cache(request, position + len(token_ids), in_use=True)
            taken, reason = _taken(request, new, stops)
            if taken:
                brought[request.id] = taken
            if reason is not None:
                self._finish(request, reason, request.length - 1)
                finished.append(request)
        self._retire()
        return RoundResult(brought, tuple(finished))

    def _roll_back(self, step: Step) -> None:
        for number, (request, position, _, is_sampled) in enumerate(step.entries):
            if request.state is not RequestState.RUNNING:
                continue
            request.steps_in_flight -= is_sampled
            if number < step.rounds:
                request.computed = request.length - 1  # nothing is in flight once all steps are rolled back
            else:
                self._kv_cache.truncate(request, position)
                request.in_rounds = False

    def _computed(self, request: Request) -> int:
        for step in self._in_flight:
            for number, entry in enumerate(step.entries):
                if entry.request is request:
                    return request.length - 1 if number < step.rounds else entry.position
        return request.computed

    def _decodes(self, request: Request) -> bool:
        return request.in_rounds

    def _decode(self, entries: list[StepEntry], copies: list[PageCopy]) -> bool:
        while True:
            decoding = [
                request
                for request in self._running
                if request.in_rounds and request.length + request.steps_in_flight < request.max_length
            ]
            if self._kv_cache.extend_to(decoding, [request.computed + self._room for request in decoding], copies):
                break
            if self._in_flight:
                return False
            if len(self._running) == 1:
                return True
            self._preempt_last()
        for request in decoding:
            known = (request.output[-1],) if not request.steps_in_flight else _UNKNOWN
            entries.append(StepEntry(request, request.computed, known, True))
            request.computed += self._nodes
            request.steps_in_flight += 1
        return True

    def _chunk(self, request: Request, budget: PrefillBudget, entries: list[StepEntry], copies: list[PageCopy]) -> bool:
        before = len(entries)
        is_complete = super()._chunk(request, budget, entries, copies)
        if len(entries) > before and entries[-1].sampled:
            request.in_rounds = True
            request.steps_in_flight += 1
        return is_complete

    def _match(self, cache: PrefixCache, tokens: Sequence[int]) -> tuple[list[int], int]:
        pages, cached = cache.match(tokens)
        lost = min(-(-self._short_hits // self._page_size), len(pages))
        return pages[: len(pages) - lost], cached - lost * self._page_size

    def _release(self, request: Request) -> None:
        super()._release(request)
        request.in_rounds = False


def _taken(
    request: Request, new: Sequence[int], stops: Callable[[Request, int], bool] | None
) -> tuple[list[int], FinishReason | None]:
    """Give a request its new tokens, up to its end; return the reason if it has ended."""
    output = request.output
    taken: list[int] = []
    for token in new:
        if token == BAD_LOGITS:
            return taken, FinishReason.ERROR
        output.append(token)
        taken.append(token)
        completes = stops is not None and stops(request, token)  # call it for every token: it records the text
        if completes or token in request.params.stop_token_ids:
            return taken, FinishReason.STOP
        if request.length >= request.max_length:
            return taken, FinishReason.LENGTH
    return taken, None
