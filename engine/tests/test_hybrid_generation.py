"""Models with linear layers: the same tokens as transformers, however states are kept, found again and lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug import DType, ExtendPath
from attnplug.host import TINY_CONFIGS, ExtendPolicy
from attnplug_engine.engine import Engine
from attnplug_engine.request import SamplingParams

pytestmark = pytest.mark.long

MODELS = ["kimi_linear", "qwen3_next", "qwen3_5_text", "minimax", "mamba2", "nemotron_h"]
STATES = ["kimi_linear", "minimax"]
"""Models with and without a convolution's state beside the recurrent one."""
NEW_TOKENS = 8


def prompts() -> list[list[int]]:
    """Different lengths; the second and third begin alike."""
    random = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in (1, 40, 53, 17)]
    drawn[2][:35] = drawn[1][:35]
    return drawn


class Oracle:
    """A checkpoint made by transformers, and its logits from whole forwards without any cache."""

    def __init__(self, folder: str, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        settings = {key: value for key, value in TINY_CONFIGS[name].items() if key != "model_type"}
        torch.manual_seed(11)
        config = AutoConfig.for_model(name, **settings)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        self.model.save_pretrained(folder, safe_serialization=True)
        self.folder, self._seen = folder, set[tuple[tuple[int, ...], tuple[int, ...]]]()

    @torch.inference_mode()
    def check(self, prompt: list[int], output: list[int]) -> None:
        """The output is the greedy one: every token has the highest logit after the prompt and those before it."""
        assert len(output) == NEW_TOKENS
        if (key := (tuple(prompt), tuple(output))) not in self._seen:
            logits = self.model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
            assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
            self._seen.add(key)


@pytest.fixture(scope="module", params=MODELS)
def oracle(request, tmp_path_factory):
    return Oracle(str(tmp_path_factory.mktemp(request.param)), request.param)


def engine(oracle: Oracle, **settings: Any) -> Engine:
    return Engine(
        oracle.folder,
        **{"device": "cpu", "max_batch": 4, "page_size": 4, "context_length": 128, "ignore_eos": True, **settings},
    )


def check(engine: Engine, oracle: Oracle, given: list[list[int]] | None = None) -> None:
    given = prompts() if given is None else given
    done = engine.generate(given, SamplingParams(max_tokens=NEW_TOKENS))
    for prompt, one in zip(given, done, strict=True):
        oracle.check(prompt, one.token_ids)


def test_same_tokens_as_transformers(oracle):
    """A7: in chunks of 7; hits of the prefix cache are on whole prompts."""
    check(engine(oracle, chunked_prefill_size=7, page_size=16), oracle)


@pytest.mark.parametrize("oracle", ["kimi_linear"], indirect=True)
def test_same_tokens_token_by_token_without_a_prefix_cache(oracle):
    """A7"""
    check(engine(oracle, chunked_prefill_size=1, prefix_cache=False), oracle)


@pytest.mark.parametrize("oracle", ["kimi_linear"], indirect=True)
def test_forced_chunks_give_the_same_tokens_behind_the_hybrid_wrapper(oracle):
    """A7, A8, C1: prefixes of 17 and 34 rows are up-projected 8 rows at a time and merged by the log-sum-exp of the
    full backend. Prompts run one at a time, since an extend beside a decode runs absorbed."""
    policy = ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=8)
    running = engine(oracle, chunked_prefill_size=17, prefix_cache=False, extend_policy=policy)
    for prompt in prompts()[1:3]:
        check(running, oracle, [prompt])


@pytest.mark.parametrize("oracle", [*STATES, "mamba2"], indirect=True)
def test_hits_at_and_between_checkpoints_are_exact(oracle):
    """A7: a prefix hit ends at the last state snapshot, and only the tokens behind it are computed again."""
    running = engine(oracle, state_checkpoint=16)
    first, second = prompts()[1:3]
    check(running, oracle, [first])
    for prompt, found in ((first, 36), (second, 32), (first[:34], 32), (first[:31], 16), ([*first[:20], 5], 16)):
        before = running.cache_statistics.hit_tokens
        check(running, oracle, [prompt])
        assert running.cache_statistics.hit_tokens - before == found


@pytest.mark.parametrize("oracle", ["kimi_linear"], indirect=True)
def test_the_type_of_the_kv_cache_does_not_touch_the_states(oracle):
    """A convolution state has the model's own dtype."""
    running = engine(oracle, kv_dtype=DType.BFLOAT16)
    assert running.runner.pools.linear.dtype is DType.FLOAT32


@pytest.mark.parametrize("oracle", STATES, indirect=True)
def test_preempted_requests_get_the_same_tokens(oracle):
    """A7: a state that was lost is computed again, from the nearest snapshot."""
    running = engine(oracle, num_pages=18, state_checkpoint=8)
    check(running, oracle, prompts()[1:])
    assert running.scheduler.preemptions > 0


@pytest.mark.parametrize("oracle", STATES, indirect=True)
def test_slots_that_run_short_cost_snapshots_and_no_tokens(oracle):
    running = engine(oracle, state_slots=5, state_checkpoint=8)
    check(running, oracle)
    check(running, oracle)
    running.cache.clear()
    states = running.runner.states
    assert states.free_slots == states.num_slots
