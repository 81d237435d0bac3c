"""The sampler: right distributions, and the same token in every batch. On the CPU by torch, on a GPU by Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnplug import ForwardMode, UsageError
from attnplug_engine.execution.in_flight import StepInFlight
from attnplug_engine.execution.sampler import (
    Logprobs,
    Sampler,
    argmax_finite,
    gumbel,
    request_seed,
    sample,
)
from attnplug_engine.execution.sampling_inputs import SamplingArrays, sampling_metadata
from attnplug_engine.kernels.sampling_metadata import SamplingMetadata
from attnplug_engine.request import Request, SamplingParams, TokenLogprobs
from attnplug_engine.scheduling.step import Step, StepEntry
from attnplug_testing.devices import DEVICES, INTERPRETED, nothing_waits
from attnplug_testing.errors import naming
from attnplug_testing.kernel_variants import recorded_variants
from attnplug_testing.triton_mode import settle_triton

KINDS: list[dict[str, float]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
]


def request(number: int, made: int = 0, seed: int | None = None, **params: Any) -> Request:
    return Request(number, (1,), SamplingParams(99, seed=seed, **params), output=[0] * made)


def by_kernel(logits: Tensor, batch: SamplingMetadata) -> Tensor:
    """Sample as ``sample`` does on a GPU; without one, interpreted."""
    settle_triton()
    from attnplug_engine.kernels.sample import launch_sample

    return launch_sample(logits, batch)


WAYS = [
    pytest.param(sample, "cpu", id="cpu"),
    pytest.param(by_kernel, "cpu", id="interpreted", marks=INTERPRETED),
    pytest.param(sample, "cuda", id="cuda", marks=DEVICES[1].marks),
]
in_every_way = pytest.mark.parametrize(("choose", "device"), WAYS)


def chosen(choose: Any, device: str, logits: Tensor, requests: Sequence[Request]) -> list[int]:
    batch = sampling_metadata(requests, Sampler(5).seed_of, torch.device(device))
    found: list[int] = choose(logits.to(device), batch).tolist()
    return found


def kept(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Reference probabilities in plain Python: sorted, truncated, renormalised."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order, peak = order[: params.top_k or None], max(logits)
    weights = {token: math.exp((logits[token] - peak) / params.temperature) for token in order}
    total, running, left = math.fsum(weights.values()), 0.0, {}
    for token in order:
        if running >= params.top_p * total or weights[token] < params.min_p:
            break
        left[token] = weights[token]
        running += weights[token]
    return {token: weight / running for token, weight in left.items()}


class Drawn:
    """A draw by the definition, in float64: the same hash in Python's whole numbers, and the kept tokens sorted."""

    def __init__(self, logits: Tensor, request: Request, seed: int) -> None:
        def mix(x: Any) -> Any:
            x = (x ^ x >> 16) * 0x7FEB352D % 2**32
            x = (x ^ x >> 15) * 0x846CA68B % 2**32
            return x ^ x >> 16

        low = mix((seed + 0x9E3779B9) % 2**32)
        first = mix((len(request.output) + mix(((seed >> 32) + low) % 2**32)) % 2**32)
        second = mix(((first ^ low) + 0x9E3779B9) % 2**32)
        left = kept(logits.tolist(), request.params)
        tokens = np.array(list(left), np.uint64)
        chances = (mix(mix((tokens + np.uint64(first)) % 2**32) ^ np.uint64(second)) + 0.5) / 2**32
        noise = -np.log(-np.log1p(-chances))
        scores = (logits[list(left)].double().numpy() - float(logits.max())) / request.params.temperature + noise
        self.scores = dict(zip(left, scores.tolist(), strict=True))
        self.token = max(self.scores, key=lambda token: self.scores[token])


@in_every_way
@pytest.mark.sample(1)
def test_draws_by_the_definition(choose: Any, device: str) -> None:
    """Every kind, with vocabularies in one chunk and in several, full of equals and not."""
    unclear, times = 0, 1 if choose is by_kernel else 3
    for vocab, equals in ((1, False), (37, True), (2048 + 5, True), (9001, False)):
        random = torch.Generator().manual_seed(vocab)
        logits = torch.randn(len(KINDS) * times, vocab, generator=random) * 3
        logits = (logits * 2).round() / 2 if equals else logits
        logits[:, 3:6] = -math.inf
        logits[:, 0] = 1.0
        requests = [request(number, 3 * number, **kind) for number, kind in enumerate(KINDS * times)]
        requests[-1] = request(99, 2, 2**63 - 5, **KINDS[-1])
        found = chosen(choose, device, logits, requests)
        for row, one, token in zip(logits, requests, found, strict=True):
            if one.params.greedy:
                assert token == row.tolist().index(row.max())
                continue
            wanted = Drawn(row, one, Sampler(5).seed_of(one))
            assert token in wanted.scores, (vocab, one.params)
            if token != wanted.token:
                unclear += 1
                assert wanted.scores[wanted.token] - wanted.scores[token] < 1e-5, (vocab, one.params)
    assert unclear <= 1


def test_greedy_takes_the_likeliest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, -1.0, 2.0, 5.0]])
    assert Sampler().sample(logits, [request(4), request(2)]).tolist() == [1, 0]


@settings(max_examples=16, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 31, 32, 96, 640, 1031, 1536]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_likeliest_token_by_the_definition(seed: int, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """The block size does not matter: the first of equal maxima wins, and -1 is returned if the maximum is not
    finite."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (rows, vocab), generator=random).to(dtype)  # many equal logits
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
    assert argmax_finite(logits).tolist() == expected
    assert argmax_finite(logits.t().contiguous().t()).tolist() == expected


@pytest.mark.parametrize("params", KINDS[1:])
@pytest.mark.sample(2)
def test_tokens_come_as_often_as_their_probability_says(params: dict[str, float]) -> None:
    """Chi-square of 3,000 draws of one request, and of the first draws of as many."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    expected = kept(logits.tolist(), SamplingParams(1, **params))
    draws = 3_000
    for many in ("places", "seeds"):
        numbers = range(draws)
        requests = [request(0, seed=11 if many == "places" else number, **params) for number in numbers]
        positions = list(numbers) if many == "places" else [0] * draws
        batch = sampling_metadata(requests, Sampler().seed_of, torch.device("cpu"), positions)
        counts = sample(logits.expand(draws, -1), batch).bincount(minlength=12).tolist()
        assert {token for token, count in enumerate(counts) if count} <= expected.keys()
        distance = sum((counts[token] - draws * share) ** 2 / (draws * share) for token, share in expected.items())
        freedom = len(expected) - 1
        assert distance <= freedom + 5 * math.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("kind", ["positions", "seeds", "high seeds"])
def test_noise_is_even_and_neighbours_have_nothing_in_common(kind: str) -> None:
    """Neighbouring tokens, rows of neighbouring positions or seeds, and both: by chi-square of pairs of chances."""
    rows, vocab, cells = 400, 1000, 16
    numbers, none = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    seed = {"positions": none + 7, "seeds": numbers, "high seeds": numbers << 32}[kind]
    noise = gumbel(0, vocab, seed, (numbers if kind == "positions" else none).int())
    assert noise.isfinite().all()
    chance = (-(-noise.double()).exp()).exp()
    cell = (chance * cells).long().clamp(max=cells - 1)
    for row, token in ((0, 1), (1, 0), (1, 1), (0, 256), (256, 0)):
        pairs = cell[: rows - row, : vocab - token] * cells + cell[row:, token:]
        counts, share = pairs.flatten().bincount(minlength=cells**2).double(), pairs.numel() / cells**2
        distance, freedom = float(((counts - share) ** 2 / share).sum()), cells**2 - 1
        assert abs(distance - freedom) <= 5 * math.sqrt(2 * freedom), (row, token)


def test_noise_reaches_as_far_as_the_hash() -> None:
    """No chance is 0 or 1, and the least of millions is not a multiple of a coarse step."""
    noise = gumbel(0, 4_000_000, torch.tensor([3]), torch.tensor([0], dtype=torch.int32))
    assert noise.isfinite().all() and float(noise.min()) > -3 and 13 < float(noise.max()) < 24
    assert noise.topk(1000).values.unique().numel() > 950


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.sampled_from([2, 3, 17, 64]),
    vocab=st.sampled_from([1, 2, 7, 64, 1031, 2048]),
    data=st.data(),
)
@pytest.mark.long
def test_a_token_is_the_same_in_every_batch(seed: int, rows: int, vocab: int, data: st.DataObject) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=rows, max_size=rows))
    requests = [request(number, number % 50, number % 9 or None, **kind) for number, kind in enumerate(kinds)]
    together = Sampler(5).sample(logits, requests).tolist()
    for number in range(min(rows, 9)):
        alone = Sampler(5).sample(logits[number : number + 1].clone(), [requests[number]])
        assert alone.tolist() == [together[number]]
    order = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
    mixed = Sampler(5).sample(logits[order], [requests[number] for number in order]).tolist()
    assert mixed == [together[number] for number in order]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("vocab", [1031, 32_000, 151_936])
def test_a_token_is_the_same_in_every_batch_on_a_gpu(vocab: int) -> None:
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    requests = [request(number, number % 5, **KINDS[number % len(KINDS)]) for number in range(64)]
    together = chosen(sample, "cuda", logits, requests)
    for rows in (1, 3, 17):
        for start in range(0, 64, rows):
            part = slice(start, start + rows)
            assert chosen(sample, "cuda", logits[part].clone(), requests[part]) == together[part]
    assert chosen(sample, "cuda", logits.flip(0), requests[::-1]) == together[::-1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_a_captured_sampler_follows_its_parameters() -> None:
    rows, vocab = 16, 40_000
    logits = torch.randn(rows, vocab, device="cuda") * 3
    memory = torch.zeros(SamplingArrays.ROW_BYTES * rows, dtype=torch.uint8, device="cuda")
    batch, graph = SamplingMetadata.over(memory, rows), torch.cuda.CUDAGraph()
    sample(logits, batch)
    with nothing_waits("cuda"):
        sample(logits, batch)
    with torch.cuda.graph(graph):
        tokens = sample(logits, batch)
    for turn in range(len(KINDS)):
        requests = [request(number, turn, **KINDS[(number + turn) % len(KINDS)]) for number in range(rows - turn)]
        staging = np.zeros(SamplingArrays.ROW_BYTES * rows, np.uint8)
        SamplingArrays.over(staging, rows).fill(requests, Sampler(5).seed_of, [turn] * len(requests))
        memory.copy_(torch.from_numpy(staging))
        logits.normal_().mul_(3)
        graph.replay()
        assert tokens.tolist()[: len(requests)] == chosen(sample, "cuda", logits[: len(requests)], requests)
        assert tokens[len(requests) :].tolist() == logits[len(requests) :].argmax(-1).tolist()


def test_a_seed_fixes_the_tokens_and_their_places_differ() -> None:
    logits = torch.zeros(1, 1000)

    def run(seed: int | None, number: int = 0, engine_seed: int = 0) -> list[int]:
        sampler = Sampler(engine_seed)
        return [int(sampler.sample(logits, [request(number, made, seed, temperature=1.0)])) for made in range(20)]

    assert run(3) == run(3, number=8) == run(3, engine_seed=1)
    assert run(3) != run(4)
    assert len(set(run(3))) > 15
    assert run(None) == run(None)
    assert run(None) != run(None, number=1)
    assert run(None) != run(None, engine_seed=1)
    assert request_seed(0, 1) != request_seed(1, 0)


def tokens_of(logits: Tensor, places: int = 200, **params: Any) -> set[int]:
    """Everything that is drawn at many places."""
    requests = [request(0, made, 1, **params) for made in range(places)]
    return set(Sampler().sample(logits.expand(places, -1), requests).tolist())


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = torch.full((50,), -1e4)
    logits[[7, 30]] = 2.0
    assert tokens_of(logits, temperature=1.0) == {7, 30}


def test_the_extremes_of_temperature_are_greedy_and_even() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    for lowest in (5e-324, 1e-40, 1e-30, 1e-6):
        assert tokens_of(logits, temperature=lowest) == {1}
    assert tokens_of(logits, temperature=10**300) == {0, 1, 2}


@in_every_way
def test_among_equals_top_k_and_top_p_keep_the_first(choose: Any, device: str) -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])
    for limit in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 4, "top_p": 0.5}):
        requests = [request(0, made, 1, temperature=1.0, **limit) for made in range(6)]
        assert set(chosen(choose, device, logits.expand(6, -1).contiguous(), requests)) == {1, 2}


def test_top_k_above_the_vocabulary_and_a_tiny_top_p_are_fine() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0])
    assert tokens_of(logits, temperature=3.0, top_k=2**63 - 1) == {0, 1, 2}
    assert tokens_of(logits, temperature=3.0, top_p=5e-324) == {1}


def test_min_p_of_one_keeps_the_equals_of_the_likeliest() -> None:
    assert tokens_of(torch.tensor([2.0, 1.0, 2.0, 1.9999]), temperature=1.0, min_p=1) == {0, 2}


def test_a_nucleus_wider_than_the_first_look_is_sorted_whole() -> None:
    logits = torch.linspace(0, 0.01, 3000)
    params = SamplingParams(1, temperature=1.0, top_p=0.5)
    expected = kept(logits.tolist(), params)
    assert len(expected) > 1024
    found = tokens_of(logits, temperature=1.0, top_p=0.5)
    assert found <= expected.keys() and min(found) < min(expected) + 100


@in_every_way
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.sample(2)
def test_rows_that_are_not_finite_have_no_token_and_the_others_theirs(
    temperature: float, choose: Any, device: str
) -> None:
    logits = torch.zeros(5, 3000)
    logits[:, 21] = 30.0
    good = logits.clone()
    logits[0, 17] = math.nan
    logits[2, 2999] = math.inf
    logits[3] = -math.inf
    requests = [request(number, temperature=temperature, top_p=0.9) for number in range(5)]
    wanted = chosen(choose, device, good, requests)
    assert chosen(choose, device, logits, requests) == [-1, wanted[1], -1, -1, wanted[4]]


@in_every_way
@pytest.mark.parametrize("kind", KINDS)
def test_minus_infinity_marks_a_token_that_cannot_be_chosen(kind: dict[str, float], choose: Any, device: str) -> None:
    logits = torch.full((1, 40), -math.inf)
    logits[0, 17] = -3.0
    assert chosen(choose, device, logits, [request(11, **kind)]) == [17]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # by the interpreter: numpy warns, a GPU does not
@in_every_way
def test_huge_finite_logits_are_no_error(choose: Any, device: str) -> None:
    logits = torch.full((3, 40), 3e38)
    logits[:, 5], logits[:, 6] = 3.1e38, -3e38
    requests = [request(0), request(1, temperature=0.3), request(2, temperature=0.3, top_k=9, top_p=0.5)]
    assert chosen(choose, device, logits, requests) == [5, 5, 5]


def test_shapes_are_checked() -> None:
    for shape in ((2, 8), (8,), (1, 0)):
        with pytest.raises(UsageError, check=naming(list(shape), 1)):
            Sampler().sample(torch.zeros(shape), [request(0)])
    for vocab in (8, 64):
        assert Sampler().sample(torch.zeros(0, vocab), []).tolist() == []


def test_rows_of_a_buffer_beyond_the_requests_are_greedy() -> None:
    """Sampling parameters of padding are valid, even if the buffer held other values before."""
    memory = np.full(SamplingArrays.ROW_BYTES * 4, 255, np.uint8)
    requests = [request(0, 9, 2**63 - 1, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125), request(1)]
    SamplingArrays.over(memory, 4).fill(requests, lambda one: 2**64 - 1 - one.id, [7, 8])
    batch = SamplingMetadata.over(torch.from_numpy(memory), 4)
    assert batch.temperature.tolist() == [0.5, 0, 0, 0]
    first = {field.name: getattr(batch, field.name)[0].item() for field in fields(batch)}
    assert first == {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": -1, "position": 7}
    assert (batch.seed[1], batch.position[1]) == (-2, 8)
    assert sample(torch.zeros(4, 9).fill_diagonal_(1), batch).tolist()[1:] == [1, 2, 3]


def test_no_noise_is_infinite() -> None:
    """One hash in 33 million is 1 in float32: without a bound, the only allowed token could not be chosen."""
    noise = gumbel(614_579, 614_580, torch.tensor([0]), torch.tensor([16], dtype=torch.int32))
    assert noise.isfinite().all() and noise < -2.8


def test_parameters_that_float32_does_not_have_become_some_that_it_has() -> None:
    """A GPU takes numbers below the smallest normal one for 0."""
    asked = [request(0, temperature=1e-40), request(1, temperature=1e300), request(2, temperature=1.0, top_p=1e-40)]
    batch = sampling_metadata(asked, Sampler().seed_of, torch.device("cpu"))
    assert batch.temperature[0] == 0 and batch.temperature.isfinite().all()
    assert batch.top_p.min() >= torch.finfo(torch.float32).tiny


def token_logprobs(logits: Tensor, requests: list[Request], tokens: Tensor) -> dict[int, TokenLogprobs]:
    """Log probabilities by request id, as a step that chose these tokens reports them."""
    entries = tuple(StepEntry(one, 0, (1,), True) for one in requests)
    launched = StepInFlight(Step(ForwardMode.DECODE, entries, (), ()), logits, tokens, replayed=False)
    assert launched.tokens() == tokens.tolist()
    return launched.logprobs()


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_by_the_definition(device: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 4
    logits[1, 7:40] = -math.inf
    logits[2, [3, 9, 30]] = 20.0
    asked = [None, 60, 2]  # of 50 tokens
    requests = [request(number + 5, temperature=0.5, logprobs=count) for number, count in enumerate(asked)]
    found = token_logprobs(logits.to(device), requests, torch.tensor([1, 4, 9], device=device))
    assert found.keys() == {6, 7}
    for row, number in ((1, 6), (2, 7)):
        values = logits[row].tolist()
        total = math.log(math.fsum(math.exp(value) for value in values))
        assert found[number].logprob == pytest.approx(values[found[number].token_id] - total, rel=1e-6, abs=1e-5)
        for likely in found[number].top:
            assert likely.logprob == pytest.approx(values[likely.token_id] - total, rel=1e-6, abs=1e-5)
    # Tokens that cannot be chosen have no log probability. Among equals the first ones are reported.
    assert len(found[6].top) == 17 and found[6].top == tuple(sorted(found[6].top, key=lambda likely: -likely.logprob))
    assert [likely.token_id for likely in found[7].top] == [3, 9]


def test_logprobs_of_equals_and_of_zeros_of_both_signs_come_by_id() -> None:
    logits = torch.tensor([[-0.0, -1.0, 0.0, -0.0, 2.0, 0.0]] * 2)
    found = token_logprobs(logits, [request(7, logprobs=1), request(8, logprobs=5)], torch.tensor([1, 1]))
    assert [likely.token_id for likely in found[8].top] == [4, 0, 2, 3, 5]
    assert [likely.token_id for likely in found[7].top] == [4]


def test_logprobs_of_a_large_vocabulary_are_right_to_1e_5() -> None:
    logits = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(5)) * 5
    wanted = torch.log_softmax(logits.double(), -1)
    found = Logprobs.of(logits, torch.tensor([17, 99_999]), [0, 1], 3)
    top = wanted.topk(3)
    assert found.top.tolist() == top.indices.tolist()
    torch.testing.assert_close(found.top_logprobs.double(), top.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.chosen.double(), wanted[[0, 1], [17, 99_999]], rtol=0, atol=1e-5)


def test_a_request_that_asks_for_no_others_gets_the_token_alone_and_without_a_token_nothing() -> None:
    requests = [request(8, logprobs=0), request(9, logprobs=3)]
    found = token_logprobs(torch.zeros(2, 4), requests, torch.tensor([1, -1]))
    assert found.keys() == {8} and found[8].token_id == 1 and found[8].top == ()


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs"])
def test_invalid_parameters_are_refused_by_name(name: str) -> None:
    """Numbers of hundreds and of thousands of digits too, which Python turns into no float and into no text."""
    for value in (-1, 10**400, 10**5000, float("nan"), "1", True):
        with pytest.raises(UsageError, match=f"^{name} .* is not allowed; give "):
            SamplingParams(**{"max_tokens": 1, name: value})


@pytest.mark.parametrize(
    ("stop", "allowed"), [("x", "a tuple"), (["x"], "a tuple"), (("x", ""), "not empty"), ((3,), "not empty")]
)
def test_stop_texts_are_a_tuple_of_texts(stop: object, allowed: str) -> None:
    with pytest.raises(UsageError, check=naming("stop", allowed)):
        SamplingParams(1, stop=stop)


@INTERPRETED
def test_the_number_of_rows_compiles_no_other_kernel():
    """E1: the arrays of a packed batch have other alignments for every number of rows."""
    from attnplug_engine.kernels.sample import launch_sample

    with recorded_variants() as variants:
        for rows in range(1, 6):
            requests = [Request(number, (1,), SamplingParams(1, temperature=0.5, seed=7)) for number in range(rows)]
            batch = sampling_metadata(requests, lambda request: 7, torch.device("cpu"))
            launch_sample(torch.randn(rows, 100), batch)
    assert {name: len(found) for name, found in variants.items()} == {"_look": 1, "_choose": 1}
