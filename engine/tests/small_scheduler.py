"""A scheduler over a small pool. Tests start and finish its steps by hand."""

from __future__ import annotations

from typing import Any

from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.scheduling.page_allocator import PageAllocator
from attnplug_engine.scheduling.prefix_cache import PrefixCache
from attnplug_engine.scheduling.scheduler import Scheduler
from attnplug_engine.scheduling.slot_table import SlotTable
from attnplug_engine.scheduling.step import Step


class Pool:
    """Pages, table and prefix cache of a scheduler."""

    def __init__(self, pages: int = 64, page_size: int = 4, rows: int = 8, max_pages: int = 64) -> None:
        self.allocator = PageAllocator(pages)
        self.table = SlotTable(self.allocator, page_size=page_size, max_requests=rows, max_pages=max_pages)
        self.cache = PrefixCache(self.allocator, page_size)

    def scheduler(self, *, cached: bool = False, **settings: Any) -> Scheduler:
        limits = {"max_batch": 8, "max_step_tokens": 16, "context_length": 64, **settings}
        return Scheduler(self.table, self.allocator, self.cache if cached else None, **limits)


def request(number: int, length: int = 5, max_tokens: int = 4, **params: object) -> Request:
    prompt = tuple(100 * number + position for position in range(length))
    return Request(number, prompt, SamplingParams(max_tokens, **params))


def start(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def finish(scheduler: Scheduler, step: Step, token: int = 7) -> tuple[Request, ...]:
    return scheduler.finish_step(step, [token] * len(step.sampled_requests)).finished


def run_step(scheduler: Scheduler, token: int = 7) -> tuple[Request, ...]:
    return finish(scheduler, start(scheduler), token)


def shape(step: Step) -> list[tuple[int, int, int, bool]]:
    """Request, first position, tokens, sampled: for each entry."""
    return [(entry.request.id, entry.position, len(entry.token_ids), entry.sampled) for entry in step.entries]
