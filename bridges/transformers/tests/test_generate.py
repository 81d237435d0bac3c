"""``generate`` with a backend of ours: the tokens that eager attention gives, whatever the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import QuantizedCache, Qwen3NextConfig
from transformers.cache_utils import DynamicCache, StaticCache

from attnplug.host import ModelAttention
from attnplug_transformers import BridgeError, PagedCache
from tiny_models import CONFIGS, NATIVE, generated, model, padded

MODELS = ["llama", "qwen3", "gemma2", "deepseek_v3"]
LATENT = "deepseek_v3", "paged"
"""What transformers caches of it are no keys and values."""
LENS = [40, 3, 17, 33, 1, 25, 8, 39]
"""Longer and shorter than a window. With new tokens some cross it, and a page of 64."""


def caches(name: str, kind: str) -> dict[str, Any]:
    return {"past_key_values": PagedCache(CONFIGS[name])} if kind == "paged" else {"cache_implementation": kind}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in MODELS for kind in ("dynamic", "static", "paged") if (name, kind) != LATENT],
)
def test_a_left_padded_batch_gets_the_tokens_of_eager(name, kind):
    prompts = padded(LENS)
    expected = generated(name, "eager", prompts, max_new_tokens=32)
    assert len({tuple(row) for row in expected.tolist()}) == len(LENS)  # else attention would not matter
    assert torch.equal(generated(name, NATIVE, prompts, max_new_tokens=32, **caches(name, kind)), expected)


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
def test_beams_reorder_the_cache(kind):
    prompts = padded([20, 7, 13])
    options = {"max_new_tokens": 24, "num_beams": 3}
    expected = generated("gemma2", "eager", prompts, **options)
    assert torch.equal(generated("gemma2", NATIVE, prompts, **options, **caches("gemma2", kind)), expected)


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
def test_rejected_drafts_are_cropped(kind):
    prompts = padded([30])
    prompts["input_ids"] = prompts["input_ids"][:, :10].repeat(1, 3)  # something to look up
    options = {"max_new_tokens": 40, "prompt_lookup_num_tokens": 3}
    expected = generated("llama", "eager", prompts, **options)
    assert torch.equal(generated("llama", NATIVE, prompts, **options, **caches("llama", kind)), expected)


@pytest.mark.parametrize("make", [DynamicCache, lambda config: StaticCache(config, 96), PagedCache])
def test_a_cache_is_continued_by_several_tokens_at_once(make):
    """As in a chat, past the window of the sliding layers."""
    ids = padded([60])["input_ids"]
    made, results = model("gemma2"), {}
    for implementation in ("eager", NATIVE):
        made.set_attn_implementation(implementation)
        filled = (DynamicCache if implementation == "eager" else make)(config=CONFIGS["gemma2"])
        for part in (ids[:, :20], ids[:, 20:50], ids[:, 50:51], ids[:, 51:]):
            results[implementation] = made(part, past_key_values=filled).logits
    torch.testing.assert_close(results[NATIVE], results["eager"])


@pytest.mark.parametrize("left", [True, False])
def test_logits_without_a_cache_are_those_of_eager_on_either_side_of_padding(left):
    prompts = padded(LENS, left=left)
    positions = (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)
    made, results = model("gemma2"), {}
    for implementation in ("eager", NATIVE):
        made.set_attn_implementation(implementation)
        results[implementation] = made(**prompts, position_ids=positions, use_cache=False).logits
    kept = prompts["attention_mask"].bool()
    torch.testing.assert_close(results[NATIVE][kept], results["eager"][kept])


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
def test_each_step_is_planned_once_for_each_kind_of_layer(kind, monkeypatch):
    plans = []
    plan = ModelAttention.plan
    monkeypatch.setattr(ModelAttention, "plan", lambda self, batch: (plans.append(batch), plan(self, batch))[1])
    prompts = padded([9, 5])
    generated("llama", NATIVE, prompts, max_new_tokens=6, **caches("llama", kind))
    assert len(plans) == 6
    plans.clear()
    generated("gemma2", NATIVE, prompts, max_new_tokens=6, **caches("gemma2", kind))
    assert len(plans) == 12  # a layer with a window, and one without


def test_threads_do_not_share_pages():
    prompts = [padded([count]) for count in (30, 7)]
    expected = [generated("llama", NATIVE, given, max_new_tokens=16) for given in prompts]
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(generated, "llama", NATIVE, given, max_new_tokens=16) for given in prompts]
        assert all(torch.equal(one.result(), other) for one, other in zip(found, expected, strict=True))


def test_pages_that_were_made_in_inference_mode_serve_outside_of_it():
    made, ids = model("qwen3"), padded([6])["input_ids"]
    made.set_attn_implementation("attnplug:auto")
    with torch.inference_mode():
        expected = made(ids).logits.clone()
    torch.testing.assert_close(made(ids).logits, expected)


def test_a_paged_cache_grows_and_is_emptied_by_reset():
    filled = PagedCache(CONFIGS["llama"])
    for lens in ([250, 100], [300, 290, 10]):  # more rows, then more requests than it was made for
        prompts = padded(lens)
        expected = generated("llama", "eager", prompts, max_new_tokens=12)
        assert torch.equal(generated("llama", NATIVE, prompts, max_new_tokens=12, past_key_values=filled), expected)
        filled.reset()


def test_a_quantized_cache_is_read_as_transformers_hands_it_over():
    """Its keys and values arrive in the model's dtype, so eager attention gives the same."""
    prompts, results = padded([20, 9]), []
    for implementation in ("eager", NATIVE):
        made = QuantizedCache(backend="fp8", config=CONFIGS["llama"])
        results.append(generated("llama", implementation, prompts, max_new_tokens=8, past_key_values=made))
    assert torch.equal(*results)


def test_a_paged_cache_refuses_a_model_with_another_implementation():
    """That would attend to the new tokens alone."""
    with pytest.raises(BridgeError, match="it is for models with attn_implementation='attnplug:…' alone"):
        generated("llama", "sdpa", padded([5]), max_new_tokens=3, past_key_values=PagedCache(CONFIGS["llama"]))


def test_a_paged_cache_refuses_models_that_cache_something_else():
    with pytest.raises(BridgeError, match=r"the model caches latent rows of 32.*leave past_key_values out"):
        PagedCache(CONFIGS["deepseek_v3"])
    hybrid = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(BridgeError, match="the model has layers of type linear_attention; leave past_key_values out"):
        PagedCache(hybrid)


def test_a_paged_cache_refuses_padding_that_changes():
    made, prompts = model("llama"), padded([6, 3])
    made.set_attn_implementation(NATIVE)
    filled = PagedCache(CONFIGS["llama"])
    made(**prompts, past_key_values=filled)
    with pytest.raises(BridgeError, match="attention_mask says otherwise of tokens that are in this PagedCache"):
        made(prompts["input_ids"][:, :1], attention_mask=torch.ones(2, 7), past_key_values=filled)


def test_a_paged_cache_belongs_to_one_choice_of_backends():
    made, prompts = model("llama"), padded([6])
    filled = PagedCache(CONFIGS["llama"])
    made.set_attn_implementation(NATIVE)
    made(**prompts, past_key_values=filled)
    made.set_attn_implementation("attnplug:auto")
    with pytest.raises(BridgeError, match="a cache belongs to one attn_implementation"):
        made(prompts["input_ids"][:, :1], past_key_values=filled)
