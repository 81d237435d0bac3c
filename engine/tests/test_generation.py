"""The same tokens as transformers, however the work is divided into steps, pages, paths and ranks."""

from __future__ import annotations

import pytest
import torch

from attnplug import ExtendPath, ForwardMode
from attnplug.host import TINY_CONFIGS, ExtendPolicy
from attnplug.mla.attention import MLAAttention
from attnplug_engine import Engine, EngineOptions
from attnplug_engine.request import SamplingParams
from attnplug_testing.configs import TINY_YARN
from attnplug_testing.rounded_oracle import watched_logits

NEW_TOKENS = 16
"""Enough to go past a page of 64 tokens, past the context that YaRN begins with, and out of a tiny pool."""
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_yarn": ("deepseek_v3", TINY_YARN),
    "deepseek_v32": ("deepseek_v32", {}),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
}
KINDS = ("llama", "deepseek_v3", "glm_moe_dsa")
"""One model for each kind of attention."""


def prompts() -> list[list[int]]:
    """Different lengths; the second and third begin alike, so that one can find the other's pages."""
    random = torch.Generator().manual_seed(5)
    lengths = (1, 40, 53, 17)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in lengths]
    drawn[2][:35] = drawn[1][:35]
    return drawn


class Oracle:
    """A checkpoint made by transformers, and transformers' own results for it by whole forwards."""

    def __init__(self, folder, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type, changes = MODELS[name]
        settings = {key: value for key, value in TINY_CONFIGS[model_type].items() if key != "model_type"} | changes
        torch.manual_seed(11)
        config = AutoConfig.for_model(model_type, **settings)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        self.model.save_pretrained(folder, safe_serialization=True)
        self.folder = str(folder)
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}

    def check(self, outputs: list[list[int]]) -> None:
        """Each output is the greedy one: every token has the highest logit after the prompt and those before it."""
        for prompt, output in zip(prompts(), outputs, strict=True):
            assert len(output) == NEW_TOKENS
            assert output == self.logits(prompt + output[:-1])[len(prompt) - 1 :].argmax(-1).tolist()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """``[tokens, vocab]``"""
        if tuple(tokens) not in self._seen:
            self._seen[tuple(tokens)] = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return self._seen[tuple(tokens)]


@pytest.fixture(scope="session")
def oracles(tmp_path_factory):
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(tmp_path_factory.mktemp(name), name)
        return made[name]

    return oracle


def generate(oracle: Oracle, **options) -> Engine:
    """An engine that has generated for all prompts, and got the oracle's tokens."""
    engine = Engine(oracle.folder, EngineOptions(device="cpu", ignore_eos=True, **options))
    again(engine, oracle)
    return engine


def again(engine: Engine, oracle: Oracle) -> None:
    completions = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    oracle.check([completion.token_ids for completion in completions])
    assert {completion.finish_reason for completion in completions} == {"length"}


def arrive(engine: Engine, oracle: Oracle) -> None:
    """Every prompt arrives while the earlier ones decode, and gets the oracle's tokens."""
    requests = []
    for prompt in prompts():
        requests.append(engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS)))
        for _ in range(4):
            engine.step()
    while engine.step() is not None:
        pass
    oracle.check([request.output for request in requests])


# How pages and chunks are walked depends on the kind of attention and not on the rest of a model.
DIVISIONS = [(1, 33), (16, 1), (64, 7), (16, -1)]


@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    [("llama", *division) for division in DIVISIONS]
    + [(name, 16, 7) for name in ("qwen3", "deepseek_v3", "deepseek_v32")]
    + [("deepseek_v3_yarn", 1, 33), ("deepseek_v3_yarn", 16, -1), ("glm_moe_dsa", 1, 33)],
)
@pytest.mark.sample(3)
def test_same_tokens_at_every_size_of_pages_and_prefill_chunks(oracles, name, page_size, chunk):
    generate(oracles(name), page_size=page_size, chunked_prefill_size=chunk)


@pytest.mark.parametrize(
    ("name", "path", "capacity"),
    [("deepseek_v3", path, 8) for path in ExtendPath]
    + [("deepseek_v3", ExtendPath.CHUNKED, 131072), ("deepseek_v3_yarn", ExtendPath.ONE_SHOT, 8)]
    + [("deepseek_v2", ExtendPath.CHUNKED, 8)],
)
@pytest.mark.sample(2)
def test_same_tokens_on_every_extend_path(oracles, name, path, capacity):
    """C1"""
    policy = ExtendPolicy(forced=path, chunk_capacity=capacity)
    generate(oracles(name), extend_policy=policy, chunked_prefill_size=24, page_size=4, max_batch=2)


@pytest.mark.parametrize(
    ("name", "path", "splits"),
    [("deepseek_v3", path, path is not ExtendPath.ABSORBED) for path in ExtendPath] + [("glm_moe_dsa", None, False)],
)
@pytest.mark.sample(2)
def test_same_tokens_when_prompts_arrive_while_others_decode(oracles, name, path, splits, monkeypatch):
    """C1: MLA layers run decodes separately from chunks, which run as MHA. Prompts begin with cached pages, and end in
    chunks of one token."""
    halves: list[list[ForwardMode]] = []
    plan_apart = MLAAttention.plan_apart

    def noted(self, batch, *arguments):
        plan = plan_apart(self, batch, *arguments)
        halves.append([half.forward_mode for half in plan.halves])
        return plan

    monkeypatch.setattr(MLAAttention, "plan_apart", noted)
    policy, oracle = ExtendPolicy(forced=path, chunk_capacity=8), oracles(name)
    engine = Engine(
        oracle.folder, device="cpu", page_size=4, chunked_prefill_size=12, extend_policy=policy, ignore_eos=True
    )
    arrive(engine, oracle)
    assert engine.cache_statistics.hit_tokens >= 32
    assert halves == [[ForwardMode.DECODE, ForwardMode.EXTEND]] * len(halves) and splits == (len(halves) > 3)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(2)
def test_same_tokens_with_prefix_hits(oracles, name):
    engine = generate(oracles(name), page_size=4)
    again(engine, oracles(name))
    assert engine.cache_statistics.hit_tokens > 35


@pytest.mark.parametrize(("name", "prefix_cache"), [("llama", True), ("deepseek_v3", False), ("glm_moe_dsa", True)])
@pytest.mark.sample(2)
def test_same_tokens_when_a_tiny_pool_forces_preemption(oracles, name, prefix_cache):
    engine = generate(oracles(name), page_size=8, num_pages=15, prefix_cache=prefix_cache)
    assert engine.scheduler.preemptions > 0
    if not prefix_cache:
        assert engine.runner.allocator.free_pages == engine.runner.allocator.num_pages


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(2)
def test_a_page_with_another_holder_is_copied_before_the_next_token_is_written(oracles, name):
    """Pages of other holders stay unchanged, and the request reads its own earlier rows from the copy."""
    oracle = oracles(name)
    engine = Engine(oracle.folder, EngineOptions(device="cpu", page_size=16, prefix_cache=False, ignore_eos=True))
    requests = [engine.add(prompt, SamplingParams(max_tokens=NEW_TOKENS)) for prompt in prompts()]
    engine.step()
    allocator, table = engine.runner.allocator, engine.runner.table
    held = [table.pages(request.row)[-1] for request in requests]  # each in part full
    allocator.share(held)  # as forks of the rows would
    while engine.step() is not None:
        pass
    oracle.check([request.output for request in requests])
    allocator.release(held)
    assert allocator.free_pages == allocator.num_pages


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(2)
def test_logits_agree_within_1e_4(oracles, name):
    """Every step's logits, prefill and decode, against a whole forward of transformers."""
    oracle = oracles(name)
    engine = Engine(oracle.folder, EngineOptions(device="cpu", page_size=4, chunked_prefill_size=16, ignore_eos=True))
    with watched_logits() as seen:
        completions = engine.generate(prompts()[:3], SamplingParams(max_tokens=6))
    assert [len(seen[number]) for number in sorted(seen)] == [6, 6, 6]
    for prompt, completion, number in zip(prompts(), completions, sorted(seen), strict=False):
        for place, logits in enumerate(seen[number]):
            tokens = [*prompt, *completion.token_ids[:place]]
            torch.testing.assert_close(logits, oracle.logits(tokens)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_cache_rows_equal_transformers_own(oracles, name):
    """The latent and the rotated key of every layer and position."""
    oracle = oracles(name)
    engine = Engine(oracle.folder, EngineOptions(device="cpu", page_size=4, prefix_cache=False))
    prompt = prompts()[1]
    request = engine.add(prompt, SamplingParams(max_tokens=2))
    engine.step()
    with torch.no_grad():
        cache = oracle.model(torch.tensor([prompt]), use_cache=True).past_key_values
    pages = engine.runner.table.pages(request.row)
    slots = torch.tensor([pages[t // 4] * 4 + t % 4 for t in range(len(prompt))])
    for layer_id in engine.runner.pools.mla.layer_ids:
        rows = engine.runner.pools.mla.read_rows(layer_id, slots)
        theirs = torch.cat([cache.layers[layer_id].keys[0, 0], cache.layers[layer_id].values[0, 0]], -1)
        torch.testing.assert_close(rows, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [24, -1])
def test_same_tokens_on_a_gpu(oracles, name, chunk):
    engine = Engine(oracles(name).folder, device="cuda", page_size=16, chunked_prefill_size=chunk, ignore_eos=True)
    completions = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    oracles(name).check([completion.token_ids for completion in completions])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("path", ExtendPath)
def test_same_tokens_on_every_extend_path_on_a_gpu(oracles, path):
    """C1"""
    policy = ExtendPolicy(forced=path, chunk_capacity=8)
    engine = Engine(
        oracles("deepseek_v3").folder, device="cuda", page_size=4, max_batch=2, extend_policy=policy, ignore_eos=True
    )
    completions = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    oracles("deepseek_v3").check([completion.token_ids for completion in completions])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("path", [ExtendPath.ONE_SHOT, ExtendPath.CHUNKED])
def test_same_tokens_when_prompts_arrive_while_others_decode_on_a_gpu(oracles, path):
    """C1: in eager steps, which run decodes separately from chunks."""
    policy, oracle = ExtendPolicy(forced=path, chunk_capacity=8), oracles("deepseek_v3")
    options = {"page_size": 4, "chunked_prefill_size": 12, "disable_prefill_cuda_graph": True, "ignore_eos": True}
    arrive(Engine(oracle.folder, device="cuda", extend_policy=policy, **options), oracle)
