"""Reading models: what each family's config says about its layers, and every way in which a config can be wrong.

Expected numbers are worked out by hand from the published configs; no formula is shared with the code.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import UsageError
from attnplug.model import AttentionKind, Feature, LayerSpec, LinearDims, MLADims, ModelSpec
from attnplug.model_config import UNBOUNDED_CONTEXT, ModelConfigError, load_model, model_from_config
from attnplug.tiny import TINY_CONFIGS

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
YARN_40 = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_scaling": YARN_40,
    "torch_dtype": "bfloat16",
}
QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262144,
}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 72,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL,
        "kda_layers": [number for number in range(1, 28) if number not in KIMI_FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}
NEMOTRON_H_8B: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
}


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    return model_from_config({**config, **changes}, "a-model")


def near(value: float) -> Any:
    """Equal to ``value``, given to seven digits."""
    return pytest.approx(value, rel=1e-6)


def refused(config: dict[str, Any], key: str, **changes: Any) -> str:
    with pytest.raises(ModelConfigError) as caught:
        read(config, **changes)
    assert caught.value.key == key
    assert caught.value.source == "a-model"
    assert repr(key) in str(caught.value)
    return str(caught.value)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.sliding_window for layer in spec.layers]


# ---- softmax ----


def test_llama_is_grouped_query_attention() -> None:
    spec = read(LLAMA_3_8B)
    assert (spec.name, spec.model_type, spec.context_length, spec.dtype) == ("a-model", "llama", 8192, "bfloat16")
    assert [layer.layer_id for layer in spec.layers] == list(range(32))
    assert spec.layers[31] == LayerSpec(31, AttentionKind.MHA, 32, 8, 128, 128, near(0.08838835))


@pytest.mark.parametrize("absent", [{}, {"num_key_value_heads": None, "head_dim": None}])
def test_kv_heads_and_head_dim_default_when_absent_or_null(absent: dict[str, Any]) -> None:
    layer = read(without(LLAMA_3_8B, "num_key_value_heads"), **absent).layers[0]
    assert (layer.num_kv_heads, layer.head_dim) == (32, 128)


def test_head_dim_wins_over_hidden_size() -> None:
    assert read(LLAMA_3_8B, head_dim=96).layers[0].head_dim == 96


def test_an_unknown_model_type_is_read_by_the_standard_keys() -> None:
    assert read(LLAMA_3_8B, model_type="from_next_year").layers == read(LLAMA_3_8B).layers


def test_mistral_slides_in_every_layer() -> None:
    assert windows(read(LLAMA_3_8B, model_type="mistral", sliding_window=4096)) == [4096] * 32
    assert windows(read(LLAMA_3_8B, model_type="mistral", sliding_window=None)) == [None] * 32
    assert windows(read(LLAMA_3_8B, model_type="mistral")) == [4096] * 32  # what transformers' class assumes


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_slides_only_when_switched_on_and_only_in_upper_layers(model_type: str) -> None:
    config = {**LLAMA_3_8B, "model_type": model_type, "sliding_window": 1024, "max_window_layers": 28}
    assert windows(read(config)) == [None] * 32
    assert windows(read(config, use_sliding_window=False)) == [None] * 32
    assert windows(read(config, use_sliding_window=True)) == [None] * 28 + [1024] * 4


def test_layer_types_win_over_every_other_rule_for_windows() -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    spec = read(LLAMA_3_8B, model_type="gemma2", sliding_window=64, sliding_window_pattern=6, layer_types=kinds)
    assert windows(spec) == [None, 64] * 16


def test_gemma2_slides_in_even_layers_and_caps_its_logits() -> None:
    config = {
        "model_type": "gemma2",
        "hidden_size": 4608,
        "num_hidden_layers": 46,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 4096,
    }
    spec = read(config)
    assert windows(spec) == [4096, None] * 23
    assert spec.layers[0].scale == pytest.approx(1 / 12)
    assert {layer.logit_cap for layer in spec.layers} == {50.0}
    assert spec.layers[0].features == {Feature.SLIDING_WINDOW, Feature.LOGIT_CAP}


def test_gemma3_multimodal_config_that_leaves_most_keys_to_its_class() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    spec = read({"model_type": "gemma3", "text_config": text, "vision_config": {}, "torch_dtype": "bfloat16"})
    assert (spec.model_type, spec.context_length, spec.dtype) == ("gemma3_text", 131072, "bfloat16")
    assert (spec.layers[0].num_heads, spec.layers[0].num_kv_heads, spec.layers[0].head_dim) == (8, 4, 256)
    assert windows(spec)[:12] == [1024, 1024, 1024, 1024, 1024, None] * 2
    assert windows(read(text, sliding_window_pattern=2))[:4] == [1024, None, 1024, None]


def test_gpt_oss_has_sinks_and_alternates() -> None:
    spec = read(LLAMA_3_8B, model_type="gpt_oss", num_hidden_layers=24, sliding_window=128)
    assert all(layer.sinks and layer.head_dim == 64 for layer in spec.layers)
    assert windows(spec) == [128, None] * 12


def test_granite_sets_its_own_scale() -> None:
    assert read(LLAMA_3_8B, model_type="granite", attention_multiplier=0.015625).layers[0].scale == 0.015625


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_language_models_are_found(key: str) -> None:
    spec = read({"model_type": "some_vl", "num_hidden_layers": 3, key: without(LLAMA_3_8B, "model_type")})
    assert (spec.model_type, len(spec.layers)) == ("some_vl", 32)


def test_a_complete_outer_config_is_not_overruled_by_a_nested_one() -> None:
    assert len(read(LLAMA_3_8B, text_config={"num_hidden_layers": 1, "num_attention_heads": 1}).layers) == 32


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, None),
    ],
)
def test_dtype_under_either_name(keys: dict[str, Any], expected: str | None) -> None:
    assert read({**without(LLAMA_3_8B, "torch_dtype"), **keys}).dtype == expected


# ---- latent ----


def test_deepseek_v3() -> None:
    spec = read(DEEPSEEK_V3)
    assert (len(spec.layers), spec.context_length) == (61, 163840)
    # 192 ** -0.5 * (0.1 * ln 40 + 1) ** 2 = 0.07216878 * 1.3688879 ** 2
    scale = near(0.1352338)
    assert spec.layers[60] == LayerSpec(60, AttentionKind.MLA, 128, 128, 192, 128, scale, mla=MLADims(512, 128, 64))


def test_deepseek_v2_lite_has_the_yarn_factor_too() -> None:
    rope = {**YARN_40, "mscale": 0.707, "mscale_all_dim": 0.707}
    spec = read(DEEPSEEK_V3, model_type="deepseek_v2", num_hidden_layers=27, num_attention_heads=16, rope_scaling=rope)
    assert spec.layers[0].scale == pytest.approx(0.1147221, rel=1e-5)  # 0.07216878 * 1.2608038 ** 2


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "default", "rope_theta": 10000.0, "factor": 40, "mscale_all_dim": 1.0},
        {"type": "yarn", "factor": 40},
        {"type": "yarn", "factor": 40, "mscale_all_dim": 0},
        {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0},
    ],
)
def test_rope_that_leaves_the_scale_alone(rope: dict[str, Any] | None) -> None:
    assert read(DEEPSEEK_V3, rope_scaling=rope).layers[0].scale == pytest.approx(0.07216878)


def test_rope_parameters_is_the_new_name_of_rope_scaling() -> None:
    new = {**without(YARN_40, "type"), "rope_type": "yarn"}
    assert read(without(DEEPSEEK_V3, "rope_scaling"), rope_parameters=new).layers == read(DEEPSEEK_V3).layers


def test_deepseek_v32_is_sparse() -> None:
    spec = read(DEEPSEEK_V3, model_type="deepseek_v32", index_topk=2048)
    assert {layer.sparse_topk for layer in spec.layers} == {2048}
    mixed = ["full_attention", "indexed_attention", "deepseek_sparse_attention"]
    listed = read(DEEPSEEK_V3, num_hidden_layers=3, index_topk=64, layer_types=mixed)
    assert [layer.sparse_topk for layer in listed.layers] == [None, 64, 64]
    assert read(DEEPSEEK_V3).layers[0].sparse_topk is None


# ---- linear and hybrid ----


def test_kimi_linear_counts_its_layers_from_one() -> None:
    spec = read(KIMI_LINEAR)
    assert [layer.layer_id for layer in spec.full_layers] == [3, 7, 11, 15, 19, 23, 26]
    assert [layer.layer_id for layer in spec.layers] == list(range(27))
    assert spec.full_layers[0] == LayerSpec(
        3, AttentionKind.MLA, 32, 32, 192, 128, near(0.07216878), mla=MLADims(512, 128, 64)
    )
    assert spec.layers[0] == LayerSpec(
        0,
        AttentionKind.KDA,
        32,
        32,
        128,
        128,
        near(0.08838835),
        linear=LinearDims(32, 32, 128, 128, conv_channels=12288, conv_width=4),
    )


def test_kimi_linear_has_no_yarn_factor_because_its_mla_has_no_rope() -> None:
    assert read(KIMI_LINEAR, rope_scaling=YARN_40).layers == read(KIMI_LINEAR).layers


def test_kimi_linear_in_the_keys_of_transformers() -> None:
    kinds = ["full_attention" if number in KIMI_FULL else "linear_attention" for number in range(1, 28)]
    flat = {"layer_types": kinds, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert read(without(KIMI_LINEAR, "linear_attn_config"), **flat).layers == read(KIMI_LINEAR).layers


def test_qwen3_next_has_twelve_full_layers_of_48() -> None:
    spec = read(QWEN3_NEXT)
    assert [layer.layer_id for layer in spec.full_layers] == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    assert spec.full_layers[0] == LayerSpec(3, AttentionKind.MHA, 16, 2, 256, 256, 0.0625)
    assert spec.linear_layers[0] == LayerSpec(
        0,
        AttentionKind.GDN,
        32,
        16,
        128,
        128,
        near(0.08838835),
        linear=LinearDims(heads=32, key_heads=16, key_dim=128, value_dim=128, conv_channels=8192, conv_width=4),
    )
    assert read(without(QWEN3_NEXT, "full_attention_interval")).layers == spec.layers


def test_gdn_keys_and_values_are_not_mixed_up() -> None:
    spec = read(QWEN3_NEXT, linear_num_key_heads=8, linear_key_head_dim=64, linear_value_head_dim=192)
    assert spec.layers[0].linear == LinearDims(32, 8, 64, 192, conv_channels=7168, conv_width=4)  # 2 * 512 + 6144
    assert spec.layers[0].scale == 0.125


def test_qwen3_5_nests_a_text_config_with_layer_types() -> None:
    kinds = ["full_attention", "linear_attention"]
    text = {**QWEN3_NEXT, "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": kinds}
    spec = read({"model_type": "qwen3_5", "text_config": text})
    assert [layer.kind for layer in spec.layers] == [AttentionKind.MHA, AttentionKind.GDN]


def test_minimax_text_01() -> None:
    config = {
        "model_type": "minimax_text_01",
        "hidden_size": 6144,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10,
    }
    spec = read(config)
    assert [layer.layer_id for layer in spec.full_layers] == list(range(7, 80, 8))
    assert spec.full_layers[0] == LayerSpec(7, AttentionKind.MHA, 64, 8, 128, 128, near(0.08838835))
    assert spec.layers[0] == LayerSpec(
        0, AttentionKind.LIGHTNING, 64, 64, 128, 128, 1.0, linear=LinearDims(64, 64, 128, 128)
    )
    kinds = (["linear_attention"] * 7 + ["full_attention"]) * 10
    native = read(without(config, "attn_type_list"), model_type="minimax", layer_types=kinds)
    assert native.layers == spec.layers


def test_mamba2() -> None:
    config = {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "expand": 2,
    }
    spec = read(config)
    assert (len(spec.layers), spec.context_length, UNBOUNDED_CONTEXT) == (64, 1 << 20, 1 << 20)
    dims = LinearDims(heads=80, key_heads=1, key_dim=128, value_dim=64, conv_channels=5376, conv_width=4)
    assert spec.layers[5] == LayerSpec(5, AttentionKind.MAMBA2, 80, 1, 128, 64, 1.0, linear=dims)
    assert "5120 / 2560" in refused(config, "expand", expand=3)
    assert "num_heads, which is 80" in refused(config, "n_groups", n_groups=7)


def test_nemotron_h_keeps_the_place_of_its_attention_layers_among_the_others() -> None:
    spec = read(NEMOTRON_H_8B)
    assert [layer.layer_id for layer in spec.full_layers] == [7, 18, 29, 40]
    assert len(spec.linear_layers) == 24
    assert spec.full_layers[0] == LayerSpec(7, AttentionKind.MHA, 32, 8, 128, 128, near(0.08838835))
    dims = LinearDims(heads=128, key_heads=8, key_dim=128, value_dim=64, conv_channels=10240, conv_width=4)
    assert spec.layers[1] == LayerSpec(2, AttentionKind.MAMBA2, 128, 8, 128, 64, 1.0, linear=dims)


def test_nemotron_h_in_the_keys_of_transformers() -> None:
    words = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
    blocks = [words[letter] for letter in "ME*-M"]
    old = read(NEMOTRON_H_8B, num_hidden_layers=5, hybrid_override_pattern="ME*-M")
    new = read(without(NEMOTRON_H_8B, "num_hidden_layers", "hybrid_override_pattern"), layers_block_type=blocks)
    assert new.layers == old.layers
    assert [layer.layer_id for layer in new.layers] == [0, 2, 4]


# ---- tiny models ----

TINY_KINDS = {
    "llama": "mha mha",
    "qwen3": "mha mha",
    "deepseek_v2": "mla mla mla",
    "deepseek_v3": "mla mla mla",
    "kimi_linear": "kda kda kda mla kda",
    "qwen3_next": "gdn gdn gdn mha",
    "qwen3_5_text": "gdn gdn gdn mha",
    "minimax": "lightning lightning lightning mha",
    "mamba2": "mamba2 mamba2",
    "nemotron_h": "mamba2 mamba2 mha",
}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_tiny_models(name: str) -> None:
    spec = load_model(f"tiny:{name}")
    assert (spec.name, spec.model_type, spec.dtype) == (f"tiny:{name}", name, "float32")
    assert " ".join(layer.kind for layer in spec.layers) == TINY_KINDS[name]


def test_tiny_configs_are_json() -> None:
    assert json.loads(json.dumps(TINY_CONFIGS)) == TINY_CONFIGS
    assert set(TINY_CONFIGS) == set(TINY_KINDS)


def test_reading_a_model_imports_no_torch() -> None:
    code = "import sys, attnplug.model_config as m; m.load_model('tiny:llama'); print('torch' in sys.modules)"
    path = str(Path(sys.modules["attnplug.model_config"].__file__ or "").parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout == "False\n", done.stderr


# ---- references ----


def unreadable(reference: object) -> ModelConfigError:
    with pytest.raises(ModelConfigError) as caught:
        load_model(str(reference))
    assert caught.value.key is None
    return caught.value


def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    spec = load_model(str(folder))
    assert (spec.name, len(spec.layers)) == ("my-llama", 32)
    assert load_model(str(folder / "config.json")) == spec
    monkeypatch.chdir(folder)
    assert load_model(".") == spec
    assert load_model("config.json") == spec


def test_errors_of_a_file_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(without(LLAMA_3_8B, "num_attention_heads")))
    with pytest.raises(ModelConfigError) as caught:
        load_model(str(tmp_path))
    assert caught.value.source == str(tmp_path / "config.json")
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("reference", ["/no/such/path", "meta-llama/Meta-Llama-3-8B", "", "nul\0byte", "\ud800"])
def test_a_path_that_does_not_exist(reference: str) -> None:
    error = unreadable(reference)
    assert "does not exist" in str(error)
    assert "nothing is downloaded" in str(error)
    assert error.source == reference


def test_a_folder_without_config_says_what_looks_close(tmp_path: Path) -> None:
    assert "holds no config.json; give" in str(unreadable(tmp_path))
    for index in range(9):
        (tmp_path / f"shard-{index}.json").touch()
    (tmp_path / "params.json").touch()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "config.json").touch()
    message = str(unreadable(tmp_path))
    assert "params.json" in message
    assert "inner/config.json" in message
    assert "shard-8.json" not in message


def test_config_json_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "cannot be read: Is a directory" in str(unreadable(tmp_path))


def test_config_json_is_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert "cannot be read: No such file" in str(unreadable(tmp_path))


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **keys: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(Path, "open", denied)
    assert "cannot be read: Permission denied" in str(unreadable(tmp_path))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"model_type": "caf\xe9"}', "not UTF-8 text: byte 19"),
        (b'{\n  "a": 1,\n  "b" 2\n}', "not JSON: Expecting ':' delimiter at line 3, column 7"),
        (b"", "not JSON: Expecting value at line 1, column 1"),
        (b"[" * 200_000, "not JSON that can be read"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        (b"[1, 2]", "not an object: it holds [1, 2]"),
        (b"null", "not an object: it holds None"),
        (b" " * (17 << 20), "larger than 16777216 bytes"),
    ],
    ids=["latin-1", "no-colon", "empty", "deep", "long-number", "list", "null", "large"],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = unreadable(path)
    assert problem in str(error)
    assert error.source == str(path)
    assert str(path) in str(error)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8-sig")
    assert len(load_model(str(path)).layers) == 32


def test_an_unknown_tiny_name_gets_the_nearest_and_all() -> None:
    message = str(unreadable("tiny:deepsek_v3"))
    assert "did you mean tiny:deepseek_v3 or tiny:deepseek_v2?" in message
    assert all(f"tiny:{name}" in message for name in TINY_CONFIGS)
    assert "did you mean" not in str(unreadable("tiny:zzz"))


def test_the_error_is_a_usage_error_and_survives_a_process_boundary() -> None:
    error = unreadable("/no/such/path")
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.source, copy.key) == (str(error), error.source, None)


# ---- keys ----


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA_3_8B, "model_type"),
        (LLAMA_3_8B, "num_hidden_layers"),
        (LLAMA_3_8B, "num_attention_heads"),
        (LLAMA_3_8B, "hidden_size"),
        (DEEPSEEK_V3, "qk_rope_head_dim"),
        (DEEPSEEK_V3, "v_head_dim"),
        (QWEN3_NEXT, "linear_num_key_heads"),
        (NEMOTRON_H_8B, "ssm_state_size"),
    ],
)
def test_a_missing_key_is_named_with_the_model_type(config: dict[str, Any], key: str) -> None:
    message = refused(without(config, key), key)
    assert "is missing" in message
    assert key == "model_type" or repr(config["model_type"]) in message


@pytest.mark.parametrize(
    "value", ["32", 0, -1, True, 32.0, float("nan"), None, [32], {}, 10**30, pytest.param(10**6000, id="long")]
)
def test_a_count_that_is_none(value: object) -> None:
    assert "it must be a whole number from 1 to" in refused(
        LLAMA_3_8B, "num_attention_heads", num_attention_heads=value
    )


@pytest.mark.parametrize("value", ["50", float("nan"), float("inf"), True, 0, -1.0, [], 10**400])
def test_a_number_that_is_none(value: object) -> None:
    message = refused(LLAMA_3_8B, "attn_logit_softcapping", attn_logit_softcapping=value)
    assert "it must be a number from" in message


def test_the_value_at_fault_is_shown() -> None:
    assert "'num_attention_heads' is '32'" in refused(LLAMA_3_8B, "num_attention_heads", num_attention_heads="32")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("model_type", 3, "a string"),
        ("dtype", {"a": 1}, "a string"),
        ("max_position_embeddings", -1, "a whole number"),
        ("num_hidden_layers", 10**9, "from 1 to 4096"),
        ("num_key_value_heads", 5, "a divisor of num_attention_heads, which is 32"),
        ("hidden_size", 4097, "a multiple of num_attention_heads (32)"),
        ("is_encoder_decoder", "no", "true or false"),
        ("use_sliding_window", 1, "true or false"),
        ("sliding_window", 0, "a whole number"),
        ("layer_types", "full_attention", "a list"),
        ("layer_types", ["full_attention"], "has 1 entries; it must have one for each of the 32 layers"),
    ],
)
def test_values_that_make_no_sense(key: str, value: object, allowed: str) -> None:
    config = {**LLAMA_3_8B, "sliding_window": 64}
    assert allowed in refused(config, key, **{key: value})


def test_an_unknown_layer_type_is_named_with_the_known_ones() -> None:
    kinds = ["full_attention"] * 31 + ["chunked_attention"]
    message = refused(LLAMA_3_8B, "layer_types", layer_types=kinds)
    assert "has 'chunked_attention' at index 31" in message
    assert "'full_attention', 'sliding_attention'" in message


def test_a_sliding_layer_needs_a_window() -> None:
    assert "is missing" in refused(LLAMA_3_8B, "sliding_window", layer_types=["sliding_attention"] * 32)


def test_an_indexed_layer_needs_a_topk() -> None:
    refused(DEEPSEEK_V3, "layer_types", layer_types=["indexed_attention"] * 61)


def test_yarn_needs_a_factor() -> None:
    refused(DEEPSEEK_V3, "rope_scaling.factor", rope_scaling={"type": "yarn", "mscale_all_dim": 1})
    refused(DEEPSEEK_V3, "rope_scaling", rope_scaling="yarn")


def test_a_nested_key_is_named_with_its_path() -> None:
    nested = {**LLAMA_3_8B, "num_attention_heads": 0}
    refused({"model_type": "some_vl", "text_config": nested}, "text_config.num_attention_heads")
    refused({"model_type": "some_vl", "text_config": 5}, "text_config")


def test_attention_types_are_numbers_not_booleans() -> None:
    config = {**LLAMA_3_8B, "model_type": "minimax", "num_hidden_layers": 2}
    assert "has True at index 1" in refused(config, "attn_type_list", attn_type_list=[1, True])
    assert "has 1.0 at index 1" in refused(config, "attn_type_list", attn_type_list=[1, 1.0])
    refused(config, "layer_types")


@pytest.mark.parametrize(
    ("kda", "full", "key", "problem"),
    [
        ([1, 2], [2, 3], "full_attn_layers", "without layer 2"),
        ([1], [3], "kda_layers", "layer 2 of 3 is in neither"),
        ([0, 1, 2], [3], "kda_layers", "from 1 to 3"),
        ([1, 2], [4], "full_attn_layers", "from 1 to 3"),
        ([1, True], [3], "kda_layers", "from 1 to 3"),
        ("12", [3], "kda_layers", "a list"),
    ],
)
def test_kimi_lists_must_name_every_layer_once(kda: object, full: object, key: str, problem: str) -> None:
    lists = {**KIMI_LINEAR["linear_attn_config"], "kda_layers": kda, "full_attn_layers": full}
    message = refused(KIMI_LINEAR, f"linear_attn_config.{key}", num_hidden_layers=3, linear_attn_config=lists)
    assert problem in message


def test_heads_that_do_not_divide_in_linear_layers() -> None:
    refused(QWEN3_NEXT, "linear_num_key_heads", linear_num_key_heads=5)
    refused(NEMOTRON_H_8B, "n_groups", n_groups=3)


def test_nemotron_patterns() -> None:
    assert "has 'X' at index 0" in refused(
        NEMOTRON_H_8B, "hybrid_override_pattern", hybrid_override_pattern="X" + "M" * 51
    )
    refused(NEMOTRON_H_8B, "hybrid_override_pattern", hybrid_override_pattern="M*")
    refused(NEMOTRON_H_8B, "hybrid_override_pattern", num_hidden_layers=2, hybrid_override_pattern="-E")
    refused(without(NEMOTRON_H_8B, "hybrid_override_pattern"), "layers_block_type")


def test_encoder_decoder_models_are_refused() -> None:
    assert "encoder-decoder" in refused(LLAMA_3_8B, "is_encoder_decoder", model_type="bart", is_encoder_decoder=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mamba_d_state", 256),
        ("layer_group_size", 8),
        ("attention_chunk_size", 8192),
        ("num_kv_shared_layers", 20),
        ("multi_query", True),
        ("hybrid_override_pattern", "M*"),
    ],
)
def test_attention_that_the_default_reader_does_not_know_is_refused_not_misread(key: str, value: object) -> None:
    message = refused(LLAMA_3_8B, key, model_type="from_next_year", **{key: value})
    assert "cannot be read for model type 'from_next_year'" in message
    assert read(LLAMA_3_8B, **{key: None}).layers == read(LLAMA_3_8B).layers


# ---- any JSON at all ----

VALID: list[dict[str, Any]] = [
    *(dict(config) for config in TINY_CONFIGS.values()),
    LLAMA_3_8B,
    DEEPSEEK_V3,
    KIMI_LINEAR,
    NEMOTRON_H_8B,
    {**LLAMA_3_8B, "model_type": "gemma2", "sliding_window": 64, "attn_logit_softcapping": 50.0},
    {**LLAMA_3_8B, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
    {**LLAMA_3_8B, "model_type": "minimax", "num_hidden_layers": 2, "attn_type_list": [0, 1]},
    {"model_type": "some_vl", "text_config": DEEPSEEK_V3},
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 3, -1, 1 << 30, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["full_attention", "linear_attention", "sliding_attention", "yarn", "M*-E"])
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = dict(draw(st.sampled_from(VALID)))
    part = config
    for key in ("text_config", "linear_attn_config", "rope_scaling"):
        if key in part and draw(st.booleans()):
            part[key] = dict(part[key])
            part = part[key]
    borrowed = sorted({key for valid in VALID for key in valid} | {"rope_parameters", "index_topk", "llm_config"})
    for _ in range(draw(st.integers(1, 3))):
        own = sorted(part) if draw(st.booleans()) else []
        key = draw(st.sampled_from(own or borrowed))
        if draw(st.booleans()):
            part.pop(key, None)
        else:
            part[key] = draw(JSON)
    return config


def reads_or_refuses(config: dict[str, Any]) -> None:
    try:
        spec = model_from_config(config, "fuzz")
    except ModelConfigError as error:
        str(error).encode()  # printable: no lone surrogates
        assert len(str(error)) < 1000
    else:
        assert spec.layers
        assert spec.context_length >= 1
        assert all(0 < layer.scale < float("inf") for layer in spec.layers)
        assert [layer.layer_id for layer in spec.layers] == sorted({layer.layer_id for layer in spec.layers})
        assert spec.describe()


@settings(max_examples=600, deadline=None)
@given(mutated_configs())
def test_a_mutated_config_is_read_or_refused(config: dict[str, Any]) -> None:
    reads_or_refuses(config)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({key for valid in VALID for key in valid})), JSON))
def test_a_random_config_is_read_or_refused(config: dict[str, Any]) -> None:
    reads_or_refuses(config)


@pytest.mark.parametrize("config", VALID, ids=lambda config: str(config["model_type"]))
def test_the_unmutated_configs_are_read(config: dict[str, Any]) -> None:
    assert read(config).layers
