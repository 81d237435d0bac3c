"""Quantized output heads: detected by the stored tensors, even if the config ties them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import CASES, FP8, fp8_blocks, logits_of, nested, quantized, transformers_logits
from safetensors.torch import load_file, save_file
from thread_ranks import in_ranks
from torch.testing import assert_close

from attnplug_engine.models.architectures import load_model

HEADS_QUANTIZED = ["fp8 channels", "fp8 tensors", "int4, groups of 32", "MXFP4"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(case, make_oracle, target: Path, *, nest: bool = False, drop: str | None = None, **keys) -> Path:
    """Write a checkpoint whose head is quantized too; return the path of the dequantized one."""
    _, changes, config, quantize = CASES[case]
    folder = make_oracle("llama", **changes).folder
    everything = {**config, "ignore": []}
    plain = quantized(folder, target, everything, quantize, "nothing", lambda tensors: tensors.pop(drop, None))
    if drop is not None:
        tensors = load_file(plain / "model.safetensors")
        del tensors[drop]
        save_file(tensors, plain / "model.safetensors")
    for path in (target, plain):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | keys))
    if nest:
        nested(target)
    return plain


@pytest.mark.parametrize("case", HEADS_QUANTIZED)
@pytest.mark.parametrize(
    "how",
    [{}, {"nest": True}, {"tie_word_embeddings": True}, {"tie_word_embeddings": True, "drop": EMBEDDING}],
    ids=["own", "nested", "tied by the config", "tied and stored once"],
)
def test_a_quantized_head_is_found_by_what_is_stored(case, how, make_oracle, make_stage, sequences, tmp_path):
    """E5: also in codes of another name than its weight. A stored head wins over a config that ties it."""
    plain = with_head(case, make_oracle, tmp_path / "q", **how)
    found, loaded = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, logits_of(plain, make_stage, sequences)[0], strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)
    values = load_file(plain / "model.safetensors")
    assert_close(loaded.module.head.weight, values[HEAD].float(), atol=0, rtol=0)
    assert_close(loaded.module.embedding, values.get(EMBEDDING, values[HEAD]).float(), atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_the_logits_of_a_quantized_head_are_those_of_transformers(make_oracle, make_stage, sequences, tmp_path):
    """E5"""
    with_head("int4, groups of 32", make_oracle, tmp_path / "q")
    found, _ = logits_of(tmp_path / "q", make_stage, sequences)
    for logits, wanted in zip(found, transformers_logits(tmp_path / "q", sequences), strict=True):
        assert_close(logits, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("case", HEADS_QUANTIZED)
def test_an_embedding_model_leaves_a_quantized_head_unread(case, make_oracle, tmp_path):
    with_head(case, make_oracle, tmp_path / "q")
    assert load_model(str(tmp_path / "q"), dtype=torch.float32, device="cpu", head=False).module.head is None


def test_ranks_divide_a_quantized_head_inside_of_blocks(make_oracle, make_stage, sequences, tmp_path):
    """33 rows each, of blocks of 16."""
    folder = make_oracle("llama", vocab_size=130, num_key_value_heads=4, intermediate_size=128).folder
    config = {**FP8, "weight_block_size": [16, 16]}
    quantized(folder, tmp_path / "q", config, fp8_blocks(16, 16), "nothing")
    wanted, _ = logits_of(tmp_path / "q", make_stage, sequences)
    for found in in_ranks(4, lambda parallel: logits_of(tmp_path / "q", make_stage, sequences, parallel=parallel)[0]):
        for logits, whole in zip(found, wanted, strict=True):
            assert_close(logits, whole, atol=2e-4, rtol=0)
