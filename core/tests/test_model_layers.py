"""Attention layers read from the config of each model family.

Expected numbers are worked out by hand from the published configs; no formula is shared with the code.
"""

from __future__ import annotations

from typing import Any

import pytest

from attnplug import AttentionKind, Feature, LayerSpec, ModelSpec
from attnplug.hf.model_config import UNBOUNDED_CONTEXT
from attnplug.host import TINY_CONFIGS, MLADims, ModelConfigError, load_model
from attnplug.linear import LinearDims
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_testing.configs import (
    DEEPSEEK_V3,
    KIMI_FULL,
    KIMI_LINEAR,
    LLAMA_3_8B,
    NEMOTRON_H_8B,
    QWEN3_NEXT,
    YARN_40,
    read,
    refused,
    without,
)


def near(value: float) -> Any:
    """Equal to ``value``, given to seven digits."""
    return pytest.approx(value, rel=1e-6)


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


def test_mistral_slides_in_every_layer() -> None:
    assert windows(read(LLAMA_3_8B, model_type="mistral", sliding_window=4096)) == [4096] * 32
    assert windows(read(LLAMA_3_8B, model_type="mistral", sliding_window=None)) == [None] * 32
    assert windows(read(LLAMA_3_8B, model_type="mistral")) == [4096] * 32  # what transformers' class assumes
    for switch in (True, False):  # a key of Qwen's, at which transformers does not look in this model
        assert windows(read(LLAMA_3_8B, model_type="mistral", use_sliding_window=switch)) == [4096] * 32


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_slides_only_when_switched_on_and_only_in_upper_layers(model_type: str) -> None:
    config = {**LLAMA_3_8B, "model_type": model_type, "sliding_window": 1024, "max_window_layers": 28}
    assert windows(read(config)) == [None] * 32
    assert windows(read(config, use_sliding_window=False)) == [None] * 32
    assert windows(read(config, use_sliding_window=True)) == [None] * 28 + [1024] * 4
    absent = read(without(config, "sliding_window", "max_window_layers"), use_sliding_window=True)
    assert windows(absent) == [None] * 28 + [4096] * 4  # what transformers' class assumes


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
    assert read(LLAMA_3_8B, model_type="granite").layers[0].scale == 1.0


@pytest.mark.parametrize(
    ("model_type", "keys", "slides"),
    [
        ("qwen2_moe", {"max_window_layers": 3}, [True, False, True, False, False]),
        ("qwen3_moe", {"max_window_layers": 3}, [True] * 5),
        ("smollm3", {"no_rope_layer_interval": 2}, [False, True, False, True, False]),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1, 0, 0]}, [True, False, False, False, True]),
    ],
)
def test_layers_that_slide_if_a_flag_turns_windows_on(
    model_type: str, keys: dict[str, Any], slides: list[bool]
) -> None:
    """Same as in the config classes of transformers 5.22."""
    config = {**LLAMA_3_8B, "model_type": model_type, "num_hidden_layers": 5, "sliding_window": 7, **keys}
    spec = read(config, use_sliding_window=True)
    assert windows(spec) == [7 if slide else None for slide in slides]
    assert windows(read(config, use_sliding_window=False)) == windows(read(config)) == [None] * 5


@pytest.mark.parametrize("model_type", ["phi3", "mixtral", "gemma2", "gemma3_text", "gpt_oss"])
def test_types_without_a_switch_ignore_it(model_type: str) -> None:
    config = {**LLAMA_3_8B, "model_type": model_type, "num_hidden_layers": 5, "sliding_window": 7}
    for switch in (True, False):
        switched = read(config, use_sliding_window=switch, max_window_layers=3)
        assert windows(switched) == windows(read(config)) and windows(switched)[0] == 7


def test_layers_without_a_rope_are_listed_for_every_layer() -> None:
    smollm3 = {**LLAMA_3_8B, "model_type": "smollm3", "use_sliding_window": True, "sliding_window": 7}
    assert "32" in refused(smollm3, "no_rope_layers", no_rope_layers=[1, 0])
    refused(smollm3, "no_rope_layers", no_rope_layers=[2] * 32)


@pytest.mark.parametrize("outer", [False, True])
def test_llama_4_is_refused_with_the_reason(outer: bool) -> None:
    text = {**LLAMA_3_8B, "model_type": "llama4_text", "attention_chunk_size": 8192}
    config = {"model_type": "llama4", "text_config": text} if outer else text
    message = refused(config, "text_config.model_type" if outer else "model_type")
    assert "llama4_text" in message and "chunks" in message and "\n" not in message


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_language_models_are_found(key: str) -> None:
    spec = read({"model_type": "some_vl", "num_hidden_layers": 3, key: LLAMA_3_8B})
    assert (spec.model_type, len(spec.layers)) == ("llama", 32)
    for outer, inner in (("mistral3", "mistral"), ("kimi_k25", "deepseek_v3")):  # the section's type may be absent
        text = without(DEEPSEEK_V3 if "kimi" in outer else LLAMA_3_8B, "model_type")
        assert read({"model_type": outer, key: text}).model_type == inner


def test_kimi_k2_is_a_deepseek_v3() -> None:
    assert read(DEEPSEEK_V3, model_type="kimi_k2") == read(DEEPSEEK_V3)


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
    spec = read(DEEPSEEK_V3, model_type="deepseek_v32")
    assert {layer.indexer for layer in spec.layers} == {IndexerDims(64, 128, 2048)}
    assert spec.is_sparse and spec.index_layers == spec.layers
    mixed = ["full_attention", "indexed_attention", "deepseek_sparse_attention"]
    keys = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 96}
    listed = read(DEEPSEEK_V3, num_hidden_layers=3, layer_types=mixed, **keys)
    assert [layer.indexer for layer in listed.layers] == [None, IndexerDims(4, 96, 64), IndexerDims(4, 96, 64)]
    assert not read(DEEPSEEK_V3).is_sparse


SHARING = {
    "every layer by default": ({}, "FFFFFFF"),
    "a frequency": ({"index_topk_freq": 3}, "FFSSFSS"),
    "a frequency and an offset": ({"index_topk_freq": 2, "index_skip_topk_offset": 4}, "FFFFSFS"),
    "a pattern": ({"index_topk_pattern": "FSSFFSS", "index_topk_freq": 2}, "FSSFFSS"),
    "a pattern of words": ({"index_topk_pattern": ["full", "shared"] + ["full"] * 5}, "FSFFFFF"),
    "types": ({"indexer_types": ["full"] + ["shared"] * 6, "index_topk_pattern": "FFFFFFF"}, "FSSSSSS"),
}


@pytest.mark.parametrize(("keys", "wanted"), SHARING.values(), ids=SHARING)
def test_glm_shares_an_index_between_layers(keys: dict[str, Any], wanted: str) -> None:
    """The rules are those of transformers."""
    spec = read(DEEPSEEK_V3, model_type="glm_moe_dsa", num_hidden_layers=7, **keys)
    shares = [layer.indexer.shares for layer in spec.layers if layer.indexer is not None]
    assert "".join("F" if share is None else "S" for share in shares) == wanted
    assert shares == [None if kind == "F" else wanted.rfind("F", 0, index) for index, kind in enumerate(wanted)]
    assert {layer.indexer.heads for layer in spec.layers if layer.indexer is not None} == {32}


def test_a_first_layer_that_shares_an_index_is_refused() -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(DEEPSEEK_V3, model_type="glm_moe_dsa", num_hidden_layers=2, index_topk_pattern="SF")
    assert caught.value.key == "index_topk_pattern"


def test_an_index_narrower_than_its_rope_is_refused() -> None:
    with pytest.raises(ModelConfigError) as caught:
        read(DEEPSEEK_V3, model_type="deepseek_v32", index_head_dim=32)
    assert caught.value.key == "index_head_dim"


# ---- compressed ----

DEEPSEEK_V4 = {"model_type": "deepseek_v4", "num_hidden_layers": 5, "num_key_value_heads": 1}


def test_deepseek_v4_has_sliding_sparse_and_heavily_compressed_layers() -> None:
    """Given by ``layer_types``, by ratios in older configs (with those of prediction layers behind), or by default."""
    types = ["sliding", "compressed_sparse", "heavily_compressed", "compressed_sparse", "sliding"]
    spec = read(DEEPSEEK_V4, layer_types=[f"{kind}_attention" for kind in types])
    sparse, heavy = CompressedDims(4, overlap=True), CompressedDims(128)
    assert [layer.compressed for layer in spec.layers] == [None, sparse, heavy, sparse, None]
    assert [layer.indexer is not None for layer in spec.layers] == [False, True, False, True, False]
    assert spec.layers == read(DEEPSEEK_V4, compress_ratios=[0, 4, 128, 4, 0, 4]).layers
    assert [layer.compressed for layer in read(DEEPSEEK_V4).layers] == [heavy, heavy, heavy, sparse, heavy]
    assert spec.page_multiple == 128 and spec.is_sparse and not spec.index_layers
    assert [layer.layer_id for layer in spec.compressed_layers] == [1, 2, 3]
    first, second = spec.layers[:2]
    assert (first.num_heads, first.head_dim, first.v_head_dim, first.sliding_window) == (64, 512, 512, 128)
    assert first.mla == MLADims(512, 512, 0) and second.indexer == IndexerDims(64, 128, 512)
    assert second.features == {Feature.COMPRESSED, Feature.SINKS, Feature.SLIDING_WINDOW, Feature.SPARSE}


def test_tokens_to_an_entry_are_the_configs() -> None:
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 24}
    for keys in ({"compress_rates": rates}, {"compress_rate_csa": 8, "compress_rate_hca": 24}):
        spec = read(DEEPSEEK_V4, **keys)
        assert {layer.compressed.ratio for layer in spec.compressed_layers if layer.compressed is not None} == {8, 24}
        assert spec.page_multiple == 24


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
    softmax = read(without(config, "attn_type_list"), model_type="minimax_m2")
    assert {layer.kind for layer in softmax.layers} == {AttentionKind.MHA} and len(softmax.layers) == len(native.layers)
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
    "deepseek_v32": "mla mla mla",
    "glm_moe_dsa": "mla mla mla mla",
    "deepseek_v4": "mla mla mla mla",
    "kimi_linear": "kda kda kda mla kda",
    "qwen3_next": "gdn gdn gdn mha",
    "qwen3_5_text": "gdn gdn gdn mha",
    "minimax": "lightning lightning lightning mha",
    "ring_linear": "lightning lightning lightning mla",
    "mamba2": "mamba2 mamba2",
    "nemotron_h": "mamba2 mamba2 mha",
    **dict.fromkeys(
        ("granite", "olmo2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"), "mha mha"
    ),
    **dict.fromkeys(("gemma2", "gemma3_text"), "mha mha mha"),
    "smollm3": "mha mha mha mha",
    "kimi_k2": "mla mla mla",
}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_tiny_models(name: str) -> None:
    spec = load_model(f"tiny:{name}")
    model_type = {"kimi_k2": "deepseek_v3"}.get(name, name)
    assert (spec.name, spec.model_type, spec.dtype) == (f"tiny:{name}", model_type, "float32")
    assert " ".join(layer.kind for layer in spec.layers) == TINY_KINDS[name]


def test_every_tiny_model_is_checked() -> None:
    assert set(TINY_CONFIGS) == set(TINY_KINDS)
