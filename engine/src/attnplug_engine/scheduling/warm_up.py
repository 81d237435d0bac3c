"""Requests that an engine or embedder runs before its first one: they compile and load kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnplug_engine.memory.capacity import Capacity
from attnplug_engine.request import Request, SamplingParams

_SHORT = 17
_NEW_TOKENS = 4
_LONG_PREFIX = 8192
_FIRST_TOKEN = SamplingParams(1)
_ONE_DECODE = SamplingParams(2)
_GREEDY = SamplingParams(_NEW_TOKENS)
_SAMPLED = SamplingParams(_NEW_TOKENS, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=0, logprobs=2)


def warm_up_batches(capacity: Capacity) -> Iterator[list[Request]]:
    """Yield requests to run together, batch by batch; those that do not fit into a small pool are left out.

    Kernels choose tiles and splits by the number of tokens, requests and cache rows, in ranges that are at least
    powers of two apart. So the batches are, in this order:

    - a full step alone;
    - a prompt of each power of two up to that, and prompts that end at a page's boundary;
    - a prompt with a short prefix in the cache, and one with a prefix that is long enough to be chunked (C1);
    - as many short prompts as each power of two, which decode greedily and sampled;
    - full steps of one prompt more than each power of two, which are as long as any of the next power;
    - as many prompts as each power of two, of equal and of different lengths, with few tokens and with many;
    - as many prompts as each power of four, which decode beside a full chunk of another one.
    """
    rows, size = capacity.num_pages * capacity.page_size, capacity.page_size
    longest = min(capacity.context_length - _NEW_TOKENS, rows - _NEW_TOKENS - capacity.lookahead)
    full, numbers = min(capacity.max_step_tokens, longest), iter(range(-1, -1 << 20, -1))

    def request(tokens: int, params: SamplingParams = _FIRST_TOKEN) -> Request:
        return Request(next(numbers), (0,) * tokens, params)

    def decoding(count: int, tokens: int) -> list[Request]:
        return [request(tokens, _SAMPLED if number % 2 else _GREEDY) for number in range(count)]

    if full < 1:
        return
    yield [request(full, _GREEDY)]
    powers = [1 << power for power in range(full.bit_length())]
    for tokens in sorted({*powers, size - 1, size, size + 1} & set(range(1, full))):
        yield [request(tokens)]
    for tokens in sorted({min(full + extra, longest) for extra in (_SHORT, _LONG_PREFIX + _SHORT)} - {full}):
        yield [request(tokens, _GREEDY)]
    most, short = min(capacity.max_batch, capacity.num_pages), min(_SHORT, longest)
    counts = sorted({1 << power for power in range(most.bit_length())} | {most})
    for count in counts:
        yield decoding(count, short)
    if most > 1:
        for lengths in _full_steps(most, full):
            yield [request(tokens) for tokens in lengths]
        for lengths in _several_lengths(counts[1:], full):
            yield [request(tokens, _ONE_DECODE) for tokens in lengths]
        for count in sorted({1 << power for power in range(0, most.bit_length(), 2)} - {most} | {most - 1}):
            yield [*decoding(count, short), request(min(2 * full + _SHORT, longest), _GREEDY)]


def embedding_batches(capacity: Capacity, step_tokens: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield prompts to embed together, batch by batch. At most ``step_tokens`` tokens of several prompts run together.

    The batches are, in this order: a prompt of each power of two, at a page's boundary, and as long as the context;
    then as many short prompts as each power of two, one more than each that fill a step, and prompts of other lengths.
    """
    longest = min(capacity.context_length, capacity.num_pages * capacity.page_size)
    full, size = min(step_tokens, longest), capacity.page_size
    powers = [1 << power for power in range(longest.bit_length())]
    for tokens in sorted({*powers, size - 1, size, size + 1, full, longest} & set(range(1, longest + 1))):
        yield [(0,) * tokens]
    most = min(capacity.max_batch, capacity.num_pages)
    counts = sorted({1 << power for power in range(1, most.bit_length())} | {most} - {1})
    for count in counts:
        yield [(0,) * min(_SHORT, full)] * count
    for lengths in (*_full_steps(most, full), *_several_lengths(counts, full)):
        yield [(0,) * tokens for tokens in lengths]


def _full_steps(most: int, full: int) -> Iterator[list[int]]:
    """Yield equal lengths of up to ``most`` prompts that fill a step.

    Kernels are chosen by the next power of two of prompts. One prompt more than a power has the longest prompts.
    """
    for count in (1 + (1 << power) for power in range((most - 1).bit_length())):
        yield [max(full // count, 1)] * count


def _several_lengths(counts: Sequence[int], full: int) -> Iterator[list[int]]:
    """Yield lengths of as many prompts as each of ``counts``: all equal, or one longer than the others.

    Kernels choose tiles of up to 128 rows by the longest prompt, so few tokens are in powers of two. More prompts than
    ``full`` do not run together.
    """
    for count in (count for count in counts if count <= full):
        most = full - count + 1
        for longest in (*(1 << power for power in range(1, 8)), 512, most):
            if longest * count <= full and longest < 128:
                yield [longest] * count
            if 1 < longest <= most:
                yield [longest] + [1] * (count - 1)
