"""Reading of checkpoints, refusals with their messages, and random weights with the same interface."""

from __future__ import annotations

import json
import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnplug import UsageError
from attnplug.host import TINY_CONFIGS, ModelConfigError
from attnplug_engine import Engine
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import (
    INDEX_FILE,
    Checkpoint,
    CheckpointError,
    MissingTensor,
    UnusedTensors,
    WrongDtype,
    WrongShape,
)
from attnplug_engine.models.architectures import build_model, load_model
from attnplug_testing.errors import having, naming

NORM = "model.layers.1.input_layernorm.weight"


def load(folder):
    return load_model(str(folder), dtype=torch.float32, device="cpu")


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint of tiny:llama."""
    return saved("llama", tmp_path / "model")


def saved(name, folder):
    source = RandomCheckpoint.tiny(f"tiny:{name}")
    build_model(source, load_model(f"tiny:{name}", dtype=torch.float32, device="cpu").spec,
                dtype=torch.float32, device="cpu")  # fmt: skip
    source.save(folder)
    return folder


def rewrite(folder, change):
    """Save the tensors again after ``change`` has had its way with them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_keys(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def parameters(loaded):
    return dict(loaded.module.named_parameters())


# ---- what is read ----


def test_a_sharded_checkpoint_is_the_same_model(make_oracle):
    whole = load(make_oracle("deepseek_v3", "whole").folder)
    oracle = make_oracle("deepseek_v3", "shards", max_shard_size="100KB")
    assert len(Checkpoint.open(oracle.folder).files) > 3
    shards = parameters(load(oracle.folder))
    assert shards.keys() == parameters(whole).keys()
    for name, parameter in parameters(whole).items():
        assert torch.equal(parameter, shards[name]), name


def test_only_the_rows_and_columns_asked_for_are_returned(folder):
    name, shape = "model.layers.0.self_attn.o_proj.weight", (64, 64)
    checkpoint = Checkpoint.open(folder)
    whole = checkpoint.tensor(name, shape)
    part = checkpoint.tensor(name, shape, rows=slice(3, 9), columns=slice(16, 48))
    assert torch.equal(part, whole[3:9, 16:48])
    assert torch.equal(checkpoint.tensor(name, shape, columns=slice(0, 5)), whole[:, :5])
    assert torch.equal(checkpoint.tensor(NORM, (64,), rows=slice(2, 4)), checkpoint.tensor(NORM, (64,))[2:4])


def test_the_config_file_stands_for_its_folder(folder):
    assert parameters(load(folder / "config.json")).keys() == parameters(load(folder)).keys()
    set_keys(folder, tie_word_embeddings=True)
    (folder / "config.json").rename(folder / "tied.json")
    assert load(folder / "tied.json").config["tie_word_embeddings"]


def test_weights_stay_as_they_are_when_the_file_changes(folder):
    loaded = load(folder)
    before = loaded.module.embedding.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(0)
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    assert torch.equal(loaded.module.embedding, before)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"])
def test_frequencies_in_a_checkpoint_are_harmless(folder, name):
    before = parameters(load(folder))
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    after = parameters(load(folder))
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_stored_head_wins_over_a_config_that_ties_it(folder):
    """transformers does not tie a head either if the checkpoint stores other numbers for it."""
    from transformers import AutoModelForCausalLM

    set_keys(folder, tie_word_embeddings=True)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    module = load(folder).module
    assert torch.equal(module.head.weight, load_file(folder / "model.safetensors")[HEAD])
    assert torch.equal(module.head.weight, oracle.lm_head.weight)
    assert torch.equal(module.embedding, oracle.get_input_embeddings().weight)


def test_a_second_copy_of_a_tied_head_is_harmless(folder):
    set_keys(folder, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    module = load(folder).module
    assert module.head.weight.data_ptr() == module.embedding.data_ptr()


def test_a_tied_embedding_may_be_stored_as_the_head(folder):
    set_keys(folder, tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.pop(EMBEDDING))
    module = load(folder).module
    assert torch.equal(module.embedding, load_file(folder / "model.safetensors")[HEAD])
    assert module.head.weight.data_ptr() == module.embedding.data_ptr()


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_for_multi_token_prediction_are_left_behind(tmp_path, key):
    folder = saved("deepseek_v3", tmp_path / "model")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(8)}))
    set_keys(folder, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(UnusedTensors, check=having(tensors=("model.layers.3.eh_proj.weight",))):
        load(folder)
    for count in (1, 10**9):
        set_keys(folder, **{key: count})
        load(folder)


# ---- what is refused ----


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(UsageError, check=having(source=str(tmp_path / "nowhere"))):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, check=having(file=str(tmp_path / "nowhere"))):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, check=having(file=str(tmp_path / "file"))):
        Checkpoint.open(tmp_path / "file")


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, check=having("model.safetensors", file=str(folder / "config.json"))):
        Checkpoint.open(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "1" * 5000])
def test_a_config_that_is_not_a_json_object(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert caught.value.file == str(folder / "config.json")


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, check=having("config.json", file=str(folder / "model.safetensors"))):
        load(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "pytorch_model.bin.index.json"]
)
def test_pickle_is_never_loaded(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, check=naming(name)) as caught:
        load(folder)
    assert caught.value.file == str(folder / name)


def test_a_shard_that_is_not_there(make_oracle):
    folder = make_oracle("llama", max_shard_size="50KB").folder
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, check=naming(gone.name)) as caught:
        load(folder)
    assert caught.value.file == str(gone)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../other"}},
                                   {"weight_map": {"a": 3}}, {"weight_map": {"a": "x" * 5000}},
                                   {"weight_map": {"a": "x\0y"}}, {"weight_map": {"a": "\ud800"}},
                                   {"weight_map": {"a": ""}}, "[" * 100_000,
                                   '{"weight_map": ' + "9" * 5000 + "}"])  # fmt: skip
def test_a_malformed_index(folder, index):
    (folder / "model.safetensors").unlink()
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable() and "folder: ;" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, check=having(file=str(folder / name))):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"hidden_size": 1 << 30, "head_dim": 16}),
        ("llama", {"intermediate_size": 1 << 30}),
        ("llama", {"vocab_size": 1 << 30}),
        ("deepseek_v3", {"n_routed_experts": 1 << 30}),
        ("deepseek_v3", {"moe_intermediate_size": 1 << 30}),
        ("nemotron_h", {"n_routed_experts": 1 << 30}),
    ],
)
def test_absurd_sizes_are_compared_with_the_weights_before_memory_is_asked_for(tmp_path, monkeypatch, name, keys):
    folder = saved(name, tmp_path / "model")
    set_keys(folder, **keys)
    allocate = torch.Tensor.new_empty

    def bounded(tensor, *shape, **settings):
        assert math.prod(shape) < 1 << 30
        return allocate(tensor, *shape, **settings)

    monkeypatch.setattr(torch.Tensor, "new_empty", bounded)
    with pytest.raises((WrongShape, MissingTensor)):
        load(folder)


def test_an_index_that_promises_what_a_shard_does_not_hold(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors").keys()
    rewritten = {key: value for key, value in load_file(folder / "part.safetensors").items() if key != NORM}
    save_file(rewritten, folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingTensor, check=naming("[64]")) as caught:
        load(folder)
    assert (caught.value.tensor, caught.value.file) == (NORM, str(folder / "part.safetensors"))


@pytest.mark.parametrize("content", ["truncated", "empty", "text"])
def test_a_file_that_is_not_safetensors(folder, content):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-100], "empty": b"", "text": b"version https://git-lfs"}[content])
    pattern = r"model\.safetensors \(\d+ bytes\) cannot be read as safetensors"
    with pytest.raises(CheckpointError, match=pattern) as caught:
        load(folder)
    assert caught.value.file == str(path)


def test_a_truncated_shard_is_found_before_weights_are_read(folder):
    """E5."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(tensors)}
    for name, file in files.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    assert Checkpoint.open(folder).files == tuple(sorted(files.values()))
    last = folder / files[NORM]
    last.write_bytes(last.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="is truncated or not safetensors", check=having(file=str(last))):
        Checkpoint.open(folder)


def test_a_tensor_that_is_missing(folder):
    rewrite(folder, lambda tensors: tensors.pop(NORM))
    pattern = (
        rf"no tensor '{re.escape(NORM)}'.* \[64\]; searched: model\.safetensors; the closest it has: 'model.layers"
    )
    with pytest.raises(MissingTensor, match=pattern) as caught:
        load(folder)
    assert (caught.value.tensor, caught.value.files) == (NORM, ("model.safetensors",))


def test_an_untied_head_must_be_there(folder):
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(MissingTensor, check=having(tensor="lm_head.weight")):
        load(folder)


def test_a_tensor_of_another_shape(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(95, 64)}))
    with pytest.raises(WrongShape) as caught:
        load(folder)
    assert (caught.value.found, caught.value.expected) == ((95, 64), (96, 64))
    assert (caught.value.tensor, caught.value.file) == (name, str(folder / "model.safetensors"))


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_a_tensor_of_quantised_codes(folder, dtype, name):
    key = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({key: torch.zeros(96, 64).to(dtype)}))
    with pytest.raises(WrongDtype, check=naming("BF16")) as caught:
        load(folder)
    assert caught.value.found == name


def test_a_checkpoint_in_an_unknown_quantization_scheme(folder):
    set_keys(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ModelConfigError, check=having(key="quantization_config.quant_method")):
        load(folder)


def test_tensors_that_no_module_takes(folder):
    names = ["model.layers.0.self_attn.q_norm.weight", "model.layers.2.mlp.up_proj.weight"]
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(4) for name in names}))
    with pytest.raises(UnusedTensors) as caught:
        load(folder)
    assert sorted(caught.value.tensors) == names


@pytest.mark.parametrize(
    ("name", "keys", "key"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor"),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.type"),
        ("llama", {"rope_scaling": {"type": "su"}, "rope_parameters": {"rope_type": "default"}}, "rope_scaling.type"),
        ("llama", {"rope_scaling": {"rope_type": None, "type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}}, "rope_scaling.rope_theta"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_parameters.rope_theta"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        (
            "llama",
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "partial_rotary_factor",
        ),
        ("llama", {"is_causal": False}, "is_causal"),
        ("deepseek_v3", {"is_causal": False}, "is_causal"),
        # Keys that transformers ignores in these models. Core reads them for models of other types.
        ("llama", {"sliding_window": 9}, "sliding_window"),
        ("llama", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping"),
        ("qwen3", {"attention_multiplier": 0.9}, "attention_multiplier"),
        ("minimax", {"query_pre_attn_scalar": 4}, "query_pre_attn_scalar"),
        ("ring_linear", {"group_norm_size": 3}, "group_norm_size"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"attention_multiplier": 0.9}, "attention_multiplier"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "rope_parameters.sliding_attention.factor",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"sliding_window": 9}, "sliding_window"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("mixtral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        *((name, {"sliding_window_pattern": 3}, "sliding_window_pattern") for name in ("mixtral", "gemma2", "gpt_oss")),
        ("mixtral", {"num_experts": 3}, "num_experts"),
        ("olmo2", {"sliding_window": 9}, "sliding_window"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling.short_factor"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, "layer_types"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 2}, "n_group"),
        ("deepseek_v3", {"n_group": 2, "num_experts_per_tok": 3}, "topk_group"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ],
)
def test_what_a_config_asks_for_and_the_model_cannot_do(tmp_path, name, keys, key):
    folder = saved(name, tmp_path / "model")
    set_keys(folder, **keys)
    with pytest.raises(ModelConfigError) as caught:
        load(folder)
    assert caught.value.key == key


@pytest.mark.parametrize("name", ["mamba2", "llama"])
def test_a_context_that_a_config_only_claims_costs_no_memory(tmp_path, name):
    folder = saved(name, tmp_path / "model")
    set_keys(folder, max_position_embeddings=1 << 30)
    runner = Engine(str(folder), device="cpu", num_pages=None if name == "mamba2" else 64).runner
    assert runner.allocator.num_pages <= 1 << 21
    assert runner.table.max_pages <= 1 << 21


# ---- random weights ----


def test_random_weights_depend_on_seed_and_name_alone():
    first, second = RandomCheckpoint.tiny("tiny:llama"), RandomCheckpoint.tiny("tiny:llama")
    shapes = {"a.weight": (8, 4), "b.weight": (8, 4), "norm.weight": (8,), "b.bias": (8,)}
    found = {name: first.tensor(name, shape) for name, shape in shapes.items()}
    for name, shape in reversed(shapes.items()):
        assert torch.equal(second.tensor(name, shape), found[name])
    assert not torch.equal(found["a.weight"], found["b.weight"])
    assert not torch.equal(RandomCheckpoint.tiny("tiny:llama", seed=1).tensor("a.weight", (8, 4)), found["a.weight"])


def test_a_part_of_a_random_tensor_is_a_part_of_the_whole():
    source = RandomCheckpoint.tiny("tiny:llama")
    whole = source.tensor("a.weight", (8, 6))
    assert torch.equal(source.tensor("a.weight", (8, 6), rows=slice(2, 5), columns=slice(1, 3)), whole[2:5, 1:3])


def test_random_weights_have_the_size_that_the_config_says():
    source = RandomCheckpoint.tiny("tiny:llama")
    assert abs(source.tensor("a.weight", (256, 256)).std() - 0.25) < 0.01
    assert (source.tensor("model.norm.weight", (256,)) - 1).abs().max() < 0.2
    assert source.tensor("a.bias", (256,)).abs().max() < 0.2


def test_a_tiny_model_is_the_same_each_time_and_another_with_another_seed():
    first, again = (parameters(load_model("tiny:qwen3", dtype=torch.float32, device="cpu")) for _ in range(2))
    other = parameters(load_model("tiny:qwen3", dtype=torch.float32, device="cpu", seed=5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_a_tiny_model_that_does_not_exist():
    with pytest.raises(ModelConfigError, check=having("tiny:llama", source="tiny:lama")):
        RandomCheckpoint.tiny("tiny:lama")
    with pytest.raises(ModelConfigError, check=naming("initializer_range", "wide")):
        RandomCheckpoint({**TINY_CONFIGS["llama"], "initializer_range": "wide"})


def test_a_folder_without_weights_can_have_random_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIGS["llama"]))
    found = load_model(str(tmp_path), dtype=torch.float32, device="cpu", seed=5, random_weights=True)
    tiny = parameters(load_model("tiny:llama", dtype=torch.float32, device="cpu", seed=5))
    assert all(torch.equal(value, tiny[name]) for name, value in parameters(found).items())
    with pytest.raises(CheckpointError, check=having(file=str(tmp_path / "model.safetensors"))):
        load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_random_weights_still_need_a_config(tmp_path):
    with pytest.raises(UsageError, check=having(source=str(tmp_path))):
        Engine(str(tmp_path), random_weights=True, device="cpu")
