"""The same tokens as transformers, however the work is divided into steps, pages, paths and ranks."""

from __future__ import annotations

import pytest
import torch

from attnplug import ExtendPath, ExtendPolicy
from attnplug.tiny import TINY_CONFIGS
from attnplug_engine.engine import Engine, EngineOptions
from attnplug_engine.request import SamplingParams

NEW_TOKENS = 32
"""Enough to go past a page of 64 tokens, past the context that YaRN begins with, and out of a tiny pool."""
YARN = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
}
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_yarn": ("deepseek_v3", YARN),
}
MLA = [name for name in MODELS if name.startswith("deepseek")]


def prompts() -> list[list[int]]:
    """Different lengths; the second and third begin alike, so that one can find the other's pages."""
    random = torch.Generator().manual_seed(5)
    lengths = (1, 40, 53, 17)
    drawn = [torch.randint(0, 128, (length,), generator=random).tolist() for length in lengths]
    drawn[2][:35] = drawn[1][:35]
    return drawn


class Oracle:
    """A checkpoint that transformers made, and the tokens that transformers itself gets from it, greedily."""

    def __init__(self, folder, name: str) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type, changes = MODELS[name]
        settings = {key: value for key, value in TINY_CONFIGS[model_type].items() if key != "model_type"} | changes
        torch.manual_seed(11)
        config = AutoConfig.for_model(model_type, **settings)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        self.model.save_pretrained(folder, safe_serialization=True)
        self.folder = str(folder)
        self.tokens = [self._greedy(prompt) for prompt in prompts()]

    @torch.no_grad()
    def _greedy(self, prompt: list[int]) -> list[int]:
        generated = self.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return generated[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens])).logits[0, -1]


@pytest.fixture(scope="session")
def oracles(tmp_path_factory):
    made: dict[str, Oracle] = {}

    def oracle(name: str) -> Oracle:
        if name not in made:
            made[name] = Oracle(tmp_path_factory.mktemp(name), name)
        return made[name]

    return oracle


def generate(oracle: Oracle, **options) -> tuple[Engine, list[list[int]]]:
    engine = Engine(oracle.folder, EngineOptions(device="cpu", ignore_eos=True, **options))
    completions = engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))
    assert {completion.finish_reason for completion in completions} == {"length"}
    return engine, [completion.token_ids for completion in completions]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_same_tokens_at_every_page_size(oracles, name, page_size):
    _, tokens = generate(oracles(name), page_size=page_size)
    assert tokens == oracles(name).tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 33, -1])
def test_same_tokens_at_every_size_of_prefill_chunks(oracles, name, chunk):
    _, tokens = generate(oracles(name), chunked_prefill_size=chunk, page_size=16)
    assert tokens == oracles(name).tokens


@pytest.mark.parametrize("name", MLA)
@pytest.mark.parametrize(("path", "capacity"), [(path, 8) for path in ExtendPath] + [(ExtendPath.CHUNKED, 131072)])
def test_same_tokens_on_every_extend_path(oracles, name, path, capacity):
    """C1"""
    policy = ExtendPolicy(forced=path, chunk_capacity=capacity)
    _, tokens = generate(oracles(name), extend_policy=policy, chunked_prefill_size=24, page_size=4, max_batch=2)
    assert tokens == oracles(name).tokens


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_with_prefix_hits(oracles, name):
    engine, first = generate(oracles(name), page_size=4)
    again = [c.token_ids for c in engine.generate(prompts(), SamplingParams(max_tokens=NEW_TOKENS))]
    assert first == again == oracles(name).tokens
    assert engine.cache_statistics.hit_tokens > 35


@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_without_a_prefix_cache(oracles, name):
    engine, tokens = generate(oracles(name), page_size=4, prefix_cache=False)
    assert tokens == oracles(name).tokens
    assert engine.runner.allocator.free_pages == engine.runner.allocator.num_pages


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_same_tokens_when_a_tiny_pool_forces_preemption(oracles, name, prefix_cache):
    engine, tokens = generate(oracles(name), page_size=8, num_pages=20, prefix_cache=prefix_cache)
    assert engine.scheduler.preemptions > 0
    assert tokens == oracles(name).tokens


@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_within_1e_4(oracles, name):
    """Every step's logits, prefill and decode, against a whole forward of transformers."""
    oracle = oracles(name)
    engine = Engine(oracle.folder, EngineOptions(device="cpu", page_size=4, chunked_prefill_size=16, ignore_eos=True))
    seen = []
    original = engine.sampler.sample

    def spy(logits, requests):
        seen.extend((list(r.prompt) + list(r.output), row.clone()) for r, row in zip(requests, logits, strict=True))
        return original(logits, requests)

    engine.sampler.sample = spy
    engine.generate(prompts()[:3], SamplingParams(max_tokens=6))
    assert len(seen) == 18
    for tokens, logits in seen:
        torch.testing.assert_close(logits, oracle.logits(tokens), rtol=1e-4, atol=1e-4)


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
    assert [completion.token_ids for completion in completions] == oracles(name).tokens


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
    assert [completion.token_ids for completion in completions] == oracles("deepseek_v3").tokens
