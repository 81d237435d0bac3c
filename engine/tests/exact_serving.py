"""A scheduler that serves a fake and exact model.

Each token's id is written to its slot of a paged memory, and the next token is computed from the rows that the page
table addresses. A linear model keeps a state in a slot instead. Steps run when they are launched and are finished
later, as on a device, which runs them in this order with up to two in flight. Tokens that the host does not know yet
are fed back there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attnplug import AttentionKind, DType, ForwardMode, LayerSpec
from attnplug.linear import LinearDims, LinearStatePool
from attnplug_engine.request import FinishReason, Request, RequestState
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.scheduler import Scheduler, unchunked_step_tokens
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.state_allocator import StateAllocator
from attnplug_engine.scheduling.step import BAD_LOGITS, PENDING, Step, StepEntry

VOCAB = 6
STOP = 0


FIRST = 7
POISON = 99
"""Content of a row or a state after a forward whose logits are not finite."""
LAYER = LayerSpec(0, AttentionKind.LIGHTNING, 1, 1, 1, 1, 1.0, linear=LinearDims(1, 1, 1, 1))


def advance(value: int, tokens: Sequence[int]) -> int:
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: list[int]) -> int:
    return advance(FIRST, tokens) % VOCAB


def alone(request: Request, context_length: int) -> tuple[list[int], FinishReason]:
    """The output of a request by the model's definition, without scheduler, pages or cache."""
    tokens = list(request.prompt)
    output: list[int] = []
    while True:
        output.append(next_token(tokens))
        tokens.append(output[-1])
        if output[-1] in request.params.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == request.params.max_tokens or len(tokens) == context_length:
            return output, FinishReason.LENGTH


class Serving:
    """A scheduler on a real allocator and table, with the fake model's memory ``[pages, page_size]``."""

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        max_batch: int = 4,
        chunk: int | None = 16,
        context: int = 64,
        cached: bool = True,
        slots: int = 0,
        checkpoint: int = 8,
        depth: int = 1,
        bad_at: Mapping[int, int | None] | None = None,
        lookahead: int = 0,
    ) -> None:
        """``depth`` steps are in flight. ``bad_at`` maps a request's id to the index of its token that cannot be
        sampled. ``lookahead`` is the number of tokens by which the page table exceeds the context."""
        self.depth, self.bad_at = depth, bad_at or {}
        self.states, self.recurrent = None, torch.empty(0)
        if slots:
            pool = LinearStatePool([LAYER], num_slots=slots, dtype=DType.FLOAT32, device="cpu")
            recurrent = pool.recurrent(0)
            assert recurrent is not None
            self.states, self.recurrent = StateAllocator(pool), recurrent
        self.allocator = PageAllocator(pages)
        self.table = SlotTable(
            self.allocator,
            page_size=page_size,
            max_requests=max_batch,
            max_pages=-(-(context + lookahead) // page_size),
        )
        self.cache = PrefixCache(self.allocator, page_size, self.states) if cached else None
        self.whole = chunk is None
        most = unchunked_step_tokens(context, max_batch) if chunk is None else chunk
        self.scheduler = self.make_scheduler(
            max_batch=max_batch,
            max_step_tokens=most,
            whole_prompts=self.whole,
            context_length=context,
            states=self.states,
            checkpoint=checkpoint,
        )
        self.limit = max(most, max_batch)
        self.memory = [[-1] * page_size for _ in range(pages)]
        self.tokens = [-1] * max_batch  # by rows of the table, as last sampled
        self.launched: deque[tuple[Step, list[int]]] = deque()
        self.steps = 0

    def make_scheduler(self, **settings: Any) -> Scheduler:
        return Scheduler(self.table, self.allocator, self.cache, **settings)

    def compute(self, step: Step) -> list[int]:
        """Run a step as a device does, and return the tokens that the host will read."""
        for copy in step.copies:
            self.memory[copy.target] = list(self.memory[copy.source])
        page_table, lengths = (tensor.tolist() for tensor in self.table.batch(step.rows))
        size = self.table.page_size
        inputs = []
        for entry, row, pages, length in zip(step.entries, step.rows, page_table, lengths, strict=True):
            assert entry.position + len(entry.token_ids) == length
            assert entry.sampled or not self.whole or self.states is not None, "a prompt is cut"
            tokens = [self.tokens[row] if token == PENDING else token for token in entry.token_ids]
            inputs.append(tokens)
            for position, token in enumerate(tokens, entry.position):
                page = pages[position // size]
                assert self.allocator.references(page) == 1, "a shared page is written"
                self.memory[page][position % size] = POISON if self._is_bad(entry) else token
        if self.states is not None:
            values = self._advance_states(self.states, step, inputs)
        else:
            values = [
                advance(FIRST, [self.memory[pages[position // size]][position % size] for position in range(length)])
                for pages, length in zip(page_table, lengths, strict=True)
            ]
        sampled = []
        for entry, row, value in zip(step.entries, step.rows, values, strict=True):
            if entry.sampled:
                self.tokens[row] = value % VOCAB
                sampled.append(BAD_LOGITS if self._is_bad(entry) else value % VOCAB)
        return sampled

    def _is_bad(self, entry: StepEntry) -> bool:
        made = entry.position + len(entry.token_ids) - len(entry.request.prompt)
        return entry.sampled and self.bad_at.get(entry.request.id) == made

    def _advance_states(self, states: StateAllocator, step: Step, inputs: list[list[int]]) -> list[int]:
        memory, values = self.recurrent, []
        for entry, slot, tokens in zip(step.entries, step.state_slots, inputs, strict=True):
            assert states.references(slot) == 1, "a snapshot is written"
            values.append(advance(int(memory[slot]) + FIRST, tokens))  # a new slot holds 0
            memory[slot] = POISON if self._is_bad(entry) else values[-1] - FIRST
        for source, target in step.snapshots:
            states.copy(source, target)
        return values

    def launch(self) -> bool:
        """Schedule a step and run it, and check what holds for every step; it is finished later."""
        left = [request for request in self.scheduler.running if request.computed + 1 < request.max_length]
        left = [request for request in left if request.state is RequestState.RUNNING]
        decoding = [request for request in left if request.decoding]
        step = self.scheduler.next_step()
        assert step is not None or self.launched or not self.scheduler.has_work
        if step is None:
            return False
        self.steps += 1
        self._check(step, left, decoding)
        self.launched.append((step, self.compute(step)))
        return True

    def fail(self) -> None:
        """A step that runs, in part or whole, and then is taken back, as are all in flight."""
        if len(self.launched) < 2:
            self.launch()
        self.launched.clear()
        self.scheduler.drop_steps()

    def step(self, *, abort_in_flight: tuple[int, ...] = ()) -> Step | None:
        """Schedule and run steps as far as may be in flight, and finish the oldest."""
        while len(self.launched) < self.depth and self.launch():
            pass
        assert bool(self.launched) >= self.scheduler.has_work
        if not self.launched:
            return None
        for request_id in abort_in_flight:
            self.scheduler.abort(request_id)
        step, tokens = self.launched.popleft()
        expected = {
            request.id
            for request, token in zip(step.sampled_requests, tokens, strict=True)
            if request.state is RequestState.RUNNING and token != BAD_LOGITS
        }
        result = self.scheduler.finish_step(step, tokens)
        assert result.tokens.keys() == expected
        assert all(request.state is RequestState.FINISHED for request in result.finished)
        for page, row in enumerate(self.memory):
            if not self.allocator.references(page):
                row[:] = [-9] * len(row)
        return step

    def _check(self, step: Step, left: list[Request], decoding: list[Request]) -> None:
        in_step = [entry.request for entry in step.entries]
        assert step.num_tokens <= self.limit
        for request in decoding:  # never stalled: it runs, or it was preempted
            assert request in in_step or (request.state is RequestState.WAITING and not self.launched)
        assert not left or left[0] in in_step  # the oldest that has tokens left always moves
        assert all(request.length + request.pending <= request.max_length for request in in_step)
        queue = [request.id for request in self.scheduler.running + self.scheduler.waiting]
        assert queue == sorted(queue)  # first come, first served
        decodes = [
            entry.sampled and len(entry.token_ids) == 1 and entry.position >= len(entry.request.prompt)
            for entry in step.entries
        ]
        mixed = ForwardMode.MIXED if any(decodes) else ForwardMode.EXTEND
        assert step.mode is (ForwardMode.DECODE if all(decodes) else mixed)

    def check_all_returned(self) -> None:
        assert not self.scheduler.has_work
        self.launched.clear()
        self.scheduler.drop_steps()
        if self.cache is not None:
            self.cache.clear()
        assert self.allocator.free_pages == self.allocator.num_pages
        assert all(self.allocator.references(page) == 0 for page in range(self.allocator.num_pages))
        assert self.states is None or self.states.free_slots == self.states.num_slots
        rows = [self.table.admit() for _ in range(self.table.max_requests)]
        for row in rows:
            self.table.release(row)
