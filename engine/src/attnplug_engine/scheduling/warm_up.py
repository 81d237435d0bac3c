"""Requests that an engine runs before its first one: they compile and load kernels."""

from __future__ import annotations

from collections.abc import Iterator

from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.request import Request, SamplingParams

_SHORT = 17
_NEW_TOKENS = 4
_GREEDY = SamplingParams(_NEW_TOKENS)
_SAMPLED = SamplingParams(_NEW_TOKENS, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=0, logprobs=2)


def warm_up_batches(capacity: Capacity) -> Iterator[list[Request]]:
    """Yield requests to run together, batch by batch; those that do not fit into a small pool are left out.

    A prompt of two full steps and a short one, of which two have a prefix; short prompts that decode, greedily and
    sampled, while another one prefills.
    """
    rows = capacity.num_pages * capacity.page_size
    longest = min(capacity.context_length - _NEW_TOKENS, rows - _NEW_TOKENS - capacity.lookahead)
    full, numbers = min(capacity.max_step_tokens, longest), iter(range(-1, -1 << 20, -1))

    def request(tokens: int, params: SamplingParams = _GREEDY) -> Request:
        return Request(next(numbers), (0,) * tokens, params)

    if full < 1:
        return
    yield [request(min(2 * full + _SHORT, longest))]
    several = min(capacity.max_batch, longest // (2 * _SHORT))
    if several > 1:
        prompts = [request(_SHORT, _SAMPLED if number % 2 else _GREEDY) for number in range(several)]
        yield [*prompts, request(min(2 * _SHORT, longest))]
