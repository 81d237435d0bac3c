"""``generate`` with an attnplug backend: the same tokens as with eager attention, for every kind of cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, QuantizedCache, Qwen3NextConfig
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug.host import ModelAttention
from attnplug_testing.errors import naming
from attnplug_transformers import BridgeError, PagedCache
from attnplug_transformers.masks import step_mask
from tiny_models import CONFIGS, NATIVE, generated, model, padded

MODELS = ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"]
LATENT = "deepseek_v3"
"""Model whose cache does not hold keys and values."""
LENS = [40, 3, 17, 33, 1, 25, 8, 39]
"""Longer and shorter than a window. With new tokens some cross it, and a page of 64."""


@cache
def eager(name: str) -> Tensor:
    """Arguments that transformers itself adds to a padded batch."""
    expected = generated(name, "eager", padded(LENS), max_new_tokens=12)
    assert len({tuple(row) for row in expected.tolist()}) == len(LENS)  # else attention would not matter
    return expected


def caches(name: str, kind: str) -> dict[str, Any]:
    return {"past_key_values": PagedCache(CONFIGS[name])} if kind == "paged" else {"cache_implementation": kind}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "dynamic") for name in MODELS),
        *((name, "paged") for name in MODELS if name != LATENT),
        *((name, "static") for name in ("gemma2", "deepseek_v3")),
    ],
)
@pytest.mark.sample(5)
def test_a_left_padded_batch_gets_the_tokens_of_eager(name, kind):
    found = generated(name, NATIVE, padded(LENS), max_new_tokens=12, **caches(name, kind))
    assert torch.equal(found, eager(name))


def test_a_model_that_reshapes_masks_of_two_dimensions_leaves_ours():
    """GPT-2, with a mask that ``generate`` makes in advance."""
    prompts, options = padded([9, 5]), {"max_new_tokens": 6}
    found = generated("gpt2", NATIVE, prompts, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, generated("gpt2", "eager", prompts, **options))


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
def test_beams_reorder_the_cache(kind):
    prompts = padded([20, 7, 13])
    options = {"max_new_tokens": 10, "num_beams": 3}
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
    """A chat that is longer than the window of the sliding layers."""
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


@pytest.mark.parametrize("kind", ["dynamic", "paged"])  # static caches of transformers refuse values in bfloat16
def test_layers_attend_in_the_dtype_of_autocast(kind, monkeypatch):
    """Rotated queries and keys are in float32 there, values in bfloat16."""
    attend, seen = ModelAttention.attend, set()

    def recording(self, query, *given, **named):
        seen.add((query.dtype, torch.is_autocast_enabled("cpu")))
        return attend(self, query, *given, **named)

    monkeypatch.setattr(ModelAttention, "attend", recording)
    prompts, made = padded([20, 7]), model("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = generated("llama", NATIVE, prompts, max_new_tokens=3, **caches("llama", kind))
    assert found.shape == (2, 3) and seen == {(torch.bfloat16, False)}
    results = []
    for implementation in ("sdpa", NATIVE):
        made.set_attn_implementation(implementation)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(made(**prompts).logits[:, -1].float())
    torch.testing.assert_close(*results, atol=0.1, rtol=0.02)


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
    """Such a model would attend to the new tokens alone."""
    with pytest.raises(BridgeError, check=naming("layer 0")):
        generated("llama", "sdpa", padded([5]), max_new_tokens=3, past_key_values=PagedCache(CONFIGS["llama"]))


def test_a_paged_cache_refuses_models_that_cache_something_else():
    with pytest.raises(BridgeError, check=naming(32, "past_key_values")):
        PagedCache(CONFIGS["deepseek_v3"])
    hybrid = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(BridgeError, check=naming("linear_attention", "past_key_values")):
        PagedCache(hybrid)


def test_a_paged_cache_is_refused_for_a_config_with_which_generate_passes_tokens_again():
    """transformers' own caches give other tokens then, without a word."""
    with pytest.raises(BridgeError, check=naming("use_cache", "generation_config", "past_key_values")):
        PagedCache(LlamaConfig(use_cache=False))


@pytest.mark.parametrize(
    ("name", "lens", "named"),
    [
        ("llama", [5], ("PagedCache", "use_cache=True")),
        ("gemma2", [5, 4], (6, 5, "use_cache=True", "attention_mask")),  # its attention does not get use_cache
    ],
)
def test_a_paged_cache_is_refused_where_generate_passes_tokens_again(name, lens, named):
    cache = PagedCache(CONFIGS[name])
    with pytest.raises(BridgeError, check=naming(*named)):
        generated(name, NATIVE, padded(lens), max_new_tokens=3, use_cache=False, past_key_values=cache)


def test_a_paged_cache_refuses_padding_that_changes():
    made, prompts = model("llama"), padded([6, 3])
    made.set_attn_implementation(NATIVE)
    filled = PagedCache(CONFIGS["llama"])
    made(**prompts, past_key_values=filled)
    with pytest.raises(BridgeError, check=naming("attention_mask")):
        made(prompts["input_ids"][:, :1], attention_mask=torch.ones(2, 7), past_key_values=filled)


@pytest.mark.parametrize("select", ["by numbers", "by a mask", "repeated"])
def test_requests_of_a_paged_cache_are_taken_out_and_repeated(select):
    """The result may have more requests than the cache was made for. Padding is selected and repeated with its
    request."""
    made, prompts, results = model("llama"), padded([6, 3, 5]), {}
    for implementation in ("eager", NATIVE):
        made.set_attn_implementation(implementation)
        filled = DynamicCache(config=CONFIGS["llama"]) if implementation == "eager" else PagedCache(CONFIGS["llama"])
        made(**prompts, past_key_values=filled)
        kept = torch.tensor([0, 0, 1, 1, 2, 2]) if select == "repeated" else torch.tensor([1, 2])
        if select == "repeated":
            filled.batch_repeat_interleave(2)
        else:
            filled.batch_select_indices(kept if select == "by numbers" else torch.tensor([False, True, True]))
        mask = torch.nn.functional.pad(prompts["attention_mask"][kept], (0, 1), value=1)
        ids = prompts["input_ids"][kept, -1:]
        results[implementation] = made(ids, attention_mask=mask, past_key_values=filled).logits
    torch.testing.assert_close(results[NATIVE], results["eager"])


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_a_paged_cache_refuses_another_number_of_requests(before, after):
    """Rows of the others would be those of no request, or dropped."""
    made, ids, filled = model("llama"), padded([8] * 3)["input_ids"], PagedCache(CONFIGS["llama"])
    made.set_attn_implementation(NATIVE)
    made(ids[:before, :6], past_key_values=filled)
    with pytest.raises(BridgeError, check=naming(before, after, "batch_repeat_interleave")):
        made(ids[:after, 6:], past_key_values=filled)


def test_copies_of_a_paged_cache_continue_apart():
    """As transformers' guide reuses the cache of a prefix."""
    made, ids = model("gemma2"), padded([60])["input_ids"]
    made.set_attn_implementation(NATIVE)
    prefix = PagedCache(CONFIGS["gemma2"])
    made(ids[:, :30], past_key_values=prefix)
    for tail in (ids[:, 30:45], ids[:, 41:60]):
        whole = torch.cat((ids[:, :30], tail), 1)
        made.set_attn_implementation("eager")
        expected = made(whole).logits[:, 30:]
        made.set_attn_implementation(NATIVE)
        torch.testing.assert_close(made(tail, past_key_values=deepcopy(prefix)).logits, expected)
    assert prefix.get_seq_length() == 30


def test_a_request_that_waits_keeps_its_rows():
    """Its new token is padding in one step, and a token again in the next."""
    made, ids, results = model("llama"), padded([8, 8])["input_ids"], {}
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for implementation in ("eager", NATIVE):
        made.set_attn_implementation(implementation)
        filled = DynamicCache(config=CONFIGS["llama"]) if implementation == "eager" else PagedCache(CONFIGS["llama"])
        for start, end in ((0, 6), (6, 7), (7, 8)):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            results[implementation] = made(ids[:, start:end], **given, past_key_values=filled).logits
    torch.testing.assert_close(results[NATIVE], results["eager"])


def test_a_paged_cache_refuses_what_it_cannot_do():
    cache = PagedCache(CONFIGS["llama"])
    with pytest.raises(BridgeError, check=naming("crop(3)")):
        cache.crop(3)
    with pytest.raises(BridgeError, check=naming("PagedCache")):
        cache.layers[0].offload()


def test_keys_of_another_layer_or_read_twice_are_refused():
    """Layers that share a cache do this."""
    made = model("llama")
    made.set_attn_implementation(NATIVE)
    attention, filled = ALL_ATTENTION_FUNCTIONS[NATIVE], PagedCache(CONFIGS["llama"])
    first, second = (layer.self_attn for layer in made.model.layers)
    q, k = torch.zeros(1, 8, 1, 16), torch.zeros(1, 2, 1, 16)
    keys, values = filled.update(k, k, 0)
    with pytest.raises(BridgeError, check=naming(1, "layer 0")):
        attention(second, q, keys, values, step_mask(1, 1, 1))
    attention(first, q, keys, values, step_mask(1, 1, 1))
    with pytest.raises(BridgeError, check=naming(0, "layer 0")):
        attention(first, q, keys, values, step_mask(1, 1, 1))
    keys, values = filled.update(k, k, 0)
    with pytest.raises(BridgeError, check=naming("1 × 2", "1 × 1")):
        attention(first, torch.zeros(1, 8, 2, 16), keys, values, step_mask(1, 1, 2, 1))


def test_layers_of_a_kind_have_pages_together_and_no_others():
    filled = PagedCache(CONFIGS["gemma2"])
    generated("gemma2", NATIVE, padded([4]), max_new_tokens=1, past_key_values=filled)
    assert sorted(tuple(pages.layers) for pages in filled._pages.values()) == [(0,), (1,)]


def test_a_paged_cache_belongs_to_one_choice_of_backends():
    made, prompts = model("llama"), padded([6])
    filled = PagedCache(CONFIGS["llama"])
    made.set_attn_implementation(NATIVE)
    made(**prompts, past_key_values=filled)
    made.set_attn_implementation("attnplug:auto")
    with pytest.raises(BridgeError, check=naming("attn_implementation", "torch_native", "auto")):
        made(prompts["input_ids"][:, :1], past_key_values=filled)
