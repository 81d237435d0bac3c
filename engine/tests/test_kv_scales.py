"""Stored scales of keys and values: those of an fp8 cache, in checkpoints that were calibrated for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attnplug_engine.checkpoints.safetensors import CheckpointError
from attnplug_engine.engine import Engine
from attnplug_engine.models.architectures import load_model
from attnplug_engine.quantization.scheme import QuantizedWeight
from attnplug_testing.errors import having


def with_large_rows(folder: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Write a model whose cached rows are 4096 times as large, with the same output, and ``scales`` of a layer."""
    up, down = 4096.0, 1 / 4096
    factors = {"k_proj": up, "v_proj": up, "q_proj": down, "o_proj": down}
    stored = load_file(folder / "model.safetensors")
    if latent := any("kv_b_proj" in name for name in stored):
        factors = {"kv_a_layernorm": up, "kv_b_proj": down}
    tensors = {}
    for name, tensor in stored.items():
        module = name.split(".")[-2]
        tensors[name] = tensor = tensor * factors.get(module, 1.0)
        if latent and module == "kv_a_proj_with_mqa":
            tensor[-8:] *= up  # rotary columns; the latent ones are normed
        if latent and module == "q_b_proj":
            tensor.view(4, 24, -1)[:, -8:] *= down
        if module == "o_proj":
            tensors |= {name.removesuffix("o_proj.weight") + key: value.clone() for key, value in scales.items()}
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


LARGE = {"k_scale": torch.tensor([4096.0]), "v_scale": torch.tensor([4096.0])}


@pytest.mark.parametrize(
    ("model_type", "scales", "is_kept"),
    [
        ("llama", LARGE | {"q_scale": torch.tensor([2.0])}, True),
        ("llama", {"k_proj.k_scale": torch.tensor(4096.0), "v_proj.v_scale": torch.tensor(4096.0)}, True),
        ("llama", {f"qkv_proj.{name}": scale for name, scale in LARGE.items()}, True),
        ("llama", {"kv_scale": torch.tensor(4096.0)}, True),
        ("llama", {}, False),
        ("deepseek_v3", LARGE, True),
        ("deepseek_v3", {}, False),
    ],
    ids=["of llm-compressor", "of ModelOpt", "stacked", "of AutoFP8", "none", "MLA", "MLA, none"],
)
def test_an_fp8_cache_uses_the_scales_of_the_checkpoint(model_type, scales, is_kept, shared_oracle, tmp_path):
    """E5: with its scales, such a cache has the codes of the model with smaller rows. Without, it saturates. Other
    caches do not need them."""
    folder = shared_oracle(model_type).folder
    with_large_rows(folder, tmp_path / "large", scales)
    prompt = torch.randint(0, 128, (37,), generator=torch.Generator().manual_seed(3)).tolist()
    options = {"device": "cpu", "dtype": "float32", "page_size": 8, "chunked_prefill_size": 16}
    for kv_dtype, is_equal in (("fp8", is_kept), ("float32", True)):
        original, large = (
            Engine(str(path), kv_dtype=kv_dtype, **options).generate([prompt], max_tokens=12, logprobs=1)[0]
            for path in (folder, tmp_path / "large")
        )
        assert (original == large) is is_equal


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize(
    "keys",
    [
        {"config_groups": {}, "kv_cache_scheme": CACHE},
        {"config_groups": {"group_0": {"targets": ["LlamaAttention"], "weights": None, "input_activations": CACHE}}},
    ],
    ids=["of the cache", "of attention"],
)
def test_weights_of_a_model_that_is_quantized_otherwise_are_plain(keys, make_oracle, tmp_path):
    """E5"""
    folder = make_oracle("llama").folder
    large = with_large_rows(folder, tmp_path / "large", LARGE)
    config = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed", **keys}
    values = json.loads((large / "config.json").read_text()) | {"quantization_config": config}
    (large / "config.json").write_text(json.dumps(values))
    loaded = load_model(str(large), dtype=torch.float32, device="cpu")
    assert not any(isinstance(module, QuantizedWeight) for module in loaded.module.modules())


def test_an_fp8_cache_of_a_draft_uses_the_scales_of_its_checkpoint(shared_oracle, tmp_path):
    """E5: all of its proposals are those of the target, which has small rows."""
    folder = shared_oracle("llama").folder
    draft = with_large_rows(folder, tmp_path / "large", LARGE)
    speculation = {"speculative_algorithm": "standalone", "speculative_draft_model": str(draft)}
    engine = Engine(str(folder), device="cpu", dtype="float32", kv_dtype="fp8", **speculation)
    engine.generate([list(range(37))], max_tokens=12)
    assert engine.statistics.rounds.acceptance == 1.0


@pytest.mark.parametrize(
    ("scales", "wrong"),
    [
        ({"v_scale": torch.zeros(1)}, "v_scale"),
        ({"v_scale": torch.tensor([torch.nan])}, "v_scale"),
        ({"k_scale": torch.ones(2)}, "k_scale"),
        ({"v_scale": None}, "v_scale"),
        ({"k_scale": None}, "k_scale"),
    ],
    ids=["zero", "NaN", "shape", "no values", "no keys"],
)
def test_scales_of_a_cache_that_are_refused(scales, wrong, shared_oracle, tmp_path):
    given = {name: value for name, value in {**LARGE, **scales}.items() if value is not None}
    with_large_rows(shared_oracle("llama").folder, tmp_path / "large", given)
    with pytest.raises(CheckpointError, check=having(tensor=f"model.layers.0.self_attn.{wrong}")) as caught:
        load_model(str(tmp_path / "large"), dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)
