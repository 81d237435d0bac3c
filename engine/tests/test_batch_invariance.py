"""``batch_invariant``: bits of tokens and log probabilities that depend on a request alone (E3).

``make test`` plays some of 200 random schedules, ``make bridge-test`` the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from thread_ranks import in_ranks

from attnplug import RefusalCode, UsageError
from attnplug.host import SelectionError
from attnplug_engine import Embedder, Engine, SamplingParams
from attnplug_engine.parallel.collectives import SINGLE, RankOrder, TensorParallel
from attnplug_testing.devices import DEVICES
from attnplug_testing.engine_schedules import (
    Arrival,
    Result,
    Sizes,
    Subject,
    alone,
    differing,
    play,
    settings,
    subjects,
)

LLAMA, LATENT = "tiny:llama", "tiny:deepseek_v3"
SERVED = (LLAMA, LATENT, "tiny:qwen3", "tiny:deepseek_v2", "tiny:qwen3_next")
"""Grouped attention, with norms of heads; latent attention and experts, with either router; linear layers."""
SPARSE, COMPRESSED = "tiny:deepseek_v32", "tiny:deepseek_v4"
CONTEXT, PAGE = 64, 4
PAGES = {COMPRESSED: 8}
"""Page sizes of models whose entries need larger ones."""
SIZES = Sizes(vocab=128)
SETTINGS = settings(CONTEXT, PAGE)
PER_SETTING = 9
"""Schedules per model and setting: 378 together."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors are slower on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(model: str, parallel: TensorParallel = SINGLE, **given: Any) -> Engine:
    page = PAGES.get(model, PAGE)
    shape = {"page_size": page, "context_length": CONTEXT, "max_batch": 8, "ignore_eos": True, "num_pages": 200}
    return Engine(model, parallel=parallel, **{"device": "cpu", "batch_invariant": True, **shape, **given})


@cache
def expected(model: str) -> tuple[list[Subject], list[Result]]:
    wanted = subjects(4, SIZES)
    return wanted, alone(build(model, prefix_cache=False), wanted)


def flips(model: str, name: str, count: int, **given: Any) -> list[tuple[int, int]]:
    """Results whose bits differ from those of requests served alone, in ``count`` schedules of a setting."""
    start = list(SETTINGS).index(name) * PER_SETTING
    wanted, results = expected(model)
    own = settings(CONTEXT, PAGES.get(model, PAGE))[name]
    return differing(build(model, **own, **given), range(start, start + count), wanted, results, SIZES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model", [*SERVED, SPARSE, COMPRESSED])
def test_a_schedule_changes_no_bits(model: str, name: str) -> None:
    """E3: companions, chunks, prefix hits, preemption, overlap and speculation."""
    assert flips(model, name, 1) == []


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("model", [*SERVED, SPARSE, COMPRESSED])
def test_no_schedule_changes_bits(model: str, name: str) -> None:
    """E3: the schedules of ``test_a_schedule_changes_no_bits``, and more: 378 together."""
    assert flips(model, name, PER_SETTING) == []


def test_without_the_option_bits_change() -> None:
    """Shows that the schedules can detect a violation."""
    wanted = subjects(4, SIZES)
    results = alone(build(LLAMA, prefix_cache=False, batch_invariant=False), wanted)
    engine = build(LLAMA, batch_invariant=False, **SETTINGS["chunks of 3"])
    assert differing(engine, range(9, 10), wanted, results, SIZES)


@pytest.mark.parametrize("model", [LLAMA, COMPRESSED])
def test_preemption(model: str) -> None:
    """E3: the second request loses its pages and is computed again."""
    two = [Subject(tuple(range(start, start + 23)), SamplingParams(max_tokens=16, logprobs=1)) for start in (1, 50)]
    results = alone(build(model), two)
    engine = build(model, **settings(CONTEXT, PAGES.get(model, PAGE))["tight"])
    assert play(engine, [Arrival(0, one, number) for number, one in enumerate(two)]) == list(enumerate(results))
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("model", [LLAMA, pytest.param(COMPRESSED, marks=pytest.mark.long)])
def test_among_63_others(model: str) -> None:
    wanted, results = expected(model)
    crowd = [Arrival(0, Subject((number, 3, number), SamplingParams(max_tokens=3))) for number in range(63)]
    engine = build(model, max_batch=64, num_pages=500)
    assert play(engine, [*crowd, Arrival(1, wanted[1], 1)]) == [(1, results[1])]


@pytest.mark.parametrize("model", [SPARSE, "tiny:glm_moe_dsa", COMPRESSED])
@pytest.mark.sample(1)
def test_rows_in_host_memory(model: str) -> None:
    """E3: HiSparse keeps the bits; a hot buffer has room for few rows more than a layer selects."""
    hisparse = {"enable_hisparse": True, "hisparse_config": {"device_buffer_size": 16}}
    wanted = subjects(2, SIZES)
    results = alone(build(model, prefix_cache=False), wanted)
    assert differing(build(model, **SETTINGS["chunks of 3"], **hisparse), range(1), wanted, results, SIZES) == []


@pytest.mark.long
def test_two_ranks() -> None:
    """E3: two numbers have one sum. Ranks have other partial sums than one rank alone."""

    def run(parallel: TensorParallel) -> list[tuple[int, int]]:
        torch.set_num_threads(1)
        wanted = subjects(2, SIZES)
        results = alone(build(LLAMA, parallel, prefix_cache=False), wanted)
        return differing(build(LLAMA, parallel, **SETTINGS["chunks of 3"]), range(1), wanted, results, SIZES)

    assert in_ranks(2, run) == [[], []]


def test_more_ranks_are_summed_in_their_order() -> None:
    parts = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    wanted = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    found = in_ranks(4, lambda parallel: RankOrder(parallel).all_reduce(parts[parallel.rank]))
    assert all(torch.equal(one, wanted) for one in found)


def test_a_backend_without_the_levels_is_refused_for_that_reason() -> None:
    with pytest.raises(SelectionError) as caught:
        Engine("tiny:deepseek_v3", device="cpu", batch_invariant=True, attention_backend="flashinfer_mla")
    candidates = [one for choice in caught.value.selection.choices.values() for one in choice.candidates]
    refused = [one.refusals for one in candidates if one.backend.spec.name == "flashinfer_mla"]
    assert refused and all(RefusalCode.INVARIANCE in {refusal.code for refusal in each} for each in refused)


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"speculative_algorithm": "ngram", "speculative_topk": 2}, "speculative_topk"),
        ({"batch_invariant": 1}, "batch_invariant"),
    ],
)
def test_what_cannot_be_kept_is_refused(given: dict[str, Any], setting: str) -> None:
    """Rows of a tree are not at the positions that a decode reads."""
    with pytest.raises(UsageError) as caught:
        build(LLAMA, **given)
    assert setting in caught.value.settings


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(pooling: str) -> None:
    """E3: a prompt's vector depends neither on other prompts nor on chunks."""
    prompts = [list(one.prompt) for one in subjects(4, SIZES)]

    def embedder(**given: Any) -> Embedder:
        return Embedder(LLAMA, device="cpu", pooling=pooling, batch_invariant=True, page_size=PAGE, **given)

    one = embedder()
    alone = [one.embed([prompt])[0].vector for prompt in prompts]
    for given in ({}, {"chunked_prefill_size": 5, "max_batch": 3}):
        found = embedder(**given).embed(prompts[::-1])[::-1]
        assert all(torch.equal(each.vector, vector) for each, vector in zip(found, alone, strict=True)), given
    plain = Embedder(LLAMA, device="cpu", pooling=pooling).embed(prompts)
    assert all(torch.allclose(each.vector, vector, atol=1e-5) for each, vector in zip(plain, alone, strict=True))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("model", SERVED)
def test_graphs_change_no_bits(model: str, device: str) -> None:
    """E3: on a GPU, captured decode and prefill steps, eager ones, and speculation."""
    shape = {"device": device, "dtype": "bfloat16", "page_size": 64}
    wanted = subjects(4, SIZES)
    results = alone(build(model, disable_cuda_graph=True, **shape), wanted)
    for given in ({}, {"disable_prefill_cuda_graph": True}, SETTINGS["n-grams"], SETTINGS["chunks of 3"]):
        assert differing(build(model, **{**shape, **given}), range(6), wanted, results, SIZES) == [], given
