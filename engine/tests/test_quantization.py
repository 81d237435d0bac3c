"""Quantized checkpoints in their published layouts: transformers' tokens, weights kept as stored, errors that name the
tensor."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_checkpoints import (
    CASES,
    EVEN,
    FLOAT8,
    FP8,
    INT4,
    ODD,
    compressed,
    fp8_blocks,
    fp8_channels,
    fp8_tensor,
    int4_groups,
    kept,
    logits_of,
    mxfp4,
    nested,
    quantized,
    transformers_logits,
)
from safetensors.torch import load_file
from thread_ranks import Threads, in_ranks
from torch.testing import assert_close

from attnplug.host import TINY_CONFIGS, ModelConfigError
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import Checkpoint, CheckpointError, MissingTensor, WrongDtype, WrongShape
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model
from attnplug_engine.models.layers import Concatenated, QuantizedLinear
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_engine.quantization.config import SCHEMES, read_quantization
from attnplug_engine.quantization.int4 import Int4Groups
from attnplug_engine.quantization.mxfp4 import Mxfp4
from attnplug_engine.quantization.scheme import QuantizedWeight
from attnplug_testing.errors import having

DEEPSEEK = {
    "fp8 blocks, 128 × 128": (ODD, {**FP8, "weight_block_size": [128, 128]}, fp8_blocks()),
    "fp8 blocks, no query rank": (
        {**ODD, "q_lora_rank": None},
        {**FP8, "weight_block_size": [16, 16]},
        fp8_blocks(16, 16),
    ),
    "int4": (
        {**EVEN, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32},
        compressed("pack-quantized", **INT4, group_size=32),
        int4_groups(32),
    ),
    "MXFP4 under the names of fp8": (
        {**EVEN, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32},
        {**FP8, "weight_block_size": [128, 128]},
        mxfp4(),
    ),
}


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_logits_equal_those_that_transformers_computes_from_the_same_checkpoint(
    case, make_oracle, make_stage, sequences, tmp_path
):
    """E5"""
    model_type, changes, config, quantize = CASES[case]
    quantized(make_oracle(model_type, **changes).folder, tmp_path / "q", config, quantize)
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, transformers_logits(tmp_path / "q", sequences), strict=True):
        assert wanted.abs().max() > 3
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    stored = load_file(tmp_path / "q" / "model.safetensors")
    (code,) = {weight.scheme.code_name for weight in kept(loaded.module)}
    assert sum(weight.codes.nbytes for weight in kept(loaded.module)) == sum(
        tensor.nbytes for name, tensor in stored.items() if "_proj" in name and name.endswith(f".{code}")
    )


@pytest.mark.parametrize("case", DEEPSEEK)
@pytest.mark.sample(2)
def test_experts_and_latent_attention_equal_the_dequantized_model(case, make_oracle, make_stage, sequences, tmp_path):
    """E5. transformers cannot dequantize blocks at a ragged edge, so it loads the dequantized weights."""
    changes, config, quantize = DEEPSEEK[case]
    plain = quantized(make_oracle("deepseek_v3", **changes).folder, tmp_path / "q", config, quantize)
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, transformers_logits(plain, sequences), strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    experts = [part for part in kept(loaded.module) if part.codes.dim() == 3]
    assert len(experts) == 2 * sum(
        "experts" in name for name, _ in loaded.module.named_modules() if name.endswith("mlp.experts")
    )


def test_an_engine_generates_the_tokens_of_transformers(make_oracle, tmp_path):
    """E5: through prefill in chunks, the prefix cache and decode."""
    from transformers import AutoModelForCausalLM

    config = {**FP8, "weight_block_size": [16, 16]}
    plain = quantized(make_oracle("deepseek_v3").folder, tmp_path / "q", config, fp8_blocks(16, 16))
    prompt = torch.randint(0, 128, (37,), generator=torch.Generator().manual_seed(3)).tolist()
    engine = Engine(str(tmp_path / "q"), device="cpu", dtype="float32", page_size=8, chunked_prefill_size=16)
    first, second = (engine.generate([prompt], max_tokens=12)[0] for _ in range(2))
    oracle = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    wanted = oracle.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)[
        0, 37:
    ].tolist()
    assert first.token_ids == second.token_ids == wanted
    assert engine.cache_statistics.hit_tokens > 0


@pytest.mark.parametrize(
    ("case", "widths"),
    [("int4, groups of 32", {"hidden_size": 132}), ("MXFP4", {"intermediate_size": 133})],
)
def test_widths_that_codes_cannot_pack_are_refused_before_weights_are_read(case, widths, tmp_path, monkeypatch):
    """E5"""
    keys = {**TINY_CONFIGS["llama"], **EVEN, "head_dim": 32, **widths, "quantization_config": CASES[case][2]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    monkeypatch.setattr(RandomCheckpoint, "tensor", lambda self, name, *_, **__: pytest.fail(f"{name} was drawn"))
    with pytest.raises(CheckpointError, match="packs", check=having(next(iter(widths.values())))) as caught:
        Engine(str(tmp_path), device="cpu", random_weights=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["fp8 channels", "int4, groups of 32", "MXFP4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_key_of_early_compressed_tensors_means_the_same(
    case, is_nested, make_oracle, make_stage, sequences, tmp_path
):
    """E5: compressed-tensors reads its own old key ``compression_config`` as it does the new one."""
    theirs = pytest.importorskip("compressed_tensors.utils.safetensors_load")
    model_type, changes, config, quantize = CASES[case]
    plain = quantized(make_oracle(model_type, **changes).folder, tmp_path / "q", config, quantize)
    if is_nested:
        nested(tmp_path / "q")
    path = tmp_path / "q" / "config.json"
    path.write_text(path.read_text().replace("quantization_config", "compression_config"))
    assert theirs.get_quantization_config(path) == config
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    assert kept(loaded.module)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_unknown_method_is_refused_under_either_key(key, make_oracle, tmp_path):
    """E5"""
    config = {"quantization_config": None, key: {"quant_method": "sparseml"}}
    quantized(make_oracle("llama").folder, tmp_path / "q", FP8, fp8_channels)
    path = tmp_path / "q" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ModelConfigError, check=having("'sparseml'", key=f"{key}.quant_method")) as caught:
        load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)


def test_excluded_modules_are_plain_and_their_neighbours_are_not(make_oracle, make_stage, sequences, tmp_path):
    config = compressed("float-quantized", **FLOAT8, strategy="channel")
    config["ignore"] = ["lm_head", "re:.*v_proj$", "model.layers.0.mlp.up_proj"]
    plain = quantized(
        make_oracle("llama").folder, tmp_path / "q", config, fp8_channels, r"lm_head|v_proj|layers\.0\.mlp\.up"
    )
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    first = loaded.module.layers[0]
    assert isinstance(first.attention.qkv, Concatenated)
    assert isinstance(first.mlp.gate_up, Concatenated)
    assert isinstance(loaded.module.layers[1].mlp.gate_up, QuantizedLinear)


@pytest.mark.parametrize("excluded", ["down_proj", "up_proj"])
def test_experts_that_are_quantized_in_part_are_refused(excluded, make_oracle, tmp_path):
    """E5"""
    config = {**FP8, "weight_block_size": [16, 16], "modules_to_not_convert": [excluded]}
    quantized(make_oracle("qwen3_moe").folder, tmp_path / "q", config, fp8_blocks(16, 16), rf"lm_head|\.{excluded}")
    tensor = f"model.layers.0.mlp.experts.0.{excluded}.weight"
    with pytest.raises(CheckpointError, match="together", check=having(tensor=tensor)) as caught:
        load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "module", "excluded"),
    [
        (["lm_head"], "lm_head", True),
        (["mlp.gate"], "model.layers.3.mlp.gate", True),
        (["mlp.gate"], "model.layers.3.mlp.gate_proj", False),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.11.mlp.up_proj", False),
        (["model.layers.*.self_attn"], "model.layers.11.self_attn.q_proj", True),
    ],
)
def test_modules_to_not_convert_are_matched_as_in_transformers(entries, module, excluded):
    from transformers.quantizers.quantizers_utils import should_convert_module

    read = read_quantization({"quantization_config": {**FP8, "modules_to_not_convert": entries}}, "here")
    assert should_convert_module(module, entries) is not excluded
    assert (read.schemes(module) == ()) is excluded


def test_a_weight_in_codes_that_the_config_excludes(make_oracle, tmp_path):
    config = {**FP8, "weight_block_size": [16, 16], "modules_to_not_convert": ["o_proj"]}
    quantized(make_oracle("llama").folder, tmp_path / "q", config, fp8_blocks(16, 16))
    with pytest.raises(WrongDtype, check=having(tensor="model.layers.0.self_attn.o_proj.weight", found="F8_E4M3")):
        load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"quant_method": 3}, "quant_method"),
        ({}, "quant_method"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, True]}, "weight_block_size"),
        ({**FP8, "modules_to_not_convert": ["("]}, "modules_to_not_convert"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format"),
        (compressed("pack-quantized", num_bits=8, group_size=32), "config_groups.group_0.weights.num_bits"),
        (compressed("pack-quantized", **INT4, group_size=48), "config_groups.group_0.weights.group_size"),
        (compressed("pack-quantized", **INT4, group_size=-1), "config_groups.group_0.weights.group_size"),
        (compressed("pack-quantized", **INT4, group_size=32.0), "config_groups.group_0.weights.group_size"),
        (
            compressed("pack-quantized", **INT4, group_size=32, symmetric=False),
            "config_groups.group_0.weights.symmetric",
        ),
        (compressed("float-quantized", **FLOAT8, strategy="token"), "config_groups.group_0.weights.strategy"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "config_groups"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "activation_scheme": "weird"}, "activation_scheme"),
        ({**FP8, "scale_fmt": 3}, "scale_fmt"),
        (compressed("float-quantized", **FLOAT8, strategy="block"), "config_groups.group_0.weights.block_structure"),
        (
            {**compressed("float-quantized", **FLOAT8, strategy="channel"), "sparsity_config": {"format": "marlin-24"}},
            "sparsity_config.format",
        ),
        (
            {**compressed("pack-quantized", **INT4, group_size=32), "transform_config": {"config_groups": {"u": {}}}},
            "transform_config.config_groups",
        ),
    ],
)
def test_schemes_that_are_refused(config, key):
    with pytest.raises(ModelConfigError, check=having(key=f"quantization_config.{key}")) as caught:
        read_quantization({"model_type": "llama", "quantization_config": config}, "here")
    if key.endswith("group_size"):
        assert "32, 64, 128" in str(caught.value)
    if key == "format" or config.get(key) == "awq":
        assert all(scheme.title.split(" (")[0] in str(caught.value) for scheme in SCHEMES)


SCALE = "model.layers.1.mlp.down_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tensors: tensors.pop(SCALE), MissingTensor),
        (lambda tensors: tensors.update({SCALE: torch.ones(5, 7)}), WrongShape),
        (lambda tensors: tensors.update({SCALE: torch.ones_like(tensors[SCALE]).int()}), WrongDtype),
        (lambda tensors: tensors[SCALE].__setitem__((0, 1), float("nan")), CheckpointError),
        (lambda tensors: tensors[SCALE].__setitem__((1, 0), 0.0), CheckpointError),
        (lambda tensors: tensors[SCALE].__setitem__((1, 0), -1.0), CheckpointError),
        (lambda tensors: tensors[SCALE].__setitem__((0, 0), float("inf")), CheckpointError),
    ],
    ids=["missing", "shape", "dtype", "NaN", "zero", "negative", "infinite"],
)
def test_corrupt_scales_name_their_tensor(change, error, shared_oracle, tmp_path):
    config = {**FP8, "weight_block_size": [16, 16]}
    quantized(shared_oracle("llama").folder, tmp_path / "q", config, fp8_blocks(16, 16), change=change)
    with pytest.raises(error, check=having(tensor=SCALE)) as caught:
        load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)
    assert SCALE in str(caught.value)


@pytest.mark.parametrize(
    ("config", "quantize", "name", "value"),
    [
        (
            {**FP8, "weight_block_size": [16, 16]},
            fp8_blocks(16, 16, exponents=True, name="scale"),
            "scale",
            torch.zeros(8, 16, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        ),
        ({**FP8, "weight_block_size": [16, 16]}, fp8_blocks(16, 16, name="scale"), "scale", None),
        (
            compressed("float-quantized", **FLOAT8, strategy="channel"),
            fp8_channels,
            "weight_scale",
            torch.ones(1),
        ),
        (
            compressed("float-quantized", **FLOAT8, strategy="tensor"),
            fp8_tensor,
            "weight_scale",
            torch.ones(128, 1),
        ),
        (compressed("pack-quantized", **INT4, group_size=32), int4_groups(32), "weight_shape", torch.tensor([64, 65])),
        (
            compressed("pack-quantized", **INT4, group_size=32),
            int4_groups(32),
            "weight_g_idx",
            (torch.arange(256) // 32).flip(0),
        ),
        (
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
            mxfp4("weight_packed", "weight_scale", kind=torch.uint8),
            "weight_scale",
            torch.full((128, 8), 255, dtype=torch.uint8),
        ),
    ],
    ids=["zero UE8M0", "missing", "fp8 channels", "fp8 tensors", "int4", "int4, columns in another order", "MXFP4"],
)
def test_corrupt_tensors_of_other_schemes(config, quantize, name, value, make_oracle, tmp_path):
    tensor = f"model.layers.0.mlp.down_proj.{name}"
    folder = make_oracle("llama", **EVEN).folder

    def change(tensors):
        tensors.pop(tensor, None)
        tensors.update({} if value is None else {tensor: value})

    quantized(folder, tmp_path / "q", config, quantize, change=change)
    with pytest.raises(CheckpointError, check=having(tensor=tensor)):
        load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("model_type", "changes"), [("deepseek_v3", {}), ("qwen3_moe", {"moe_intermediate_size": 48})])
def test_ranks_divide_blocks_at_their_boundaries(model_type, changes, make_oracle, make_stage, sequences, tmp_path):
    """The three blocks of Qwen's experts are divided unevenly."""
    config = {**FP8, "weight_block_size": [16, 16]}
    quantized(make_oracle(model_type, **changes).folder, tmp_path / "q", config, fp8_blocks(16, 16))
    wanted, _ = logits_of(tmp_path / "q", make_stage, sequences)
    ranks = in_ranks(2, lambda parallel: logits_of(tmp_path / "q", make_stage, sequences, parallel=parallel)[0])
    for found in ranks:
        for logits, whole in zip(found, wanted, strict=True):
            assert_close(logits, whole, atol=2e-4, rtol=0)


# Of 8 heads: attention outputs have 4 blocks of 64 columns, MLPs have 6.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 64}


@pytest.mark.parametrize(
    ("excluded", "refused", "size", "fitting"),
    [
        ("lm_head", 256, 8, (1, 2)),
        ("lm_head", 384, 4, (1, 2)),
        (r"lm_head|self_attn", 384, 8, (1, 2)),
        (r"lm_head|mlp", 256, 8, (1, 2, 4)),
        (r"lm_head|layers\.0", 256, 8, (1, 2)),
    ],
    ids=["attention", "MLP", "quantized MLP", "quantized attention", "second layer"],
)
def test_ranks_that_cannot_divide_all_weights_are_refused_before_any_is_read(
    excluded, refused, size, fitting, make_oracle, tmp_path, monkeypatch
):
    """The rank counts are those that all weights and heads allow (E5)."""
    folder = make_oracle("llama", intermediate_size=384, **HEADS).folder
    quantized(folder, tmp_path / "q", {**FP8, "weight_block_size": [64, 64]}, fp8_blocks(64, 64), excluded)
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name, *_, **__: pytest.fail(f"{name} was read"))
    with pytest.raises(ParallelError, check=having(count=refused, size=size, fitting=fitting)):
        Engine(str(tmp_path / "q"), device="cpu", page_size=16, parallel=Threads(size).rank(0))


def test_int4_scales_are_kept_without_rounding(make_oracle, make_stage, sequences, tmp_path):
    def as_float32(weight: torch.Tensor):
        parts, _ = int4_groups(32)(weight)
        scales = parts["weight_scale"].float() * 1.001
        codes = Int4Groups(32).decode(parts["weight_packed"]).unflatten(1, (-1, 32))
        return parts | {"weight_scale": scales}, (codes * scales.unsqueeze(2)).flatten(1)

    config = compressed("pack-quantized", **INT4, group_size=32)
    plain = quantized(make_oracle("llama", **EVEN).folder, tmp_path / "q", config, as_float32)
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    assert {weight.scales.dtype for weight in kept(loaded.module)} == {torch.float32}


def test_v4_has_mxfp4_experts_beside_fp8_blocks(make_oracle, make_stage, sequences, tmp_path):
    """E5. Scales are UE8M0 under the name ``scale``."""
    blocks = fp8_blocks(32, 32, exponents=True, name="scale")
    config = {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    plain = quantized(make_oracle("deepseek_v4").folder, tmp_path / "q", config, blocks, experts=mxfp4())
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, transformers_logits(plain, sequences), strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    assert {type(weight.scheme).__name__ for weight in kept(loaded.module)} == {"Fp8Blocks", "Mxfp4"}


def test_the_most_specific_target_decides_by_the_names_of_the_files(make_oracle, tmp_path):
    """E5: as in compressed-tensors, names precede expressions, and expressions the class."""
    form = compressed("float-quantized", **FLOAT8, strategy="channel")
    int4 = compressed("pack-quantized", **INT4, group_size=32)["config_groups"]["group_0"]
    int4 |= {"format": "pack-quantized", "targets": ["re:language_model.*mlp.*", "language_model.model.x"]}
    config = form | {"config_groups": form["config_groups"] | {"group_1": int4}}

    def mlp_in_int4(tensors):
        for name, tensor in values.items():
            if ".mlp." in name:
                module = name.removesuffix("weight")
                del tensors[name], tensors[f"{module}weight_scale"]
                tensors |= {module + part: value for part, value in int4_groups(32)(tensor)[0].items()}

    folder = make_oracle("llama", **EVEN).folder
    values = load_file(folder / "model.safetensors")
    quantized(folder, tmp_path / "q", config, fp8_channels, change=mlp_in_int4)
    nested(tmp_path / "q")
    loaded = load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu")
    first = loaded.module.layers[0]
    assert type(first.attention.qkv.weight.scheme).__name__ == "Fp8Channels"
    assert type(first.mlp.down.weight.scheme).__name__ == "Int4Groups"


def test_excluded_modules_of_a_nested_text_model_have_the_names_of_its_files(make_oracle, tmp_path):
    """Kimi-K2.5: ``ignore`` lists ``language_model.model.…``, and ours begin with ``model.``. Codes in a module that is
    excluded are refused."""
    source = tmp_path / "q"
    config = compressed("float-quantized", **FLOAT8, strategy="channel")
    config["ignore"] = ["re:language_model.*mlp.*"]
    quantized(make_oracle("llama").folder, source, config, fp8_channels)
    nested(source)
    with pytest.raises(WrongDtype, check=having(tensor="language_model.model.layers.0.mlp.gate_proj.weight")):
        load_model(str(source), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("scheme", ["fp8 blocks", "fp8 channels", "fp8 tensors", "int4, groups of 32", "MXFP4"])
def test_random_weights_are_quantized_as_the_config_says(scheme, make_stage, sequences, tmp_path):
    keys = {**TINY_CONFIGS["llama"], **EVEN, "quantization_config": CASES[scheme][2]}
    (tmp_path / "config.json").write_text(json.dumps(keys))
    loaded = load_model(str(tmp_path), dtype=torch.float32, device="cpu", random_weights=True)
    assert len(kept(loaded.module)) == 4 * len(loaded.module.layers)
    plain = load_model(str(tmp_path), dtype=torch.float32, device="cpu", random_weights=True)
    weight = kept(loaded.module)[0].dequantized(torch.float32)
    del keys["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    plain = load_model(str(tmp_path), dtype=torch.float32, device="cpu", random_weights=True)
    wanted = plain.module.layers[0].attention.qkv.weight
    assert (weight - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize("rows", [1, 5])
def test_the_reference_decodes_large_weights_in_parts(rows, monkeypatch):
    monkeypatch.setattr("attnplug_engine.quantization.scheme._MOST_DECODED", 32 * 40)
    for scheme in (SCHEMES[0](16, 16), SCHEMES[1](), SCHEMES[2](32), Mxfp4()):
        tensors = dict(scheme.quantize(torch.randn(100, 64)))
        scales = next(tensor for name, tensor in tensors.items() if "scale" in name)
        weight = QuantizedWeight(scheme, tensors[scheme.code_name], scales, scheme.rows_per_scale)
        x = torch.randn(rows, 64)
        assert_close(scheme.reference(x, weight), x @ weight.dequantized(torch.float32).T, atol=1e-4, rtol=1e-4)
