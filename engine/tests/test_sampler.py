"""The sampler: right distributions, and the same token in every batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.host import AttnplugError, UsageError
from attnplug_engine.request import Request, SamplingParams
from attnplug_engine.sampler import BadLogits, Sampler, draw, likeliest, request_seed, token_logprobs, uniform

KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
]


def request(number: int, made: int = 0, seed: int | None = None, **params: Any) -> Request:
    return Request(number, (1,), SamplingParams(99, seed=seed, **params), output=[0] * made)


def kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Probabilities by the definition, in plain Python: sorted, cut, renormalised."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: params.top_k or None]
    weights = {token: math.exp((logits[token] - max(logits)) / params.temperature) for token in order}
    total, running, nucleus = sum(weights.values()), 0.0, {}
    for token in order:
        if running >= params.top_p * total:
            break
        nucleus[token] = weights[token]
        running += weights[token]
    return {token: weight / running for token, weight in nucleus.items()}


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 2.0, 5.0]])
    assert Sampler().sample(logits, [request(4), request(2)]) == {4: 1, 2: 0}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 31, 32, 96, 640, 1031, 1536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_likeliest_token_by_the_definition(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Whatever the blocks in which it is looked for: the first of equals, and -1 where the largest is not finite."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (rows, vocab), generator=random).to(dtype)  # full of equals
    special = torch.tensor([-math.inf, -math.inf, math.inf, math.nan, 5.0, 5.0])[
        torch.randint(0, 6, (2,), generator=random)
    ]
    logits[0, torch.randint(0, vocab, (2,), generator=random)] = special.to(dtype)
    if seed % 3 == 0:
        logits[-1] = -math.inf
    expected = []
    for row in logits.tolist():
        bad = any(math.isnan(logit) for logit in row) or math.isinf(max(row))
        expected.append(-1 if bad else row.index(max(row)))
    assert likeliest(logits) == expected
    assert likeliest(logits.t().contiguous().t()) == expected


@pytest.mark.parametrize("params", KINDS[1:])
def test_tokens_come_as_often_as_their_probability_says(params: dict[str, float]) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    asked = SamplingParams(1, **params)
    expected = kept(logits.tolist(), asked)
    draws = 4000
    counts = Counter(draw(logits, asked, uniform(11, position)) for position in range(draws))
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        assert abs(counts[token] - draws * probability) <= 5 * math.sqrt(draws * probability) + 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(2, 9),
    vocab=st.sampled_from([1, 2, 7, 64, 1031, 5000]),
    data=st.data(),
)
def test_a_token_is_the_same_in_every_batch(seed: int, rows: int, vocab: int, data: st.DataObject) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    requests = [
        request(
            number,
            data.draw(st.integers(0, 50)),
            data.draw(st.none() | st.integers(0, 9)),
            **data.draw(st.sampled_from(KINDS)),
        )
        for number in range(rows)
    ]
    together = Sampler(5).sample(logits, requests)
    for number in range(rows):
        assert Sampler(5).sample(logits[number : number + 1].clone(), [requests[number]]) == {number: together[number]}
    order = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
    mixed = Sampler(5).sample(logits[order], [requests[number] for number in order])
    assert mixed == {number: together[number] for number in order}


def test_a_seed_fixes_the_tokens_and_their_places_differ() -> None:
    logits = torch.zeros(1, 1000)

    def run(seed: int | None, number: int = 0, engine_seed: int = 0) -> list[int]:
        sampler = Sampler(engine_seed)
        return [sampler.sample(logits, [request(number, made, seed, temperature=1.0)])[number] for made in range(20)]

    assert run(3) == run(3, number=8) == run(3, engine_seed=1)
    assert run(3) != run(4)
    assert len(set(run(3))) > 15
    assert run(None) == run(None)
    assert run(None) != run(None, number=1)
    assert run(None) != run(None, engine_seed=1)


def test_uniform_numbers_are_in_range_and_even() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert len(set(numbers)) == len(numbers)
    assert request_seed(0, 1) != request_seed(1, 0)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_weight_is_never_drawn(chance: float) -> None:
    logits = torch.full((50,), -1e4)
    logits[[7, 30]] = 2.0
    assert draw(logits, SamplingParams(1, temperature=1.0), chance) == (7 if chance < 0.5 else 30)


def test_the_smallest_temperature_is_nearly_greedy_and_not_an_error() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert draw(logits, SamplingParams(1, temperature=5e-324), 0.99) == 1


def test_among_equals_top_k_and_top_p_keep_the_first() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    chances = [place / 100 for place in range(100)]
    top_k = {draw(logits, SamplingParams(1, temperature=1.0, top_k=2), chance) for chance in chances}
    top_p = {draw(logits, SamplingParams(1, temperature=1.0, top_p=0.3), chance) for chance in chances}
    assert (top_k, top_p) == ({1, 2}, {1, 2})


def test_top_k_above_the_vocabulary_and_a_tiny_top_p_are_fine() -> None:
    logits = torch.tensor([0.0, 5.0, 1.0])
    assert draw(logits, SamplingParams(1, temperature=1.0, top_k=99), 0.0) == 0
    assert draw(logits, SamplingParams(1, temperature=1.0, top_p=1e-9), 0.99) == 1


def test_a_nucleus_wider_than_the_first_look_is_sorted_whole() -> None:
    logits = torch.linspace(0, 0.01, 3000)
    params = SamplingParams(1, temperature=1.0, top_p=0.5)
    expected = kept(logits.tolist(), params)
    assert len(expected) > 1024
    assert draw(logits, params, 0.0) == min(expected)
    assert draw(logits, params, 1 - 2**-53) == 2999


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_that_names_the_requests(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 40)
    logits[0, 17] = logits[2, 39] = bad
    requests = [request(number, temperature=temperature) for number in (11, 12, 13)]
    with pytest.raises(BadLogits, match=r"requests \[11, 13\] hold NaN or infinite") as caught:
        Sampler().sample(logits, requests)
    assert caught.value.request_ids == (11, 13)
    assert isinstance(caught.value, AttnplugError)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_marks_a_token_that_cannot_be_chosen(temperature: float) -> None:
    logits = torch.full((2, 40), -float("inf"))
    logits[0, 17] = -3.0
    requests = [request(number, temperature=temperature) for number in (11, 12)]
    assert Sampler().sample(logits[:1], requests[:1]) == {11: 17}
    with pytest.raises(BadLogits) as caught:
        Sampler().sample(logits, requests)
    assert caught.value.request_ids == (12,)


def test_huge_finite_logits_are_no_error() -> None:
    logits = torch.full((1, 40), 3e38)
    logits[0, 5] = 3.1e38
    assert Sampler().sample(logits, [request(0)]) == {0: 5}
    assert Sampler().sample(logits, [request(0, temperature=1.0)]) == {0: 5}


def test_shapes_are_checked() -> None:
    for shape in ((2, 8), (8,), (1, 0)):
        with pytest.raises(UsageError, match="do not fit 1 requests"):
            Sampler().sample(torch.zeros(shape), [request(0)])
    assert Sampler().sample(torch.zeros(0, 8), []) == {}


def test_logprobs_by_the_definition_and_the_same_in_every_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 4
    logits[1, 7:40] = -math.inf
    logits[2, [3, 9, 30]] = 20.0
    asked = [None, 60, 2]  # of 50 tokens
    requests = [request(number + 5, temperature=0.5, logprobs=count) for number, count in enumerate(asked)]
    found = token_logprobs(logits, requests, {5: 1, 6: 4, 7: 9})
    assert found.keys() == {6, 7}
    for row, number in ((1, 6), (2, 7)):
        assert (
            found[number]
            == token_logprobs(logits[row : row + 1], [requests[row]], {number: found[number].token_id})[number]
        )
        values = logits[row].tolist()
        total = math.log(math.fsum(math.exp(value) for value in values))
        assert found[number].logprob == pytest.approx(values[found[number].token_id] - total, rel=1e-12)
        for likely in found[number].top:
            assert likely.logprob == pytest.approx(values[likely.token_id] - total, rel=1e-12)
    # Of tokens that cannot be chosen there is nothing to tell; of equals the first are told.
    assert len(found[6].top) == 17 and found[6].top == tuple(sorted(found[6].top, key=lambda likely: -likely.logprob))
    assert [likely.token_id for likely in found[7].top] == [3, 9]
    alone = token_logprobs(logits[:1], [request(8, logprobs=0)], {8: 1})
    assert alone[8].token_id == 1 and alone[8].top == ()


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs"])
def test_parameters_that_make_no_sense_are_refused_by_name(name: str) -> None:
    """Numbers of hundreds and of thousands of digits too, which Python turns into no float and into no text."""
    for value in (-1, 10**400, 10**5000, float("nan"), "1", True):
        with pytest.raises(UsageError, match=f"^{name}=.* is not allowed; give "):
            SamplingParams(**{"max_tokens": 1, name: value})


def test_a_temperature_may_be_a_huge_whole_number() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert draw(logits, SamplingParams(1, temperature=10**300), 0.99) == 2


@pytest.mark.parametrize("stop", ["x", ["x"], ("x", ""), (3,)])
def test_stop_texts_are_a_tuple_of_texts(stop: object) -> None:
    with pytest.raises(UsageError, match=r"^stop=.* give texts, none of them empty"):
        SamplingParams(1, stop=stop)
