"""Reading of models: references, configs, and invalid configs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import UsageError
from attnplug.hf.model_config import model_from_config
from attnplug.host import TINY_CONFIGS, ModelConfigError, load_model
from attnplug_testing.configs import (
    DEEPSEEK_V3,
    KIMI_LINEAR,
    LLAMA_3_8B,
    NEMOTRON_H_8B,
    QWEN3_NEXT,
    read,
    refused,
    without,
)
from attnplug_testing.errors import raises_naming


def test_reading_a_model_imports_no_torch() -> None:
    code = "import sys, attnplug.host as m; m.load_model('tiny:llama'); print('torch' in sys.modules)"
    path = str(Path(sys.modules["attnplug.hf.model_config"].__file__ or "").parents[1])
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
    assert (error.source, error.key) == (reference, None)


def test_a_folder_without_config_says_what_looks_close(tmp_path: Path) -> None:
    assert "config.json" in str(unreadable(tmp_path))
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
    assert "Is a directory" in str(unreadable(tmp_path))


def test_config_json_is_a_pipe_without_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in str(unreadable(tmp_path))


def test_config_json_is_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "blob")
    assert "No such file" in str(unreadable(tmp_path))


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **keys: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(Path, "open", denied)
    assert "Permission denied" in str(unreadable(tmp_path))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"model_type": "caf\xe9"}', "byte 19"),
        (b'{\n  "a": 1,\n  "b" 2\n}', "line 3, column 7"),
        (b"", "line 1, column 1"),
        (b"[" * 200_000, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON"),
        (b"[1, 2]", "[1, 2]"),
        (b"null", "None"),
        (b" " * (17 << 20), "16777216"),
    ],
    ids=["latin-1", "no-colon", "empty", "deep", "long-number", "list", "null", "large"],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = unreadable(path)
    assert named in str(error)
    assert error.source == str(path)
    assert str(path) in str(error)


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8-sig")
    assert len(load_model(str(path)).layers) == 32


def test_an_unknown_tiny_name_gets_the_nearest_and_all() -> None:
    message = str(unreadable("tiny:deepsek_v3"))
    assert "did you mean tiny:deepseek_v3 or tiny:deepseek_v32?" in message
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
    assert key in message
    assert key == "model_type" or repr(config["model_type"]) in message


@pytest.mark.parametrize(
    "value", ["32", 0, -1, True, 32.0, float("nan"), None, [32], {}, 10**30, pytest.param(10**6000, id="long")]
)
def test_a_count_that_is_none(value: object) -> None:
    assert "1 to 1073741824" in refused(LLAMA_3_8B, "num_attention_heads", num_attention_heads=value)


@pytest.mark.parametrize("value", ["50", float("nan"), float("inf"), True, 0, -1.0, [], 10**400])
def test_a_number_that_is_none(value: object) -> None:
    assert "number" in refused(LLAMA_3_8B, "attn_logit_softcapping", attn_logit_softcapping=value)


def test_the_value_at_fault_is_shown() -> None:
    assert "'num_attention_heads' is '32'" in refused(LLAMA_3_8B, "num_attention_heads", num_attention_heads="32")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("model_type", 3, "a string"),
        ("dtype", {"a": 1}, "a string"),
        ("max_position_embeddings", -1, "a whole number"),
        ("num_hidden_layers", 10**9, "from 1 to 4096"),
        ("num_key_value_heads", 5, "32"),
        ("hidden_size", 4097, "32"),
        ("is_encoder_decoder", "no", "true or false"),
        ("use_sliding_window", 1, "true or false"),
        ("sliding_window", 0, "a whole number"),
        ("layer_types", "full_attention", "a list"),
        ("layer_types", ["full_attention"], "32 layers"),
    ],
)
def test_values_that_make_no_sense(key: str, value: object, allowed: str) -> None:
    config = {**LLAMA_3_8B, "model_type": "qwen2", "sliding_window": 64}
    assert allowed in refused(config, key, **{key: value})


def test_an_unknown_layer_type_is_named_with_the_known_ones() -> None:
    kinds = ["full_attention"] * 31 + ["chunked_attention"]
    message = refused(LLAMA_3_8B, "layer_types", layer_types=kinds)
    assert "'chunked_attention'" in message and "31" in message
    assert "'full_attention', 'sliding_attention'" in message


def test_a_sliding_layer_needs_a_window() -> None:
    refused(LLAMA_3_8B, "sliding_window", layer_types=["sliding_attention"] * 32)


def test_an_indexed_layer_needs_a_topk() -> None:
    refused(DEEPSEEK_V3, "layer_types", layer_types=["indexed_attention"] * 61)


def test_yarn_needs_a_factor() -> None:
    refused(DEEPSEEK_V3, "rope_scaling.factor", rope_scaling={"type": "yarn", "mscale_all_dim": 1})
    refused(DEEPSEEK_V3, "rope_scaling", rope_scaling="yarn")


def test_rope_scaling_wins_over_rope_parameters() -> None:
    """Same as in transformers, where ``rope_scaling`` determines the softmax scale of DeepSeek-V3."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    base = without(DEEPSEEK_V3, "rope_scaling")
    scales = [
        read(base, **keys).layers[0].scale
        for keys in (
            {"rope_scaling": yarn},
            {"rope_scaling": yarn, "rope_parameters": plain},
            {"rope_scaling": plain, "rope_parameters": yarn},
            {"rope_scaling": {}, "rope_parameters": yarn},
            {},
        )
    ]
    assert scales[0] == scales[1] == scales[3] > scales[2] == scales[4]


def test_rope_that_differs_between_layers_is_refused() -> None:
    nested = {"full_attention": {"rope_type": "yarn", "factor": 4.0}}
    refused(without(DEEPSEEK_V3, "rope_scaling"), "rope_parameters.full_attention", rope_parameters=nested)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA_3_8B, "head_dim"),
        (LLAMA_3_8B, "num_attention_heads"),
        (DEEPSEEK_V3, "kv_lora_rank"),
        (DEEPSEEK_V3, "v_head_dim"),
        (NEMOTRON_H_8B, "conv_kernel"),
    ],
)
def test_sizes_that_nothing_could_hold(config: dict[str, Any], key: str) -> None:
    with raises_naming(ModelConfigError, "columns"):
        read({"hidden_size": 1 << 30, **config, "num_key_value_heads": 1, "head_dim": 128} | {key: 1 << 30})


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
    ("kda", "full", "key", "named"),
    [
        ([1, 2], [2, 3], "full_attn_layers", "layer 2"),
        ([1], [3], "kda_layers", "layer 2 of 3"),
        ([0, 1, 2], [3], "kda_layers", "from 1 to 3"),
        ([1, 2], [4], "full_attn_layers", "from 1 to 3"),
        ([1, True], [3], "kda_layers", "from 1 to 3"),
        ("12", [3], "kda_layers", "a list"),
    ],
)
def test_kimi_lists_must_name_every_layer_once(kda: object, full: object, key: str, named: str) -> None:
    lists = {**KIMI_LINEAR["linear_attn_config"], "kda_layers": kda, "full_attn_layers": full}
    message = refused(KIMI_LINEAR, f"linear_attn_config.{key}", num_hidden_layers=3, linear_attn_config=lists)
    assert named in message


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
    assert "encoder-decoder" in refused(LLAMA_3_8B, "is_encoder_decoder", is_encoder_decoder=True)


def test_bidirectional_attention_is_refused() -> None:
    gemma = {**LLAMA_3_8B, "model_type": "gemma3_text"}
    refused(gemma, "use_bidirectional_attention", use_bidirectional_attention=True)
    assert read(gemma, use_bidirectional_attention=False)


@pytest.mark.parametrize("name", ["gpt2", "modernbert", "longcat_flash", "bart", "vit", "from_next_year"])
def test_an_unknown_type_is_named_with_the_known_ones_before_sizes_are_read(name: str) -> None:
    """Also if its config has the standard keys: reading it as a plain decoder might be wrong."""
    for config in (LLAMA_3_8B, {}, {"is_encoder_decoder": True}):
        message = refused({**config, "model_type": name}, "model_type")
        assert repr(name) in message and all(known in message for known in ("llama", "deepseek_v3", "nemotron_h"))
    refused({"model_type": "mistral3", "text_config": {"model_type": name}}, "text_config.model_type")
    refused({"model_type": name, "text_config": {"hidden_size": 64}}, "model_type")


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


@settings(max_examples=20, deadline=None)
@given(mutated_configs())
def test_a_mutated_config_is_read_or_refused(config: dict[str, Any]) -> None:
    reads_or_refuses(config)


@settings(max_examples=16, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({key for valid in VALID for key in valid})), JSON))
def test_a_random_config_is_read_or_refused(config: dict[str, Any]) -> None:
    reads_or_refuses(config)


@pytest.mark.parametrize("config", VALID, ids=lambda config: str(config["model_type"]))
def test_the_unmutated_configs_are_read(config: dict[str, Any]) -> None:
    assert read(config).layers
