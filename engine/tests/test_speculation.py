"""Engines that speculate give the same tokens as engines that do not, for any proposals.

Real CUDA graphs are tested on a GPU, in ``tests/test_engine_speculation.py``.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from math import exp
from random import Random
from typing import Any

import pytest
import torch
from speculating import (
    DEEPSEEK,
    HYBRID,
    LLAMA,
    MTP,
    NGRAM,
    PROMPTS,
    engine,
    params,
    plain,
    rounds,
    shaped,
    standalone,
    tokens,
)
from thread_ranks import in_ranks

from attnplug import ForwardMode, Problem, RefusalCode, Role, UsageError
from attnplug.auto.ranking import BY_PREFERENCE
from attnplug.host import BackendRequest, SelectionError, load_model, load_registry, select
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.settings.speculation import Algorithm, Speculation
from attnplug_engine.speculation.backend_choice import choose_draft, target_problem
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import refusing


@pytest.mark.parametrize(
    ("model", "settings", "overlap"),
    [
        (LLAMA, NGRAM | shaped(3), True),
        (LLAMA, NGRAM | shaped(4, 2), False),
        (LLAMA, standalone("tiny:qwen3") | shaped(4), False),
        (LLAMA, standalone(LLAMA) | shaped(3, 4, 9), True),
        (LLAMA, {"speculative_algorithm": "eagle", "speculative_draft_model": LLAMA} | shaped(3), False),
        (LLAMA, {"speculative_algorithm": "eagle3", "speculative_draft_model": LLAMA} | shaped(2, 2), True),
        (DEEPSEEK, NGRAM | shaped(2), False),
        (DEEPSEEK, MTP | shaped(3), True),
        (DEEPSEEK, MTP | shaped(3, 2, 5), False),
        (DEEPSEEK, standalone(LLAMA) | shaped(2), True),
        (HYBRID, NGRAM | shaped(3), True),
        (HYBRID, MTP | shaped(2), False),
    ],
)
@pytest.mark.sample(4)
def test_tokens_are_those_without_speculation(model, settings, overlap):
    """Greedy and drawn ones, in one batch that shrinks from 7 requests to 1."""
    one = engine(model, overlap=overlap, **settings)
    assert tokens(one) == plain(model)
    assert one.runner.allocator.free_pages + len(one.cache) == one.runner.allocator.num_pages


class TestAcceptance:
    @pytest.mark.parametrize(("model", "steps"), [(LLAMA, 1), (LLAMA, 4), (DEEPSEEK, 2)])
    def test_a_draft_with_the_targets_own_weights_is_accepted_always(self, model, steps):
        one = engine(model, **standalone(model), **shaped(steps))
        assert tokens(one) == plain(model)
        assert rounds(one).acceptance == 1 and rounds(one).tokens_per_round == steps + 1

    @pytest.mark.parametrize(("topk", "nodes"), [(4, 13)])
    def test_a_tree_of_such_a_draft_is_accepted_always(self, topk, nodes):
        """It contains the chain that the draft would propose without branches, greedy or sampled."""
        each = [SamplingParams(20, temperature=0.8 * (number % 2), seed=3) for number in range(len(PROMPTS))]
        one = engine(**standalone(LLAMA), **shaped(4, topk, nodes))
        mine, theirs = ([done.token_ids for done in some.generate(PROMPTS, each)] for some in (one, engine()))
        assert mine == theirs and rounds(one).acceptance == 1

    def test_a_random_draft_is_accepted_almost_never(self):
        one = engine(**standalone("tiny:qwen3"))
        assert tokens(one) == plain(LLAMA)
        assert rounds(one).acceptance < 0.1

    def test_n_grams_are_found_in_repeated_text(self):
        """A model without layers depends on the last token alone, so it soon repeats itself."""
        one, other = engine(**NGRAM, **shaped(3)), engine()
        for each in (one, other):
            for weight in each.runner.model.layers.parameters():
                weight.zero_()
        mine, theirs = (each.generate(PROMPTS, SamplingParams(60)) for each in (one, other))
        assert [found.token_ids for found in mine] == [found.token_ids for found in theirs]
        assert rounds(one).acceptance > 0.5

    def test_one_request_at_a_time(self):
        one = engine(**standalone(LLAMA), max_batch=1)
        assert tokens(one) == plain(LLAMA) and rounds(one).acceptance == 1


class TestProposals:
    """Proposals after rounds equal those after one prefill of the same tokens."""

    @pytest.mark.parametrize(
        ("model", "settings"),
        [
            (DEEPSEEK, MTP | shaped(3)),
            (DEEPSEEK, MTP | shaped(3, 2, 6)),
            (LLAMA, standalone("tiny:qwen3") | shaped(3)),
            (LLAMA, standalone(LLAMA) | shaped(3, 2, 6)),
            (LLAMA, {"speculative_algorithm": "eagle", "speculative_draft_model": LLAMA} | shaped(3)),
            (LLAMA, {"speculative_algorithm": "eagle3", "speculative_draft_model": LLAMA} | shaped(2)),
            (LLAMA, NGRAM | shaped(3, 2)),
        ],
    )
    @pytest.mark.sample(2)
    def test_rounds_and_prefills_propose_alike(self, model, settings):
        one = engine(model, chunked_prefill_size=5, prefix_cache=False, overlap=False, **settings)
        other = engine(model, prefix_cache=False, overlap=False, **settings)
        request = one.add([1, 2, 3, 4] * 3, SamplingParams(16))
        checked = 0
        while one.step() is not None and request.finish_reason is None:
            if len(request.output) < 2:
                continue
            again = other.add([*request.prompt, *request.output[:-1]], SamplingParams(16))
            other.step()
            assert again.output == request.output[-1:]
            for mine, theirs in zip(proposed(one, request), proposed(other, again), strict=True):
                assert mine == theirs
            other.abort(again)
            checked += 1
        assert checked >= 3

    def test_a_draft_is_fed_the_tokens_after_those_of_the_target_and_its_hidden_states(self, monkeypatch):
        """Row p of the draft's cache: token p + 1, and the target's hidden state at p; in chunks and in rounds."""
        one = engine(DEEPSEEK, chunked_prefill_size=5, overlap=False, **MTP, **shaped(3, 2, 5))
        rows: dict[int, tuple[int, torch.Tensor]] = {}
        model = one.rounds.draft.model
        forward = model.forward

        def fed(input_ids, positions, hidden, batch, step=0):
            if batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
                rows.update(zip(positions.tolist(), zip(input_ids.tolist(), hidden, strict=True), strict=True))
            return forward(input_ids, positions, hidden, batch, step)

        monkeypatch.setattr(model, "forward", fed)
        request = one.add([1, 2, 3, 4] * 3, SamplingParams(12))
        while one.step() is not None:
            pass
        whole = [*request.prompt, *request.output]
        plain_engine = engine(DEEPSEEK)
        again = plain_engine.add(whole, SamplingParams(1))
        hidden = plain_engine.runner.hidden_states(plain_engine.scheduler.next_step())
        assert again.prompt == tuple(whole)
        for position in range(len(whole) - 1):
            token, state = rows[position]
            assert token == whole[position + 1]
            torch.testing.assert_close(state, hidden[position], atol=1e-4, rtol=1e-4)


def proposed(one: Engine, request: Any) -> list[Any]:
    proposal = one.rounds.state.proposed
    return [tensor[request.row].tolist() for tensor in (proposal.tokens, proposal.parents) if tensor is not None]


class TestServing:
    @pytest.mark.parametrize(
        ("model", "settings", "overlap"),
        [
            (LLAMA, NGRAM | shaped(3), True),
            (LLAMA, standalone(LLAMA) | shaped(2), False),
            (DEEPSEEK, MTP | shaped(3, 2), True),
            (HYBRID, MTP | shaped(2), True),
        ],
    )
    @pytest.mark.sample(1)
    def test_requests_come_end_and_lose_their_pages(self, model, settings, overlap):
        """Includes chunks, a prefix cache, too few pages, aborts, and steps that fail."""
        random = Random(7)
        stem = [random.randrange(128) for _ in range(12)]
        prompts = [
            stem[: random.randrange(12)] + [random.randrange(128) for _ in range(random.randint(1, 9))]
            for _ in range(10)
        ]
        each = [
            SamplingParams(random.randint(4, 20), temperature=0.8 * (n % 2), stop_token_ids=frozenset(range(6)))
            for n in range(10)
        ]
        expected = [one.token_ids for one in engine(model).generate(prompts, each)]
        small = engine(
            model, overlap=overlap, num_pages=22, chunked_prefill_size=6, max_batch=4, state_checkpoint=8, **settings
        )
        launch = small.rounds.launch
        requests, aborted = [small.add(prompt, one) for prompt, one in zip(prompts, each, strict=True)], set()
        count = 0
        while small.scheduler.has_work:
            count += 1
            assert count < 500
            small.rounds.launch = launch if count % 9 else lambda step: 1 / 0
            with suppress(ZeroDivisionError):
                small.step()
            if count == 6:
                victim = small.scheduler.running[0]
                small.abort(victim)
                aborted.add(victim.id)
        for request, wanted in zip(requests, expected, strict=True):
            assert request.output == (wanted[: len(request.output)] if request.id in aborted else wanted)
        assert small.scheduler.preemptions
        small.cache.clear()
        assert small.runner.allocator.free_pages == small.runner.allocator.num_pages

    def test_a_hit_in_the_prefix_cache_leaves_out_the_page_before_it_for_hidden_states(self):
        for settings, cached in ((MTP, 8), (standalone(LLAMA), 12), (NGRAM, 12)):
            one = engine(DEEPSEEK, **settings)
            prompt = list(range(13))
            outputs = [one.generate([prompt], SamplingParams(4))[0] for _ in range(2)]
            assert outputs[0].token_ids == outputs[1].token_ids
            assert [output.usage.cached_tokens for output in outputs] == [0, cached]

    def test_log_probabilities_are_those_without_speculation(self):
        for settings in (standalone(LLAMA) | shaped(3), standalone(LLAMA) | shaped(2, 3), NGRAM):
            asked = SamplingParams(9, logprobs=2)
            mine, theirs = (one.generate(PROMPTS[:3], asked) for one in (engine(**settings), engine()))
            for found, expected in zip(mine, theirs, strict=True):
                assert [one.token_id for one in found.logprobs] == found.token_ids == expected.token_ids
                for one, other in zip(found.logprobs, expected.logprobs, strict=True):
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                    assert [likely.token_id for likely in one.top] == [likely.token_id for likely in other.top]

    @pytest.mark.parametrize("place", [1, 2, 5])
    def test_a_request_ends_at_a_stop_token_inside_a_round(self, place):
        stop = plain(LLAMA)[0][place]
        asked = SamplingParams(20, stop_token_ids=frozenset({stop}))
        mine, theirs = (one.generate(PROMPTS[:1], asked)[0] for one in (engine(**standalone(LLAMA)), engine()))
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, "stop")

    def test_a_request_ends_at_a_stop_text_inside_a_round(self):
        """Its log probabilities end there too; later tokens of the round are dropped."""
        other = engine()
        text = other.tokenizer.decode(other.generate(PROMPTS[:1], SamplingParams(8))[0].token_ids[2:4])
        asked = SamplingParams(20, stop=(text,), logprobs=0)
        one = engine(**standalone(LLAMA), **shaped(4))
        mine, theirs = (each.generate(PROMPTS[:1], asked)[0] for each in (one, other))
        assert (mine.token_ids, mine.text, mine.finish_reason) == (theirs.token_ids, theirs.text, "stop")
        assert len(mine.logprobs) == len(mine.token_ids) == 4

    def test_a_request_whose_logits_are_not_finite_ends_alone(self):
        """A token that spoils its row spoils those before it in its round, too, if it is proposed."""
        for settings in (standalone(LLAMA) | shaped(3), standalone(LLAMA) | shaped(3, 2), NGRAM):
            one, other = engine(overlap=True, **settings), engine()
            bad = other.generate(PROMPTS[1:2], SamplingParams(8))[0].token_ids[3]
            for each in (one, other):
                each.runner.model.embedding[bad] = float("nan")
            mine, theirs = (each.generate(PROMPTS[:3], SamplingParams(8)) for each in (one, other))
            for number in (0, 2):
                assert mine[number].token_ids == theirs[number].token_ids
            assert mine[1].token_ids == theirs[1].token_ids[: len(mine[1].token_ids)]
            assert settings is not NGRAM or mine[1].token_ids == theirs[1].token_ids
            assert [found.finish_reason for found in mine] == ["length", "error", "length"]

    def test_tokens_come_one_by_one_to_who_follows(self):
        one = engine(**standalone(LLAMA))
        updates = list(one.stream(PROMPTS[:2], SamplingParams(7)))
        for index in range(2):
            got = [update.token for update in updates if update.index == index]
            assert got[:-1] == engine().generate(PROMPTS[:2], SamplingParams(7))[index].token_ids and got[-1] is None

    @pytest.mark.parametrize("settings", [NGRAM, standalone(DEEPSEEK), MTP | shaped(2, 2)], ids=str)
    @pytest.mark.sample(1)
    def test_ranks_take_the_same_tokens(self, settings):
        def run(parallel):
            one = Engine(DEEPSEEK, device="cpu", page_size=4, ignore_eos=True, parallel=parallel, **settings)
            return [completion.token_ids for completion in one.generate(PROMPTS[:4], params(10)[:4])]

        found = in_ranks(2, run)
        one = engine(DEEPSEEK).generate(PROMPTS[:4], params(10)[:4])
        assert found[0] == found[1] == [completion.token_ids for completion in one]


class TestDistribution:
    @pytest.mark.parametrize("draft", [LLAMA, pytest.param("tiny:qwen3", marks=pytest.mark.long)])
    def test_drawn_tokens_have_the_targets_distribution(self, draft):
        """Chi-squared test of the pairs of tokens that follow a prompt, among the four most likely tokens each."""
        prompt, kept, drawn = [1, 2, 3], 4, 500
        one = engine(max_batch=50, **standalone(draft), **shaped(2))
        pairs = Counter(
            tuple(completion.token_ids)
            for completion in one.generate(
                [prompt] * drawn,
                [SamplingParams(2, temperature=1.0, top_k=kept, seed=seed) for seed in range(drawn)],
            )
        )
        expected = {}
        for first, chance in likeliest(prompt, kept).items():
            for second, other in likeliest([*prompt, first], kept).items():
                expected[first, second] = chance * other * drawn
        assert pairs.keys() <= expected.keys()
        found = sum((pairs[pair] - count) ** 2 / count for pair, count in expected.items())
        assert found < 37.7, "15 degrees of freedom exceed this once in a thousand times"
        assert rounds(one).rounds == drawn


def likeliest(prompt: list[int], kept: int) -> dict[int, float]:
    """Probabilities of the likeliest next tokens, normalised to a sum of 1."""
    (completion,) = engine().generate([prompt], SamplingParams(1, logprobs=kept))
    chances = {one.token_id: exp(one.logprob) for one in completion.logprobs[0].top}
    return {token: chance / sum(chances.values()) for token, chance in chances.items()}


class TestRefusals:
    @pytest.mark.parametrize(
        ("speculation", "code"),
        [
            (Speculation(Algorithm.NGRAM, None, 15), RefusalCode.SPECULATION),
            (Speculation(Algorithm.NGRAM, None, 2, 2), RefusalCode.SPECULATION),
        ],
    )
    def test_more_than_a_backend_verifies(self, speculation, code):
        problem = target_problem(Problem(load_model(DEEPSEEK), "cuda", 90), speculation)
        with pytest.raises(SelectionError, check=refusing("flashmla", code)):
            select(load_registry(), BackendRequest(roles={Role.DECODE: "flashmla"}), problem)

    def test_a_backend_for_mla_alone_under_another_draft(self):
        """sglang 20298: a refusal, by value and setting, and no crash."""
        problem = Problem(load_model(DEEPSEEK), "cuda", 90, speculative_tokens=4, drafts_by_host=True)
        speculation = Speculation(Algorithm.STANDALONE, LLAMA, 3)
        draft = load_model(LLAMA)
        with pytest.raises(SelectionError, check=refusing("triton_mla", RefusalCode.KIND)) as caught:
            choose_draft(load_registry(), BackendRequest("triton_mla"), problem, speculation, draft, BY_PREFERENCE)
        assert [choice.role for choice in caught.value.selection.unserved] == [Role.DRAFT]

    @pytest.mark.parametrize(
        ("model", "settings", "fragment"),
        [
            (HYBRID, NGRAM | {"speculative_topk": 2}, "tiny:qwen3_next has linear-attention layers, whose states"),
            (LLAMA, standalone(HYBRID), "the draft tiny:qwen3_next has linear-attention layers, whose states"),
            (LLAMA, MTP, "is of model type 'llama', whose layers for multi-token prediction cannot be read"),
            (
                LLAMA,
                NGRAM | {"role_backends": {Role.DRAFT: "torch_native"}},
                "torch_native is given, but `spec",
            ),
            (LLAMA, {"role_backends": {Role.DRAFT: "torch_native"}}, "torch_native is given, but speculation is off"),
        ],
    )
    def test_settings_that_cannot_speculate_are_refused(self, model, settings, fragment):
        with pytest.raises(UsageError) as caught:
            engine(model, **settings)
        assert fragment in caught.value.message

    def test_options_of_the_drafts_backend_are_the_drafts(self):
        one = engine(**standalone(LLAMA), role_backends={Role.DRAFT: "torch_native"}, attention_backend="torch_native")
        assert one.draft_selection.chosen(Role.DRAFT).spec.name == "torch_native"


def test_run_prints_the_acceptance_rate(attnplug: Attnplug, tmp_path):
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt_token_ids": [1, 2, 3]}\n')
    outcome = attnplug(
        *("run", "--model", LLAMA, "--prompts", str(lines), "--max-tokens", "12", "--device", "cpu", "--json"),
        *("--ignore-eos", "--speculative-algorithm", "standalone", "--speculative-draft-model", LLAMA),
    )
    assert outcome.code == 0, outcome.err
    assert "draft: torch_native" in outcome.err
    assert "speculation: 4.00 tokens a round, 100% of proposed tokens accepted" in outcome.err
    assert "a round: verify" in outcome.err
