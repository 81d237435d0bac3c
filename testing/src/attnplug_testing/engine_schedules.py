"""Random schedules of an engine with ``batch_invariant``: every request must have the bits that it has alone (E3).

Requests arrive at random steps, in random order, beside companions that share prefixes with them, arrive later, or are
aborted. Settings of the engine add chunking, prefix hits, preemption, overlap and speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from attnplug_engine import Engine, SamplingParams
from attnplug_engine.request import Request

Result = tuple[tuple[int, ...], tuple[tuple[float, ...], ...]]
"""Tokens of a request, and log probabilities of each token and of the most likely ones in its place."""
_LIKELY = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of a schedule: prompt and output tokens, companions, and steps over which requests arrive."""

    vocab: int
    prompt: int = 40
    output: int = 8
    companions: int = 5
    steps: int = 12


@dataclass(frozen=True, slots=True)
class Subject:
    """A request whose result is compared."""

    prompt: tuple[int, ...]
    params: SamplingParams


def subjects(count: int, sizes: Sizes, *, sampled: bool = True) -> list[Subject]:
    """Return requests of several lengths. Half of them share a prefix; every other one samples, if ``sampled``."""
    random, found = Random(count), []
    shared = tuple(random.randrange(sizes.vocab) for _ in range(sizes.prompt // 2))
    for number in range(count):
        length = 1 + random.randrange(sizes.prompt)
        own = tuple(random.randrange(sizes.vocab) for _ in range(length))
        params = SamplingParams(max_tokens=2 + random.randrange(sizes.output - 1), logprobs=_LIKELY)
        if sampled and number % 2:
            params = replace(params, temperature=0.8, top_k=20, top_p=0.9, seed=number)
        found.append(Subject((shared + own)[: sizes.prompt] if number % 2 else own, params))
    return found


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a schedule: the step before which it arrives, and the one before which it is aborted, if any."""

    step: int
    request: Subject
    subject: int | None = None
    leaves: int | None = None


def draw(seed: int, wanted: Sequence[Subject], sizes: Sizes) -> list[Arrival]:
    """Return a random schedule of some of the ``wanted`` requests, once or twice each, and of companions."""
    random = Random(seed)
    chosen = random.choices(range(len(wanted)), k=random.randint(1, 3))
    found = [Arrival(random.randrange(sizes.steps), wanted[number], number) for number in chosen]
    for _ in range(random.randint(0, sizes.companions)):
        prompt = [random.randrange(sizes.vocab) for _ in range(random.randint(1, sizes.prompt))]
        if random.random() < 0.5:  # a hit of the prefix cache, for the one that arrives later
            other = random.choice(wanted).prompt
            keep = random.randint(1, len(other))
            prompt[:keep] = other[:keep]
        step, length = random.randrange(sizes.steps), random.randint(1, sizes.output)
        leaves = step + random.randint(1, sizes.steps) if random.random() < 0.3 else None
        found.append(Arrival(step, Subject(tuple(prompt), SamplingParams(max_tokens=length)), leaves=leaves))
    random.shuffle(found)
    return found


def play(engine: Engine, schedule: Sequence[Arrival]) -> list[tuple[int, Result]]:
    """Run a schedule to its end; return the number and result of each compared request."""
    waiting, running = list(schedule), list[tuple[Arrival, Request]]()
    step = 0
    while waiting or any(request.finish_reason is None for _, request in running):
        for arrival in [one for one in waiting if one.step <= step]:
            waiting.remove(arrival)
            running.append((arrival, engine.add(arrival.request.prompt, arrival.request.params)))
        for arrival, request in running:
            if arrival.leaves == step and request.finish_reason is None:
                engine.abort(request)
        engine.step()
        step += 1
    return [(arrival.subject, result(request)) for arrival, request in running if arrival.subject is not None]


def result(request: Request) -> Result:
    numbers = tuple((one.logprob, *(likely.logprob for likely in one.top)) for one in request.logprobs)
    return tuple(request.output), numbers


def alone(engine: Engine, wanted: Sequence[Subject]) -> list[Result]:
    """Return the result of each request, run alone."""
    return [play(engine, [Arrival(0, one, number)])[0][1] for number, one in enumerate(wanted)]


def differing(
    engine: Engine, seeds: Sequence[int], wanted: Sequence[Subject], expected: Sequence[Result], sizes: Sizes
) -> list[tuple[int, int]]:
    """Return the seed and the subject's number of every result that has other bits than alone."""
    return [
        (seed, number)
        for seed in seeds
        for number, found in play(engine, draw(seed, wanted, sizes))
        if found != expected[number]
    ]


def settings(context: int, page_size: int) -> dict[str, Mapping[str, Any]]:
    """Return settings of engines by name: each must give the same bits. ``tight`` preempts requests."""
    pages = -(-context // page_size)
    return {
        "plain": {},
        "chunks of 3": {"chunked_prefill_size": 3},
        "tight": {"num_pages": pages, "chunked_prefill_size": 16},
        "no prefix cache, overlap": {"prefix_cache": False, "overlap": True, "chunked_prefill_size": 7},
        "two batches": {"two_batch_overlap": True, "max_batch": 5},
        "n-grams": {"speculative_algorithm": "ngram", "speculative_num_steps": 3, "chunked_prefill_size": 11},
    }
