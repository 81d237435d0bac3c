"""Continuous batching over transformers' blocks gives the same tokens as its own implementations."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, GenerationConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import PagedAttentionCache

from attnplug.host import ModelAttention
from attnplug_testing.errors import naming
from attnplug_transformers import BridgeError, continuous_batching
from tiny_models import CONFIGS, NATIVE, VOCABULARY, model

PAGE = {"page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size": 16}


def prompts() -> list[list[int]]:
    """Some share two and a half pages; one is longer than a step takes."""
    generator = torch.Generator().manual_seed(5)
    shared = torch.randint(3, VOCABULARY, (40,), generator=generator).tolist()
    tails = [torch.randint(3, VOCABULARY, (count,), generator=generator).tolist() for count in (3, 17, 1, 30, 9, 50, 2)]
    return [shared + tail for tail in tails[:4]] + tails[4:]


def batched(name: str, implementation: str) -> list[Any]:
    """Tokens that continuous batching generates for each prompt, with chunks of 48 tokens and pages of 16."""
    made: Any = model(name)
    made.set_attn_implementation(implementation)
    running = continuous_batching(made) if implementation.startswith("attnplug:") else nullcontext()
    with running:
        results = made.generate_batch(
            prompts(),
            generation_config=GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=48, **PAGE),
        )
    assert made.config._attn_implementation == implementation
    return [result.error or result.generated_tokens for result in results.values()]


def multimodal() -> Any:
    """A tiny model with a vision tower."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=4, patch_size=2
    )
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=CONFIGS["llama"]))


@pytest.mark.parametrize("name", ["llama", "gemma2_uncapped"])
@pytest.mark.sample(1)
def test_requests_of_different_lengths_get_the_tokens_of_paged_eager(name, monkeypatch):
    """Shared prefixes, more requests than fit into a step, layers with a window; NaN in unwritten memory."""
    expected = batched(name, "paged|eager")
    make, search, found = PagedAttentionCache.__init__, PagedAttentionCache.search_prefix_match, []

    def poisoned(self, *args, **options):
        make(self, *args, **options)
        if hasattr(self, "cache_tensor"):
            self.cache_tensor[self.bytes_per_sector :].view(torch.float32).fill_(torch.nan)
        else:
            for tensor in (*self.key_cache, *self.value_cache):
                tensor[: self.num_pages].fill_(torch.nan)

    def searched(self, *args):
        found.append(search(self, *args))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "__init__", poisoned)
    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searched)
    assert batched(name, NATIVE) == expected
    assert name != "llama" or 32 in found  # with a window, transformers shares nothing
    assert len({tuple(tokens) for tokens in expected}) == 7  # else attention would not matter


def test_each_step_is_planned_once_for_each_kind_of_layer(monkeypatch):
    plans, steps = [], []
    plan, made = ModelAttention.plan, model("gemma2_uncapped")
    monkeypatch.setattr(ModelAttention, "plan", lambda self, batch: (plans.append(batch), plan(self, batch))[1])
    hook = made.register_forward_pre_hook(lambda *given: steps.append(given))
    try:
        batched("gemma2_uncapped", NATIVE)
    finally:
        hook.remove()
    assert len(plans) == 2 * len(steps) > 0


def test_a_backend_that_does_not_fit_fails_requests_with_every_reason():
    for printed in batched("llama", "attnplug:triton_mha"):
        assert "attnplug-triton-mha" in printed and 'attn_implementation="attnplug:…"' in printed


def test_a_model_with_another_implementation_is_refused():
    made = model("llama")
    made.set_attn_implementation("sdpa")
    with (
        pytest.raises(BridgeError, check=naming("sdpa")),
        continuous_batching(made),
    ):
        pass


def test_a_vision_tower_keeps_its_implementation():
    made = multimodal()
    made.set_attn_implementation({"text_config": NATIVE, "vision_config": "sdpa"})
    config = made.config
    before = config._attn_implementation
    with continuous_batching(made):
        assert config._attn_implementation == config.text_config._attn_implementation != NATIVE
        assert config.vision_config._attn_implementation == "sdpa"
    assert config._attn_implementation == before
    assert [config.text_config._attn_implementation, config.vision_config._attn_implementation] == [NATIVE, "sdpa"]


def test_a_cap_is_served_though_transformers_own_implementations_leave_it_out():
    """The oracle is therefore ``generate``, prompt by prompt."""
    made: Any = model("gemma2")
    made.set_attn_implementation("eager")
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [made.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts()]
    assert batched("gemma2", NATIVE) == expected


def test_a_model_for_which_transformers_allocates_other_rows_is_refused():
    """transformers fails itself, with its own implementations: rows of MLA layers have another size than head_dim."""
    for printed in batched("deepseek_v3", NATIVE):
        assert "layer 0 has keys and values of 24 and 16" in printed and "use generate()" in printed
