"""Quantized checkpoints of odd shapes: short blocks and groups, one expert, scales of every dtype, several files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FILE, FP8, INT4, compressed, fp8_blocks, int4_groups, kept, logits_of, quantized
from safetensors.torch import load_file, save_file
from thread_ranks import in_ranks
from torch.testing import assert_close

from attnplug_engine.checkpoints.safetensors import INDEX_FILE

BLOCKS = {**FP8, "weight_block_size": [32, 16]}
GROUPS = compressed("pack-quantized", **INT4, group_size=32)
ARCHITECTURES = {
    "llama": {"hidden_size": 136, "intermediate_size": 208, "head_dim": 24},
    "phi3": {"hidden_size": 104, "intermediate_size": 120, "head_dim": 24},
    "qwen3_moe": {"hidden_size": 72, "moe_intermediate_size": 48, "num_experts": 1, "num_experts_per_tok": 1},
    "deepseek_v3": {"hidden_size": 136, "intermediate_size": 200, "moe_intermediate_size": 72, "q_lora_rank": 40},
}


def split(folder: Path) -> None:
    """Divide a checkpoint into three files. Neighbours by name, such as a weight and its scales, are in different
    ones."""
    tensors = load_file(folder / FILE)
    (folder / FILE).unlink()
    files = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.sample(6)
def test_scales_of_every_dtype_in_short_blocks(model_type, kind, make_oracle, make_stage, sequences, tmp_path):
    """E5: powers of two, which all dtypes hold exactly."""

    def convert(tensors):
        for name, scales in tensors.items():
            if name.endswith("_scale_inv"):
                tensors[name] = scales.view(kind) if kind is torch.uint8 else scales.float().to(kind)

    folder = make_oracle(model_type, **ARCHITECTURES[model_type]).folder
    plain = quantized(folder, tmp_path / "q", BLOCKS, fp8_blocks(32, 16, exponents=True), change=convert)
    split(tmp_path / "q")
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    assert kept(loaded.module)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.sample(2)
def test_a_short_last_group_has_a_scale_of_its_own(model_type, make_oracle, make_stage, sequences, tmp_path):
    """E5"""
    plain = quantized(
        make_oracle(model_type, **ARCHITECTURES[model_type]).folder, tmp_path / "q", GROUPS, int4_groups(32)
    )
    split(tmp_path / "q")
    found, _ = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)


def test_ranks_share_a_short_last_block(make_oracle, make_stage, sequences, tmp_path):
    """E5: 48 columns in blocks of 32, which two ranks divide unevenly."""
    folder = make_oracle("qwen3_moe", hidden_size=72, moe_intermediate_size=48).folder
    config = {**FP8, "weight_block_size": [32, 32]}
    plain = quantized(folder, tmp_path / "q", config, fp8_blocks(32, 32))
    wanted, _ = logits_of(plain, make_stage, sequences)
    for found in in_ranks(2, lambda parallel: logits_of(tmp_path / "q", make_stage, sequences, parallel=parallel)[0]):
        for logits, whole in zip(found, wanted, strict=True):
            assert_close(logits, whole, atol=2e-4, rtol=0)
