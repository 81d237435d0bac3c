"""Models with linear attention against transformers on the same checkpoint, on a linear backend written as loops.

The oracle is transformers' forward over the whole sequence. Its one-token path is another computation in some of these
models: Nemotron-H bounds the time step only in the former, and MiniMax cannot continue by several tokens.
"""

from __future__ import annotations

import json

import pytest
import torch
from naive_linear import WholeDeltaBackend
from ring_reference import ring_logits
from safetensors.torch import load_file, save_file
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug import BackendError, ForwardMode
from attnplug.host import TINY_CONFIGS, KVPools, ModelAttention, ModelConfigError
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import MissingTensor
from attnplug_engine.models.architectures import build_model, load_model
from attnplug_engine.models.lightning_attention import alibi_slopes
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_testing.errors import having, missing_values, naming

DECODED = 6
TOLERANCE = 1e-4  # of the largest logit: these models amplify rounding, and transformers differs from itself as much
NAMES = ("kimi_linear", "qwen3_next", "qwen3_5_text", "minimax", "mamba2", "nemotron_h")
RING = "ring_linear"  # which transformers does not have
GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
MODELS = {
    **{name: (name, {}) for name in NAMES},
    "kimi_linear with a query rank, biases and groups": (
        "kimi_linear",
        {"q_lora_rank": 24, "attention_bias": True, "num_local_experts": 8, "norm_topk_prob": False, **GROUPS},
    ),
    "kimi_linear with other dense layers": ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"]}),
    "qwen3_next with as many key heads, another convolution": (
        "qwen3_next",
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 24, "attention_bias": True},
    ),
    "qwen3_next with dense layers": (
        "qwen3_next",
        {"mlp_only_layers": [2], "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen3_5_text with half of a head rotated, tied": (
        "qwen3_5_text",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
            "linear_value_head_dim": 24,
        },
    ),
    "minimax with weighed sums and a window": (
        "minimax",
        {
            "sliding_window": 9,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 0.7,
            "full_attn_alpha_factor": 0.8,
            "full_attn_beta_factor": 1.2,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.6,
        },
    ),
    "minimax with a partial rotary factor, which transformers ignores": ("minimax", {"partial_rotary_factor": 0.5}),
    "mamba2 with one group, biases and a bounded step": (
        "mamba2",
        {"n_groups": 1, "use_bias": True, "use_conv_bias": False, "time_step_limit": [0.01, 0.05]},
    ),
    "nemotron_h with groups of experts, biases": (
        "nemotron_h",
        {"n_routed_experts": 8, "mlp_bias": True, "use_bias": True, "routed_scaling_factor": 2.5, **GROUPS},
    ),
    "nemotron_h with latent experts, a coarse step": (
        "nemotron_h",
        {"moe_latent_size": 24, "time_step_min": 0.05, "use_conv_bias": False},
    ),
}


@pytest.fixture
def prompts():
    """Three requests of different lengths; their last tokens will be decoded one by one."""
    random = torch.Generator().manual_seed(11)
    return [torch.randint(0, 128, (length + DECODED,), generator=random).tolist() for length in (13, 1, 21)]


def loaded_from(oracle, **arguments):
    return load_model(str(oracle.folder), dtype=torch.float32, device="cpu", **arguments)


def assert_equal(found, wanted):
    assert wanted.abs().max() > 3  # nearly flat logits would hide a wrong layer
    assert_close(found, wanted, atol=TOLERANCE * float(wanted.abs().max()), rtol=0)


def in_chunks(stage, sequences, sizes):
    """Logits of whole sequences. Each step takes the next ``size`` tokens of every sequence that has some left."""
    parts = [[] for _ in sequences]
    start = 0
    for size in sizes:
        tokens = [sequence[start : start + size] for sequence in sequences]
        decode = all(len(new) == 1 for new in tokens)
        logits = stage.step(tokens, ForwardMode.DECODE if decode else ForwardMode.EXTEND)
        for part, new in zip(parts, logits, strict=True):
            part.append(new)
        start += size
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.sample(5)
def test_logits_equal_those_of_transformers(case, make_oracle, shared_oracle, make_stage, prompts):
    model_type, changes = MODELS[case]
    oracle = make_oracle(model_type, **changes) if changes else shared_oracle(model_type)
    found = make_stage(loaded_from(oracle), len(prompts)).run(prompts, DECODED)
    for tokens, logits in zip(prompts, found, strict=True):
        assert_equal(logits, oracle.logits(tokens))


@pytest.mark.parametrize("name", ["kimi_linear", "qwen3_next", "qwen3_5_text"])
def test_a_backend_may_run_a_whole_layer_of_the_delta_rule(name, shared_oracle, make_stage, prompts):
    """Decodes at once and extends by parts, over the same states."""
    oracle = shared_oracle(name)
    loaded, made = loaded_from(oracle), []
    stage = make_stage(loaded, len(prompts), lambda pool: made.append(WholeDeltaBackend(pool)) or made[0])
    found = stage.run(prompts, DECODED)
    assert made[0].whole == DECODED * len(loaded.spec.linear_layers)
    for tokens, logits in zip(prompts, found, strict=True):
        assert_equal(logits, oracle.logits(tokens))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_chunks_of_any_size_give_the_logits_of_the_whole_prompt(name, shared_oracle, make_stage, prompts):
    oracle = shared_oracle(name)
    loaded = loaded_from(oracle)
    tokens = prompts[2]
    wanted = oracle.logits(tokens)
    (whole,) = make_stage(loaded, 1).step([tokens])
    assert_equal(whole, wanted)
    # Shorter than the convolution, longer, a single token between, and then one by one.
    (chunked,) = in_chunks(make_stage(loaded, 1), [tokens], [2, 7, 1, 3, 5] + [1] * (len(tokens) - 18))
    assert_equal(chunked, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_requests_of_one_batch_end_and_start_apart(name, shared_oracle, make_stage, prompts):
    """In one step some requests extend by a chunk, some by one token, and some by none."""
    oracle = shared_oracle(name)
    stage = make_stage(loaded_from(oracle), 2)
    first, second = prompts[0], prompts[2]
    steps = [(first[:5], []), (first[5:6], second[:9]), ([], second[9:10]), (first[6:], second[10:])]
    found = [stage.step(list(new)) for new in steps]
    for request, tokens in enumerate((first, second)):
        assert_equal(torch.cat([logits[request] for logits in found]), oracle.logits(tokens))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(2)
def test_a_tiny_model_is_the_one_that_transformers_loads_from_what_it_saves(name, tmp_path, make_stage, prompts):
    from transformers import AutoModelForCausalLM

    source = RandomCheckpoint.tiny(f"tiny:{name}", seed=3)
    loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", seed=3)
    build_model(source, loaded.spec, dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    (found,) = make_stage(loaded, 1).run(prompts[:1], DECODED)
    with torch.inference_mode():
        assert_equal(found, oracle(torch.tensor(prompts[:1])).logits[0])


@pytest.fixture
def ring_tensors(tmp_path):
    """The tensors of ``tiny:ring_linear``, by name."""
    source = RandomCheckpoint.tiny(f"tiny:{RING}")
    spec = load_model(f"tiny:{RING}", dtype=torch.float32, device="cpu").spec
    build_model(source, spec, dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("size", [1, 2])
def test_ring_gives_the_logits_of_its_equations(size, ring_tensors, make_stage, prompts):
    def run(parallel):
        loaded = load_model(f"tiny:{RING}", dtype=torch.float32, device="cpu", parallel=parallel)
        return make_stage(loaded, len(prompts)).run(prompts, DECODED)

    wanted = [ring_logits(ring_tensors, TINY_CONFIGS[RING], tokens).float() for tokens in prompts]
    for found in in_ranks(size, run):
        for logits, expected in zip(found, wanted, strict=True):
            assert_equal(logits, expected)


def test_slopes_of_heads_that_are_no_power_of_two():
    assert_close(alibi_slopes(4), torch.tensor([2**-2, 2**-4, 2**-6, 2**-8]))
    assert_close(alibi_slopes(6), torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]))


@pytest.mark.parametrize("name", [*NAMES, RING])
@pytest.mark.sample(2)
def test_a_state_that_is_lost_changes_the_logits(name, make_stage, prompts):
    """Shows that the tests above can fail: the linear layers' states reach far enough back to matter."""
    loaded = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu")
    kept, lost = make_stage(loaded, 1), make_stage(loaded, 1)
    for stage in (kept, lost):
        stage.step([prompts[2][:-1]])
    for state in lost.states():
        state[lost.slots] = 0
    right, wrong = (stage.step([prompts[2][-1:]], ForwardMode.DECODE)[0] for stage in (kept, lost))
    assert (right - wrong).abs().max() > 0.05 * right.abs().max()


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in NAMES), ("kimi_linear", 4)])
@pytest.mark.sample(2)
def test_every_rank_gets_the_logits_of_one_process(name, size, shared_oracle, make_stage, prompts):
    oracle = shared_oracle(name)

    def run(parallel):
        return make_stage(loaded_from(oracle, parallel=parallel), 2).run(prompts[:2], DECODED)

    wanted = [oracle.logits(tokens) for tokens in prompts[:2]]
    for found in in_ranks(size, run):
        for logits, expected in zip(found, wanted, strict=True):
            assert_equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "size", "what"),
    [
        ("mamba2", 3, "linear-attention heads"),
        ("nemotron_h", 4, "norm groups"),
        ("qwen3_next", 8, "linear-attention heads"),
    ],
)
def test_a_model_that_ranks_cannot_divide_is_refused(name, size, what):
    with pytest.raises(ParallelError, check=having(what=what, size=size)):
        load_model(f"tiny:{name}", dtype=torch.float32, device="cpu", parallel=Threads(size).rank(0))


def test_a_rank_holds_its_part_of_the_state():
    ranks = [Threads(size).rank(0) for size in (1, 2, 4)]
    loaded = [load_model("tiny:qwen3_next", dtype=torch.float32, device="cpu", parallel=rank) for rank in ranks]
    dims = [model.spec.layers[0].linear for model in loaded]
    assert [(d.heads, d.key_heads, d.conv_channels) for d in dims] == [(4, 2, 128), (2, 1, 64), (1, 1, 48)]


def test_a_sum_that_the_config_wants_in_float32_is_kept_in_it(make_stage, prompts):
    kept = []
    loaded = load_model("tiny:mamba2", dtype=torch.bfloat16, device="cpu")
    for block in loaded.module.layers:
        block.register_forward_hook(lambda module, inputs, output: kept.append(output.dtype))
    make_stage(loaded, 1).step([prompts[0][:6]])
    assert set(kept) == {torch.float32}


def test_bfloat16_logits_are_close_to_float32(make_stage, prompts):
    for name in (*NAMES, RING):
        runs = []
        for dtype in (torch.float32, torch.bfloat16):
            loaded = load_model(f"tiny:{name}", dtype=dtype, device="cpu")
            runs.append(make_stage(loaded, 1).step([prompts[0][:6]])[0])
        # Where rounding sends a token to another expert its logits are others, in transformers just so.
        assert torch.nn.functional.cosine_similarity(runs[0], runs[1], dim=-1).median() > 0.9, name


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("kimi_linear", "model.layers.1.self_attn.k_conv1d.weight", [64, 1, 4]),
        ("qwen3_next", "model.layers.0.linear_attn.conv1d.weight", [128, 1, 4]),
        ("mamba2", "backbone.layers.1.mixer.conv1d.bias", [192]),
    ],
)
def test_a_missing_tensor_is_named_with_its_shape(name, tensor, shape, make_oracle):
    oracle = make_oracle(name)
    file = oracle.folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[tensor]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(MissingTensor) as caught:
        loaded_from(oracle)
    assert (caught.value.tensor, caught.value.files) == (tensor, ("model.safetensors",))
    assert not missing_values(str(caught.value), shape, oracle.folder)


def test_kimi_loads_from_the_names_and_keys_that_it_was_published_with(make_oracle, make_stage, prompts):
    """There a dense layer is under "mlp", and the linear layers are listed from 1, in a section of their own."""
    oracle = make_oracle("kimi_linear")
    wanted = make_stage(loaded_from(oracle), 1).step(prompts[:1])[0]
    file = oracle.folder / "model.safetensors"
    dense = "layers.0.block_sparse_moe"
    save_file({name.replace(dense, "layers.0.mlp"): tensor for name, tensor in load_file(file).items()}, file)
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    linear = {key: config.pop(f"linear_{flat}") for key, flat in (("head_dim", "head_dim"), ("num_heads", "num_heads"))}
    linear["short_conv_kernel_size"] = config.pop("linear_conv_kernel_dim")
    del config["layer_types"], config["mlp_layer_types"]
    config |= {"linear_attn_config": {**linear, "kda_layers": [1, 2, 3, 5], "full_attn_layers": [4]}}
    path.write_text(json.dumps({**config, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid"}))
    assert torch.equal(make_stage(loaded_from(oracle), 1).step(prompts[:1])[0], wanted)


def test_nemotron_loads_from_the_pattern_of_old_configs(make_oracle, make_stage, prompts):
    oracle = make_oracle("nemotron_h")
    wanted = make_stage(loaded_from(oracle), 1).step(prompts[:1])[0]
    path = oracle.folder / "config.json"
    config = json.loads(path.read_text())
    del config["layers_block_type"]
    path.write_text(json.dumps({**config, "hybrid_override_pattern": "MEM*-"}))
    assert torch.equal(make_stage(loaded_from(oracle), 1).step(prompts[:1])[0], wanted)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("kimi_linear", {"num_experts": 5}, "num_experts"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ("mamba2", {"time_step_limit": [1.0]}, "time_step_limit"),
        ("mamba2", {"hidden_act": "relu"}, "hidden_act"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (RING, {"partial_rotary_factor": 1.0}, "qk_rope_head_dim"),
        (RING, {"score_function": "softmax"}, "score_function"),
    ],
)
def test_a_config_that_the_engine_does_not_compute_is_refused(name, changes, key):
    config = {**TINY_CONFIGS[name], **({"n_routed_experts": 4} if "num_experts" in changes else {}), **changes}
    spec = load_model(f"tiny:{name}", dtype=torch.float32, device="cpu").spec
    with pytest.raises(ModelConfigError, check=having(key=key)):
        build_model(RandomCheckpoint(config), spec, dtype=torch.float32, device="cpu")


def test_a_linear_layer_without_a_pool_of_states_says_what_is_missing(make_stage, idle):
    stage = make_stage(load_model("tiny:mamba2", dtype=torch.float32, device="cpu"), 1)
    without = ModelAttention(stage.backend, KVPools())
    with pytest.raises(BackendError, check=naming("layer 0")), without.running():
        stage.module(idle.input_ids, idle.positions, idle)
