"""Models against transformers on the same checkpoint: same logits for prompts, after a prefix, and when decoding."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.testing import assert_close

from attnplug.hf.config_keys import Config
from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.models.architectures import ARCHITECTURES, UnknownArchitecture, build_model, load_model
from attnplug_engine.models.rope import HalfRotation, PairRotation, inverse_frequencies
from attnplug_testing.configs import TINY_YARN
from attnplug_testing.errors import naming

DECODED = 8
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "llama with linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama with yarn": ("llama", {**TINY_YARN, "rope_parameters": {**TINY_YARN["rope_parameters"], "mscale": None}}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 without query rank": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v2 with groups": ("deepseek_v2", {**GROUPS, "topk_method": "group_limited_greedy"}),
    "deepseek_v2 with yarn and scaled shares": (
        "deepseek_v2",
        {
            "max_position_embeddings": 256,
            "rope_parameters": {**TINY_YARN["rope_parameters"], "mscale": 0.707, "mscale_all_dim": 0.5},
            "routed_scaling_factor": 4.0,
            "n_shared_experts": 2,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 without query rank": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3 with biases": ("deepseek_v3", {"attention_bias": True}),
    "deepseek_v3 with biases, without query rank": ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}),
    "deepseek_v3 with yarn": ("deepseek_v3", TINY_YARN),
    "deepseek_v3 with groups": ("deepseek_v3", {**GROUPS, "norm_topk_prob": False}),
    "deepseek_v3 with half-split rope": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v32 that selects all": ("deepseek_v32", {"index_topk": 64}),
    "deepseek_v32 that selects few, with yarn and biases": (
        "deepseek_v32",
        {**TINY_YARN, "index_topk": 3, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {}),
    "glm_moe_dsa with an index in every layer": ("glm_moe_dsa", {"indexer_types": ["full"] * 4}),
}


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.sample(8)
def test_logits_equal_those_of_transformers(case, make_oracle, make_stage, sequences):
    model_type, changes = MODELS[case]
    oracle = make_oracle(model_type, **changes)
    loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu")
    found = make_stage(loaded, len(sequences)).run(sequences, DECODED)
    for tokens, logits in zip(sequences, found, strict=True):
        wanted = oracle.logits(tokens)
        assert wanted.abs().max() > 3  # nearly flat logits would hide a wrong attention
        assert_close(logits, wanted, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_tensors_without_elements_may_stay_unused(make_oracle, make_stage, sequences):
    """E5. transformers saves those of the MLP of no shared experts."""
    oracle = make_oracle("deepseek_v2", n_shared_experts=0)
    loaded = load_model(str(oracle.folder), dtype=torch.float32, device="cpu")
    (found,) = make_stage(loaded, 1).run(sequences[:1], DECODED)
    assert_close(found, oracle.logits(sequences[0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v3", "deepseek_v3 with half-split rope"])
@pytest.mark.sample(2)
def test_cached_latent_rows_are_those_of_transformers(case, make_oracle, make_stage, sequences):
    model_type, changes = MODELS[case]
    oracle = make_oracle(model_type, **changes)
    stage = make_stage(load_model(str(oracle.folder), dtype=torch.float32, device="cpu"), len(sequences))
    stage.run(sequences, DECODED)
    for request, tokens in enumerate(sequences):
        for layer_id, layer in enumerate(oracle.cache(tokens).layers):
            rows = torch.cat((layer.keys[0, 0], layer.values[0, 0]), dim=-1)
            assert_close(stage.latent_rows(layer_id, request), rows, atol=2e-5, rtol=1e-4)


SAVED = (
    *("llama", "qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "granite", "smollm3", "gpt_oss"),
    *("olmo2", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"),
)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.sample(2)
def test_a_tiny_model_is_the_one_that_transformers_loads_from_what_it_saves(name, tmp_path, make_stage, sequences):
    from transformers import AutoModelForCausalLM

    source = RandomCheckpoint.tiny(f"tiny:{name}", seed=3)
    loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", seed=3)
    build_model(source, loaded.spec, dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    (found,) = make_stage(loaded, 1).run(sequences[:1], DECODED)
    with torch.inference_mode():
        wanted = oracle(torch.tensor(sequences[:1])).logits[0]
    assert_close(found, wanted, atol=1e-4, rtol=0)


def test_logits_of_a_request_do_not_depend_on_the_others_of_its_batch(make_stage, sequences):
    loaded = load_model("tiny:deepseek_v3", dtype=torch.float32, device="cpu")
    alone = make_stage(loaded, 1).step([sequences[0]])[0]
    together = make_stage(loaded, 3).step(sequences)[0]
    assert_close(together, alone, atol=1e-5, rtol=0)


LINEAR = ("kimi_linear", "qwen3_next", "qwen3_5_text", "minimax", "mamba2", "nemotron_h", "ring_linear")


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "deepseek_v3", "glm_moe_dsa", *LINEAR])
def test_a_batch_without_requests_runs(name, make_stage, idle):
    stage = make_stage(load_model(f"tiny:{name}", dtype=torch.float32, device="cpu"), 1)
    assert stage.forward(idle).shape == (0, 128)


def test_rope_keys_of_old_configs_mean_the_same(make_oracle):
    oracle = make_oracle("deepseek_v3", **TINY_YARN)
    new = load_model(str(oracle.folder), dtype=torch.float32, device="cpu").module.rope
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": rope.pop("rope_type")}}
    path.write_text(json.dumps(config))
    old = load_model(str(oracle.folder), dtype=torch.float32, device="cpu").module.rope
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 200])
    assert torch.equal(old.at(positions).apply(x), new.at(positions).apply(x))


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_SHORT = [1.0, 1.5, 2.0, 2.5, 3.0, 9.0, 10.0, 11.0]
_LONGROPE = {"rope_type": "longrope", "short_factor": _SHORT, "long_factor": [4.0] * 8}
ROPE_KEYS = {
    "longrope": {"rope_scaling": {**_LONGROPE, "original_max_position_embeddings": 64}},
    "longrope with a factor": {"original_max_position_embeddings": 32, "rope_scaling": {**_LONGROPE, "factor": 3.0}},
    "longrope that does not scale": {"rope_scaling": {**_LONGROPE, "attention_factor": 1.0}},
    "yarn beside plain parameters": {"rope_scaling": _YARN, "rope_parameters": {"rope_type": "default"}},
    "plain scaling beside yarn": {"rope_scaling": {"type": "default"}, "rope_parameters": _YARN},
    "empty scaling beside yarn": {"rope_scaling": {}, "rope_parameters": _YARN},
    "both names of the type": {"rope_scaling": {**_YARN, "type": "linear"}},
    "theta outside, parameters without": {"rope_theta": 500.0, "rope_parameters": _YARN},
    "theta outside and inside": {"rope_theta": 500.0, "rope_parameters": {**_YARN, "rope_theta": 3e9}},
    "theta of the section that loses": {"rope_scaling": _YARN, "rope_parameters": {"rope_theta": 500.0}},
    "original length outside": {"original_max_position_embeddings": 32, "rope_scaling": _YARN},
    "no original length": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "a factor of null": {"rope_scaling": {**_YARN, "factor": None}},
    "attention factor": {"rope_scaling": {**_YARN, "attention_factor": 0.5}},
    "mscale": {"rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "mscale alone": {"rope_scaling": {**_YARN, "mscale": 0.707}},
    "not truncated": {"rope_scaling": {**_YARN, "truncate": None, "beta_fast": 16, "beta_slow": 2}},
    "llama3": {"rope_scaling": LLAMA3, "rope_parameters": _YARN},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3}, "rope_theta": 1e6},
}


@pytest.mark.parametrize("keys", ROPE_KEYS.values(), ids=ROPE_KEYS)
def test_rope_keys_in_every_combination_mean_what_they_mean_in_transformers(keys):
    """To the last bit: with long contexts it decides over an angle."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {**TINY_CONFIGS["llama"], "max_position_embeddings": 256, **keys}
    wanted = LlamaRotaryEmbedding(LlamaConfig.from_dict(copy.deepcopy(values)))
    frequencies, factor = inverse_frequencies(Config(values, "here", "llama"), 16)
    assert torch.equal(frequencies, wanted.inv_freq)
    assert factor == wanted.attention_scaling


@pytest.mark.parametrize("rotation", [HalfRotation, PairRotation])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [2, 3])
def test_rotation_in_place_is_the_same_rotation(rotation, dtype, offset):
    rows = torch.randn(5, 3, offset + 8).to(dtype)
    turn = rotation(torch.randn(5, 4), 1.5, dtype)
    wanted = turn.apply(rows[..., offset:])
    kept = rows[..., :offset].clone()
    turn.apply_(rows[..., offset:])
    assert torch.equal(rows[..., offset:], wanted)
    assert torch.equal(rows[..., :offset], kept)


def test_a_model_in_bfloat16_keeps_its_router_in_float32():
    loaded = load_model("tiny:deepseek_v3", dtype=torch.bfloat16, device="cpu")
    types = {name: parameter.dtype for name, parameter in loaded.module.named_parameters()}
    assert {name for name, dtype in types.items() if dtype is not torch.bfloat16} == {
        f"layers.{layer}.mlp.router.{name}" for layer in (1, 2) for name in ("weight", "bias")
    }


def test_bfloat16_logits_are_close_to_float32(make_stage, sequences):
    for name in ("llama", "deepseek_v2", "deepseek_v3", "gemma3_text", "gpt_oss", "granite", "olmo2"):
        runs = []
        for dtype in (torch.float32, torch.bfloat16):
            loaded = load_model(f"tiny:{name}", dtype=dtype, device="cpu")
            runs.append(make_stage(loaded, 1).step([sequences[0][:6]])[0])
        alike = torch.nn.functional.cosine_similarity(runs[0], runs[1], dim=-1).sort().values
        assert alike[1] > 0.99, name  # one token may go to another expert, by a router's near tie


def test_weights_need_no_gradient_and_are_fused():
    module = load_model("tiny:llama", dtype=torch.float32, device="cpu").module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes["layers.0.attention.qkv.weight"] == ((4 + 2 + 2) * 16, 64)
    assert shapes["layers.0.mlp.gate_up.weight"] == (2 * 96, 64)


def test_a_tied_head_shares_the_memory_of_the_embedding(make_oracle):
    oracle = make_oracle("llama", tie_word_embeddings=True)
    module = load_model(str(oracle.folder), dtype=torch.float32, device="cpu").module
    assert module.head.weight.data_ptr() == module.embedding.data_ptr()


def test_an_unknown_architecture_is_refused_with_those_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "model_type": "gemma"}))
    with pytest.raises(UnknownArchitecture, check=naming(str(tmp_path), "gemma", "deepseek_v3")) as caught:
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    assert caught.value.model_type == "gemma"
    assert caught.value.known == tuple(ARCHITECTURES)
