"""A start-up of the engine that is recorded on shapes alone (E1), where FlashMLA's operators cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnplug.host import TINY_CONFIGS
from attnplug_testing.libraries import install_library
from attnplug_testing.triton_mode import compiled_by

DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OPERATORS = """
from types import SimpleNamespace

import torch

torch.library.define("flash_mla_legacy::metadata", "(Tensor lens, int queries) -> (Tensor, Tensor)")
torch.library.define("flash_mla_legacy::decode", "(Tensor q, Tensor cache, Tensor table) -> (Tensor, Tensor)")


def has_legacy():
    return True


def get_mla_decoding_metadata(seqlens_k, num_q_tokens_per_head_k, **_):
    return torch.ops.flash_mla_legacy.metadata(seqlens_k, num_q_tokens_per_head_k)


def flash_mla_with_kvcache(q, k_cache, block_table, **_):
    return torch.ops.flash_mla_legacy.decode(q, k_cache, block_table)


def get_mla_metadata():
    return SimpleNamespace(), None


flash_mla_sparse_fwd = None
"""


@pytest.mark.long
def test_triton_kernels_around_flashmla_are_recorded(tmp_path: Path) -> None:
    """E1: that of planning, and those that the engine launches before attention and behind it."""
    pytest.importorskip("triton")
    install_library(tmp_path, "sgl-flash-mla", "1.0.0", {"flash_mla": OPERATORS})
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["deepseek_v3"], **DIMS}))
    found = compiled_by(Path(__file__).with_name("record_flashmla.py"), str(tmp_path), str(tmp_path))
    assert {"_fill_pages", "_absorb", "_by_head", "_choose", "_end"} <= set(found), found
    assert any("flashmla" in text and "flash_mla_legacy.metadata" in text for text in found)
