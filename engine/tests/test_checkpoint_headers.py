"""Wrong tensors are found in the headers of a checkpoint's files, by the error that loading them would raise."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import CASES, EVEN, FILE, FP8, fp8_blocks, mxfp4, published_gpt_oss, quantized
from safetensors.torch import load_file, save_file

from attnplug import UsageError
from attnplug.host import TINY_CONFIGS
from attnplug_engine.checkpoints.random import RandomCheckpoint
from attnplug_engine.checkpoints.safetensors import Checkpoint
from attnplug_engine.models.architectures import build_model, load_model, load_spec, open_source, rank_nbytes

CHANGES = {
    "missing": lambda tensor: None,
    "another shape": lambda tensor: torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1).to(tensor.dtype),
    "another dtype": lambda tensor: torch.zeros(tensor.shape, dtype=torch.bool),
    "another tensor": lambda tensor: tensor,
}
SAMPLED = 2
"""Tensors of each checkpoint that are changed."""


def error_of(call) -> tuple[type[UsageError], str] | None:
    try:
        call()
    except UsageError as error:
        return type(error), str(error)
    return None


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare errors about changed tensors; return how many there were."""
    good, found = load_file(folder / FILE), 0
    numbers = random.Random(zlib.crc32(" ".join(good).encode()))
    for name in numbers.sample(sorted(good), min(SAMPLED, len(good))):
        for change, apply in CHANGES.items():
            changed = apply(good[name])
            tensors = {key: tensor for key, tensor in good.items() if key != name or change == "another tensor"}
            if changed is not None:
                tensors[f"{name}x" if change == "another tensor" else name] = changed.clone()
            save_file(tensors, folder / FILE, metadata={"format": "pt"})
            with monkeypatch.context() as patched:
                patched.setattr(Checkpoint, "tensor", only_small)
                source = open_source(str(folder), device="cpu")
                early = error_of(lambda source=source: rank_nbytes(source, load_spec(str(folder)), 1))
            late = error_of(lambda: load_model(str(folder), dtype=torch.float32, device="cpu"))
            assert early == late, (name, change)
            found += late is not None
    return found


_tensor = Checkpoint.tensor


def only_small(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], **options):
    assert len(shape) == 1 or shape == (), f"{name} was read"
    return _tensor(checkpoint, name, shape, **options)


@pytest.mark.parametrize("name", TINY_CONFIGS)
@pytest.mark.sample(8)
def test_wrong_tensors_are_found_before_weights_are_read(name, tmp_path, monkeypatch):
    """E5"""
    source = RandomCheckpoint.tiny(f"tiny:{name}")
    build_model(source, load_spec(f"tiny:{name}"), dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    assert compare(tmp_path, monkeypatch) > SAMPLED


@pytest.mark.parametrize("case", CASES)
def test_wrong_tensors_of_quantized_weights_are_found_before_they_are_read(case, make_oracle, tmp_path, monkeypatch):
    """E5"""
    model_type, keys, config, quantize = CASES[case]
    quantized(make_oracle(model_type, **keys).folder, tmp_path / "q", config, quantize)
    assert compare(tmp_path / "q", monkeypatch) > SAMPLED


def test_wrong_tensors_of_quantized_experts_are_found_before_they_are_read(make_oracle, tmp_path, monkeypatch):
    """E5"""
    published_gpt_oss(make_oracle("gpt_oss").folder, tmp_path / "gpt_oss")
    assert compare(tmp_path / "gpt_oss", monkeypatch) > SAMPLED
    folder = make_oracle("deepseek_v3", **EVEN).folder
    config = {**FP8, "weight_block_size": [16, 16]}
    quantized(folder, tmp_path / "v4", config, fp8_blocks(16, 16), experts=mxfp4())
    assert compare(tmp_path / "v4", monkeypatch) > SAMPLED


def test_scales_of_cached_keys_and_values_are_tensors_of_the_model(tmp_path, monkeypatch):
    """E5"""
    source = RandomCheckpoint.tiny("tiny:llama")
    build_model(source, load_spec("tiny:llama"), dtype=torch.float32, device="cpu")
    source.save(tmp_path)
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.ones(1) for kind in "kv"}
    save_file({**load_file(tmp_path / FILE), **scales}, tmp_path / FILE, metadata={"format": "pt"})
    assert rank_nbytes(open_source(str(tmp_path), device="cpu"), load_spec(str(tmp_path)), 1) > 0
    monkeypatch.setattr(random.Random, "sample", lambda self, names, count: sorted(scales))
    assert compare(tmp_path, monkeypatch) == 8
