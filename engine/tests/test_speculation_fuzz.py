"""Speculating engines under random load: each request gets the same tokens as without speculation.

``python test_speculation_fuzz.py FIRST LAST`` plays more seeds than the suite does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from refilled_native import build, captured
from test_frozen_drafts import CONFIG as ASSISTANT
from thread_ranks import in_ranks

from attnplug_engine import Engine, SamplingParams
from attnplug_engine.completion import Completion
from attnplug_engine.parallel.collectives import SINGLE, TensorParallel
from attnplug_engine.request import FinishReason, Request
from attnplug_engine.speculation.round_state import RoundState
from attnplug_testing.draft_checkpoints import random_tensors, save, saved_deepseek, shapes_of_assistant

pytestmark = pytest.mark.long

LLAMA, DEEPSEEK, QWEN, KIMI = "tiny:llama", "tiny:deepseek_v3", "tiny:qwen3_next", "tiny:kimi_linear"
CONTEXT = 64
VOCAB = 128


class StepFailed(Exception):
    """Error by which some steps of a play fail."""


@dataclass
class Play:
    """A random load, and the settings of an engine that serves it."""

    seed: int
    model: str = LLAMA
    settings: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    """Captured batch sizes."""
    ranks: int = 1
    known: float = 0.0
    """Share of proposed tokens that are replaced by the target's own choices."""
    prompts: list[list[int]] = field(default_factory=list)
    each: list[SamplingParams] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    """Step before which each prompt arrives."""
    leaves: dict[int, int] = field(default_factory=dict)
    """Number of steps after which a prompt is aborted, by prompt."""
    fails: frozenset[int] = frozenset()
    """Steps that fail."""


def draw(seed: int) -> Play:
    random = Random(seed)
    model = random.choice((LLAMA, LLAMA, DEEPSEEK, DEEPSEEK, QWEN, KIMI))
    play = Play(seed, model)
    play.settings = settings = _speculation(random, model)
    size = random.choice((1, 2, 4, 8, 16, 64))
    steps, topk = settings["speculative_num_steps"], settings["speculative_topk"]
    nodes = settings["speculative_num_draft_tokens"] or 1 + steps * topk
    lookahead = 2 * nodes + 1 + topk * (steps - 1)
    least = -(-(CONTEXT + lookahead) // size)
    settings |= {
        "page_size": size,
        "num_pages": least + random.choice((0, 0, 1, least // 2, 3 * least)),
        "max_batch": random.choice((1, 2, 4, 7)),
        "chunked_prefill_size": random.choice((-1, 1, 3, 8, 64)),
        "prefix_cache": random.random() < 0.5,
        "overlap": random.random() < 0.6,
        "two_batch_overlap": random.random() < 0.3,
        "context_length": CONTEXT,
    }
    if model in (QWEN, KIMI):
        settings["state_checkpoint"] = random.choice((1, 8, 20))
        if random.random() < 0.5:
            settings["state_slots"] = settings["max_batch"] + random.randint(1, 3)
    if random.random() < 0.1:
        play.ranks = 2
    elif random.random() < 0.4 and model in (LLAMA, DEEPSEEK):
        play.sizes = random.choice(((1,), (2, 4), (1, 3, 7), (7,)))
    play.known = random.choice((0.0, 0.5, 0.8, 1.0))
    _load(random, play)
    if topk == 1 and random.random() < 0.5:
        _give_checkpoint(play)
    return play


def _give_checkpoint(play: Play) -> None:
    """Some drafts have no tiny model: layers for several steps, and assistants."""
    settings = play.settings
    if (play.model, settings["speculative_algorithm"]) == (DEEPSEEK, "mtp"):
        play.model = several_layers()
        settings["speculative_num_steps"] = min(settings["speculative_num_steps"], 3)
    elif settings["speculative_algorithm"] == "eagle":
        settings |= {"speculative_algorithm": "mtp", "speculative_draft_model": assistant()}


@cache
def _folders() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def several_layers() -> str:
    return str(saved_deepseek(Path(_folders().name) / "several", 3)[0])


@cache
def assistant() -> str:
    tensors = random_tensors(shapes_of_assistant(ASSISTANT, 16))
    return str(save(Path(_folders().name) / "assistant", ASSISTANT, tensors))


def _speculation(random: Random, model: str) -> dict[str, Any]:
    linear = model in (QWEN, KIMI)
    kinds = ["ngram", "standalone", "standalone"]
    kinds += ["mtp"] * (3 * (model in (DEEPSEEK, QWEN)))
    kinds += ["eagle", "eagle3"] * (model == LLAMA)
    algorithm = random.choice(kinds)
    steps = random.randint(1, 4)
    topk = 1 if linear else random.choice((1, 1, 2, 4))
    nodes = None
    if topk > 1 and random.random() < 0.5:
        each = topk if algorithm == "ngram" else topk**2
        nodes = random.randint(2, min(1 + topk + each * (steps - 1), 20))
    draft = None
    if algorithm in ("eagle", "eagle3"):
        draft = LLAMA
    elif algorithm == "standalone":
        draft = random.choice((LLAMA, "tiny:qwen3", model if not linear else LLAMA))
    return {
        "speculative_algorithm": algorithm,
        "speculative_draft_model": draft,
        "speculative_num_steps": steps,
        "speculative_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


def _load(random: Random, play: Play) -> None:
    stems = [[random.randrange(VOCAB) for _ in range(40)] for _ in range(2)]
    for number in range(random.randint(1, 12)):
        stem = random.choice(stems)
        prompt = stem[: random.randrange(40)] + [random.randrange(VOCAB) for _ in range(random.randint(1, 9))]
        if random.random() < 0.15:
            prompt = [*stem, *stem][: random.randint(CONTEXT - 5, CONTEXT - 1)]
        if random.random() < 0.2:
            prompt = (prompt[:3] * CONTEXT)[: random.randint(1, 40)]
        draws = random.random() < 0.4
        play.prompts.append(prompt)
        play.each.append(
            SamplingParams(
                random.choice((1, random.randint(1, 30), random.randint(20, 40))),
                temperature=0.8 if draws else 0.0,
                top_k=random.choice((0, 20)),
                top_p=random.choice((1.0, 0.9)),
                seed=number,
                stop_token_ids=frozenset(random.sample(range(VOCAB), random.choice((0, 0, 4, 12)))),
                stop=tuple(map(chr, random.sample(range(VOCAB), random.choice((0, 0, 0, 9))))),
                logprobs=random.choice((None, None, 0, 2)),
            )
        )
        play.arrivals.append(random.choice((0, 0, random.randrange(25))))
        if random.random() < 0.15:
            play.leaves[number] = random.randrange(20)
    if random.random() < 0.3:
        play.fails = frozenset(random.sample(range(60), 4))


def engine(model: str, parallel: TensorParallel = SINGLE, **settings: Any) -> Engine:
    return Engine(model, device="cpu", ignore_eos=True, parallel=parallel, **settings)


@cache
def plain(model: str) -> Engine:
    return engine(model, page_size=16, max_batch=12, context_length=CONTEXT)


def expected(play: Play) -> list[Completion]:
    return plain(play.model).generate(play.prompts, play.each)


class Telling:
    """Replaces some proposed tokens, of any proposer, by tokens that the target will choose."""

    def __init__(self, one: Engine, play: Play, outputs: list[list[int]]) -> None:
        self._one, self._play, self._outputs = one, play, outputs
        self._propose = one.rounds.state.propose

    def __call__(self, rows: torch.Tensor, proposal: Any) -> None:
        self._propose(rows, proposal)
        state: RoundState = self._one.rounds.state
        owners = {request.row: request for request in self._one.scheduler.running}
        for row in rows.tolist():
            if row not in owners:
                continue  # a padded request
            request = owners[row]
            number = request.params.seed
            whole = self._play.prompts[number] + self._outputs[number]
            depths = [0]
            for node in range(state.proposed.tokens.shape[1]):
                parent = node if state.proposed.parents is None else int(state.proposed.parents[row, node])
                depths.append(depths[parent] + 1)
                place = int(state.lengths[row]) + depths[-1]
                chance = Random(f"{self._play.seed} {number} {place} {node}").random()
                if place < len(whole) and chance < self._play.known:
                    state.proposed.tokens[row, node] = whole[place]


def serve(play: Play, outputs: list[list[int]], parallel: TensorParallel = SINGLE) -> tuple[Engine, list[Request]]:
    one = engine(play.model, parallel, **play.settings)
    free = one.runner.allocator.free_pages
    if play.sizes:
        captured(one, tuple(size for size in play.sizes if size <= play.settings["max_batch"]) or (1,))
    one.rounds.state.propose = Telling(one, play, outputs)
    launch = one.rounds.launch
    requests: dict[int, Request] = {}
    launches = 0

    def failing(step: Any) -> Any:
        nonlocal launches
        launches += 1
        if launches in play.fails and launches % 2:
            raise StepFailed
        launched = launch(step)
        if launches in play.fails:  # after all launches of the step
            raise StepFailed
        return launched

    one.rounds.launch = failing
    received = 0
    for count in range(3000):
        for number, arrival in enumerate(play.arrivals):
            if number not in requests and arrival <= count:
                requests[number] = one.add(play.prompts[number], play.each[number])
            if number in requests and play.leaves.get(number) == count - arrival:
                one.abort(requests[number])
        with suppress(StepFailed):
            result = one.step()
            received += 0 if result is None else sum(map(len, result.tokens.values()))
        if len(requests) == len(play.prompts) and not one.scheduler.has_work:
            break
    assert count < 2900, "it does not come to an end"
    assert not one.loop.in_flight and not one.scheduler.in_flight and one.step() is None
    assert received == sum(len(request.output) for request in requests.values())
    _check_statistics(one, requests.values())
    if one.cache is not None:
        one.cache.clear()
    assert one.runner.allocator.free_pages == free, "pages are lost"
    if (states := one.runner.states) is not None:
        assert states.free_slots == states.num_slots, "slots of states are lost"
    return one, [requests[number] for number in range(len(play.prompts))]


def _check_statistics(one: Engine, requests: Iterable[Request]) -> None:
    counts = one.statistics.rounds
    assert counts.rounds <= counts.tokens <= counts.rounds * (counts.steps + 1)
    assert 0 <= counts.acceptance <= 1 and counts.batches <= counts.rounds
    first = sum(bool(request.output) for request in requests)  # at least those come from prefills
    assert one.statistics.decode_tokens <= sum(len(request.output) for request in requests) - first


def check(play: Play) -> None:
    wanted = expected(play)
    outputs = [completion.token_ids for completion in wanted]
    if play.ranks > 1:
        served = in_ranks(play.ranks, lambda parallel: serve(play, outputs, parallel))
    else:
        served = [serve(play, outputs)]
    for one, requests in served:
        for number, (request, completion) in enumerate(zip(requests, wanted, strict=True)):
            output = request.output
            where = f"prompt {number} of play {play.seed}"
            if request.finish_reason is FinishReason.ABORTED:
                assert number in play.leaves and output == completion.token_ids[: len(output)], where
            else:
                assert output == completion.token_ids, where
                found = one.completion(number, request)
                assert (found.finish_reason, found.text) == (completion.finish_reason, completion.text), where
            if request.params.logprobs is None:
                continue
            assert len(request.logprobs) == len(output), where
            for mine, other in zip(request.logprobs, completion.logprobs, strict=False):
                assert mine.token_id == other.token_id and abs(mine.logprob - other.logprob) < 1e-3, where
                for likely, also in zip(mine.top, other.top, strict=True):
                    assert abs(likely.logprob - also.logprob) < 1e-3, where


def run(seed: int) -> None:
    play = draw(seed)
    with pytest.MonkeyPatch.context() as patch:
        if play.sizes:
            for module in ("execution.runner", "speculation.draft_runner"):
                patch.setattr(f"attnplug_engine.{module}.build_selection", build)
        check(play)


@pytest.mark.parametrize("seed", range(4))  # as a script, this file runs any others
def test_each_request_gets_what_it_gets_without_speculation(seed):
    """Tokens, ends, texts and log probabilities; afterwards all pages and slots of states are free again."""
    run(seed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            run(number)
        except Exception as error:
            print(f"play {number}: {error!r:.300}\n{draw(number)!r:.700}", flush=True)
