"""Refusals of what lengths cannot express, and of rows that must not be read."""

from __future__ import annotations

import subprocess
import sys
from copy import copy, deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, LlamaForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import attnplug_transformers
from attnplug import CacheLayout, Role
from attnplug.host import BackendRequest, Limits, explain, load_model, load_registry
from attnplug_testing.errors import naming
from attnplug_transformers import BridgeError, registration
from attnplug_transformers.attention import AttentionFunction
from attnplug_transformers.blocks import LayerGroup
from attnplug_transformers.errors import OwnAttentionError, UnknownNameError
from attnplug_transformers.layer_call import read_call
from attnplug_transformers.masks import mask_window, step_mask
from attnplug_transformers.paged_attention import PagedBatches, PagedGroup, PlannedLayers
from attnplug_transformers.pages import PageStore, fits, problem_of
from attnplug_transformers.step import PaddedStep
from attnplug_transformers_host import HOST
from tiny_models import CONFIGS, NATIVE, model


@pytest.fixture
def llama():
    made = model("llama")
    made.set_attn_implementation(NATIVE)
    return made


def test_training_is_refused(llama):
    with pytest.raises(BridgeError, match=r"training.*torch\.no_grad"):
        llama(inputs_embeds=torch.randn(1, 4, 64, requires_grad=True))


def test_weights_are_refused(llama):
    module = llama.model.layers[0].self_attn
    q = torch.zeros(1, 8, 1, 16)
    with pytest.raises(BridgeError, check=naming("output_attentions", "eager")):
        AttentionFunction(BackendRequest("torch_native"))(
            module, q, q[:, :2], q[:, :2], step_mask(1, 1, 1), output_attentions=True
        )


def test_an_argument_that_the_bridge_does_not_know_is_refused(llama):
    with pytest.raises(BridgeError, check=naming("fancy_bias")):
        llama(torch.ones(1, 4, dtype=torch.long), fancy_bias=torch.zeros(1))


def test_a_mask_of_four_dimensions_is_refused(llama):
    with pytest.raises(BridgeError, check=naming("[1, 1, 4, 4]", "[batch, tokens]")):
        llama(torch.ones(1, 4, dtype=torch.long), attention_mask=torch.zeros(1, 1, 4, 4))


def test_packed_sequences_are_refused(llama):
    positions = torch.tensor([[0, 1, 0, 1]])
    with pytest.raises(BridgeError, check=naming("packed_sequence_mask_function")):
        llama(torch.ones(1, 4, dtype=torch.long), position_ids=positions, use_cache=False)


def test_attention_in_both_directions_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama.config, "is_causal", False, raising=False)
    with pytest.raises(BridgeError, check=naming("bidirectional_mask_function")):
        llama(torch.ones(1, 4, dtype=torch.long))


def test_an_encoder_is_refused_as_such_though_it_has_no_mask():
    vision = torch.nn.Identity()
    vision.is_causal = False
    q = torch.zeros(1, 4, 2, 16)
    with pytest.raises(BridgeError, check=naming("not causal", "vision_config")):
        AttentionFunction(BackendRequest("torch_native"))(vision, q, q, q, None)


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: mask.dtype,
        lambda mask: mask[:, :, :, :4],
        lambda mask: torch.zeros(1) + mask,
        lambda mask: torch.where(mask, 0.0, 1.0),
    ],
    ids=["an attribute", "elements", "a sum", "a function"],
)
def test_a_model_that_reads_its_mask_is_refused(read):
    """Doge and HY 4 read their masks."""
    with pytest.raises(BridgeError, check=naming("reads its attention mask", "eager")):
        read(step_mask(1, 4, 4))


def test_a_mask_has_no_attributes_that_a_caller_may_ask_for():
    assert not hasattr(step_mask(1, 4, 4), "to") and copy(step_mask(1, 4, 4)).queries == 4


def test_a_model_with_attention_of_its_own_is_refused_before_there_are_weights():
    """transformers would run it, with a mask for our backends."""
    bloom = BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(OwnAttentionError, check=naming("BloomForCausalLM", NATIVE, "eager")) as raised:
        AutoModelForCausalLM.from_config(bloom, attn_implementation=NATIVE)
    assert isinstance(raised.value, ValueError)
    assert AutoModelForCausalLM.from_config(bloom, attn_implementation="eager")


def test_a_model_that_is_derived_where_there_is_no_source_is_served():
    """For example, a model class that is defined in a notebook."""
    derived = type("Derived", (LlamaForCausalLM,), {"__module__": "nowhere"})
    assert derived(deepcopy(CONFIGS["llama"])).config is not None
    registration.raise_if_own_attention(derived, NATIVE)


def test_a_window_that_only_the_cache_of_transformers_has_is_refused_in_a_paged_cache(llama, monkeypatch):
    """Moshi's masks have none, although its configuration has one; a dynamic cache drops rows behind it."""
    monkeypatch.setattr(llama.config, "sliding_window", 8, raising=False)
    with pytest.raises(BridgeError, check=naming("layer 0", "sliding window", "past_key_values")):
        llama(torch.ones(1, 4, dtype=torch.long), past_key_values=attnplug_transformers.PagedCache(llama.config))


def test_a_dtype_that_no_backend_has_is_refused():
    q = torch.zeros(1, 4, 1, 16, dtype=torch.float64)
    with pytest.raises(BridgeError, check=naming("float64", "bfloat16", "dtype=")):
        AttentionFunction(BackendRequest("torch_native"))(torch.nn.Identity(), q, q, q, step_mask(1, 1, 1))


def test_a_window_is_read_from_its_mask():
    assert mask_window(causal_mask_function) is None
    assert mask_window(sliding_window_causal_mask_function(12)) == 12


@pytest.mark.parametrize(
    "mask",
    [
        and_masks(sliding_window_overlay(4), bidirectional_mask_function),
        or_masks(sliding_window_overlay(4), causal_mask_function),
    ],
    ids=["both directions", "a union"],
)
def test_a_window_in_another_mask_is_refused(mask):
    with pytest.raises(BridgeError, check=naming("sdpa")):
        mask_window(mask)


def test_a_mask_for_another_number_of_requests_is_refused():
    with pytest.raises(BridgeError, check=naming("[3, 4]", "[2, tokens]")):
        step_mask(2, 4, 4, attention_mask=torch.ones(3, 4))


def test_a_step_that_was_prepared_for_another_kind_of_layer_is_refused():
    made = step_mask(1, 1, 30)
    assert step_mask(1, 1, 30, attention_mask=made) is made
    with pytest.raises(BridgeError, check=naming("None", 30, 12)):
        step_mask(1, 1, 30, mask_function=sliding_window_causal_mask_function(12), attention_mask=made)


@pytest.mark.parametrize(
    ("module", "change", "named"),
    [
        ({}, {"dropout": 0.1}, ("dropout", 0.1, "model.eval()")),
        ({"is_causal": False}, {}, ("causal",)),
        ({}, {"is_causal": False}, ("causal",)),
        ({"sinks": torch.ones(4)}, {}, ("s_aux",)),
        ({}, {"dtype": torch.float16}, ("float32", "float16")),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused_by_name(module, change, named):
    layer = torch.nn.Identity()
    vars(layer).update(module)
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16, dtype=change.pop("dtype", torch.float32))
    with pytest.raises(BridgeError, check=naming(*named)):
        read_call(layer, q, k, k, change.pop("dropout", 0.0), None, None, change)


def test_a_layer_with_other_columns_than_its_step_is_refused():
    attention, q = AttentionFunction(BackendRequest("torch_native")), torch.zeros(1, 2, 1, 16)
    with pytest.raises(BridgeError, check=naming("1 × 1", 5, 6)):
        attention(torch.nn.Identity(), q, *[torch.zeros(1, 2, 5, 16)] * 2, step_mask(1, 1, 6, 5))


def test_padding_between_tokens_is_refused_where_a_window_would_count_it():
    made = model("gemma2")
    made.set_attn_implementation(NATIVE)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[:, 20] = 0
    with pytest.raises(BridgeError, check=naming(24, "left")):
        made(torch.ones(1, 40, dtype=torch.long), attention_mask=mask)


def test_a_backend_that_does_not_fit_is_refused_with_every_reason_in_transformers_words(llama):
    llama.set_attn_implementation("attnplug:triton_mha")
    with pytest.raises(BridgeError) as refused:
        llama(torch.ones(1, 4, dtype=torch.long))
    printed = str(refused.value)
    assert "attnplug-triton-mha" in printed and 'attn_implementation="attnplug:…"' in printed
    assert "cpu" in printed and "float32" in printed and "torch_native" in printed


def test_sinks_reach_a_backend_as_the_model_passes_them():
    module = model("gpt_oss").model.layers[0].self_attn
    q = torch.zeros(1, 8, 1, 16)
    call = read_call(module, q, q[:, :2], q[:, :2], 0.0, 0.25, 24, {"s_aux": module.sinks.half(), "softcap": None})
    assert call.layer.sinks and call.sinks.dtype is torch.float32
    torch.testing.assert_close(call.sinks, module.sinks.half().float())


def test_sinks_are_given_to_the_backend(monkeypatch):
    """Both over pages of our own and over those of continuous batching."""
    asked: list[object] = []
    native = AttentionFunction(BackendRequest("torch_native"))
    q, sinks = torch.zeros(1, 4, 1, 16), torch.arange(4.0)
    plain, with_sinks = torch.nn.Identity(), {"s_aux": sinks}
    pages = native._store.pages(read_call(plain, q, q, q, 0.0, None, None, {}).layer, q, Limits(1, 1, 64))
    over = SimpleNamespace(
        backend=pages.attention.backend,
        plan=pages.attention.plan,
        attend=lambda q, *_, extras=None, **__: (asked.append(extras), q)[1],
    )
    monkeypatch.setattr(PageStore, "pages", lambda *_: replace(pages, attention=over))
    native(plain, q, q, q, step_mask(1, 1, 1), **with_sinks)
    monkeypatch.setattr(
        PagedBatches, "_group", lambda *_: PagedGroup(LayerGroup(0, "full_attention", (0,), 64, 64, None))
    )

    def built(self, cache, group, layer, query):
        group.layers = {0: layer}
        return over

    monkeypatch.setattr(PagedBatches, "_over", built)
    monkeypatch.setattr(PagedGroup, "of_step", lambda *_: PlannedLayers(over, None))
    plain.layer_idx = 0
    native(plain, q, q, q, None, cache=object(), cu_seq_lens_q=None, **with_sinks)
    assert [extras.sinks.tolist() for extras in asked] == [[0.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("attnplug:torch_nativ", "attnplug:torch_native"),
        ("attnplug:flashattention", "attnplug:FLASHATTENTION"),
        ("attnplug:nonesuch", "attnplug:auto"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones_before_there_are_weights(llama, name, near):
    known = [f"attnplug:{backend.upper() if 'flash' in backend else backend}" for backend in load_registry().backends]
    for ask in (
        lambda: AutoModelForCausalLM.from_config(deepcopy(CONFIGS["llama"]), attn_implementation=name),
        lambda: llama.set_attn_implementation(name),
    ):
        with pytest.raises(UnknownNameError, check=naming(name, near, *known)) as raised:
            ask()
        assert isinstance(raised.value, ValueError)


def test_names_of_transformers_are_left_to_transformers(llama):
    with pytest.raises(ValueError, check=naming("flash_attention_9")) as raised:
        llama.set_attn_implementation("flash_attention_9")
    assert not isinstance(raised.value, UnknownNameError)


def test_every_installed_backend_has_a_name_that_transformers_does_not_take_for_its_own():
    known = set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    for name in load_registry().backends:
        assert f"attnplug:{name.upper() if 'flash' in name else name}" in known
    made = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="attnplug:FLASHATTENTION")
    assert made.config._attn_implementation == "attnplug:FLASHATTENTION"


def test_a_choice_with_roles_and_options_is_registered_by_a_name():
    request = BackendRequest("torch_native", roles={Role.DECODE: "torch_native"})
    assert attnplug_transformers.register("mine", request) == "attnplug:mine"
    made = model("llama")
    made.set_attn_implementation("attnplug:mine")
    made(torch.ones(1, 4, dtype=torch.long))


def test_a_name_that_transformers_would_take_apart_is_refused():
    with pytest.raises(BridgeError, check=naming("a/b")):
        attnplug_transformers.register("a/b", BackendRequest())


def test_another_version_of_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(type(HOST), "installed", lambda self: "4.57.6")
    with pytest.raises(BridgeError, check=naming("4.57.6", ">=5.17,<5.24", "pip install")):
        registration.check_version()


def test_rows_of_padding_and_unwritten_rows_are_never_read():
    """NaN in each of them, and in every page that is used later."""
    attention = AttentionFunction(BackendRequest("torch_native"))
    module = torch.nn.Identity()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, length, 16, generator=generator) for heads, length in ((4, 3), (2, 90), (2, 90)))
    valid = torch.ones(2, 70, dtype=torch.bool)
    valid[1, :11] = False
    hidden = ~torch.nn.functional.pad(valid, (0, 20))
    poisoned = [tensor.masked_fill(hidden[:, None, :, None], torch.nan) for tensor in (k, v)]
    for poison in (False, True):
        step = step_mask(2, 3, 90, torch.tensor(67), 0, causal_mask_function, valid)
        out, _ = attention(module, q, *poisoned, step)
        if not poison:
            (pages,) = attention._store._pages.values()
            pages.pool.keys(0).fill_(torch.nan)
            pages.pool.values(0).fill_(torch.nan)
    for request in range(2):
        rows = valid[request].nonzero()[:, 0]
        keys, values = (t[request][:, rows].double().repeat_interleave(2, 0) for t in (k, v))
        logits = q[request].double() @ keys.mT / 4
        seen = torch.ones(3, rows.numel(), dtype=torch.bool).tril(rows.numel() - 3)
        expected = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ values
        torch.testing.assert_close(out[request].transpose(0, 1).double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", [True, False])
def test_a_step_whose_start_only_a_gpu_knows_is_planned_alike(padding):
    """A static cache on a GPU has a tensor as its start; no run on a CPU has one."""
    request, module = BackendRequest("torch_native"), torch.nn.Identity()
    q, k, v = (torch.randn(2, heads, length, 16) for heads, length in ((4, 3), (2, 90), (2, 90)))
    k[:, :, 70:], v[:, :, 70:] = torch.nan, torch.nan  # not written yet
    valid = torch.arange(90) < 70
    valid = torch.stack([valid, valid & (torch.arange(90) >= 11)]) if padding else None
    found = [
        AttentionFunction(request)(module, q, k, v, PaddedStep(2, 3, 90, n, None, valid))[0]
        for n in (67, torch.tensor(67))
    ]
    assert torch.equal(*found)


def test_pages_are_made_for_all_tokens_of_a_step():
    assert step_mask(3, 4, 9, 5).limits == Limits(3, 12, 9)
    for more in (Limits(4, 12, 9), Limits(3, 13, 9), Limits(3, 12, 10)):
        assert not fits(more, Limits(3, 12, 9)) and fits(Limits(3, 12, 9), more)


def test_tensors_of_another_type_have_pages_of_their_own():
    attention = AttentionFunction(BackendRequest("torch_native"))
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.zeros(1, 2, 1, 16, dtype=dtype)
        attention(torch.nn.Identity(), q, q, q, step_mask(1, 1, 1))
    assert [pages.pool.dtype for pages in attention._store._pages.values()] == ["float32", "bfloat16"]


def test_the_problem_has_the_compute_capability_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 3))
    assert problem_of(load_model("tiny:llama"), torch.device("cuda"), torch.float32, None, None).sm == 103


def test_the_host_is_described_without_torch_or_transformers():
    code = "import sys, attnplug_transformers_host as host; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_latent_layers_reach_a_backend_as_mha_and_linear_layers_do_not():
    problem = problem_of(load_model("tiny:deepseek_v3"), torch.device("cpu"), torch.float32, None, None)
    assert not HOST.refuse(problem)
    (kind,) = {layer.kind for layer in HOST.fit(problem).model.layers}
    assert kind == "mha"


def test_settings_are_spelled_as_in_transformers():
    assert HOST.render("attention_backend") == 'attn_implementation="attnplug:…"'
    assert HOST.render("page_size") == "ContinuousBatchingConfig(page_size=…)"
    assert HOST.render("speculative_tokens") is None


def test_explain_and_the_run_refuse_alike(tmp_path):
    """For one backend and model, ``explain`` gives the reasons before loading that the first step would give."""
    CONFIGS["llama"].save_pretrained(tmp_path)
    read = load_model(str(tmp_path))
    problem = problem_of(read, torch.device("cpu"), torch.float32, None, CacheLayout.TOKEN_MAJOR)
    choices = explain(load_registry(), BackendRequest("triton_mha"), HOST.fit(problem)).choices.values()
    printed = {refusal.format(HOST.render) for choice in choices for refusal in choice.candidates[0].refusals}
    made = model("llama")
    made.set_attn_implementation("attnplug:triton_mha")
    with pytest.raises(BridgeError) as refused:
        made(torch.ones(1, 4, dtype=torch.long))
    assert printed and all(reason in str(refused.value) for reason in printed)
