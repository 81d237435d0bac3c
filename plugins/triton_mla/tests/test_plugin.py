"""Refusals of the spec, on a machine without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import CacheLayout, DType, GraphLevel, Problem, Refusal, Role
from attnplug.host import load_registry
from attnplug.sparse import IndexerDims
from attnplug_testing.command import in_own_process
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, read
from attnplug_triton_mla.plugin import attnplug_backends

(SPEC,) = attnplug_backends()
BF16, FP16, FP32, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT8_E4M3
CODED = ["float8_e4m3fn", "fp8_ds_mla", "fp8_per_token_head", "nvfp4"]
ON_AN_H200 = Problem(read(DEEPSEEK_V3), "cuda", 90, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against DeepSeek-V3 on an H200, with these changes."""
    return SPEC.refusals(replace(ON_AN_H200, **changes), role)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": FP16, "kv_dtype": FP16},
        {"kv_dtype": FP8},
        {"kv_dtype": FP8, "dtype": FP16},
        {"kv_dtype": "fp8_per_token_head"},
        {"kv_dtype": "nvfp4", "sm": 80},
        {"page_size": 1},
        {"page_size": 48},
        {"layout": CacheLayout.STRIDED},
        {"sm": 80},
        {"sm": 120, "kv_dtype": FP8},
        {"model": read(KIMI_LINEAR)},
        {"model": read(DEEPSEEK_V3, kv_lora_rank=256)},
        {"cuda_graph": GraphLevel.ALWAYS, "speculative_tokens": 64, "speculative_topk": 8},
        {"tensor_parallel": 16},
    ],
    ids=[
        *(
            "deepseek",
            "fp16",
            "fp8",
            "fp8-with-fp16",
            "token-scales",
            "nvfp4-ampere",
            "pages-of-1",
            "pages-of-48",
            "strided",
            "ampere",
            "blackwell",
        ),
        *("kimi", "latent-256", "graphs", "8-heads"),
    ],
)
def test_it_serves(changes: dict[str, Any], role: Role) -> None:
    """D3"""
    assert refusals(role, **changes) == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 75}, [("sm", 75, "SM 80 or newer", None)]),
        (
            {"model": read(DEEPSEEK_V3, kv_lora_rank=128)},
            [("mla_dims", [128, 64], [[256, 0], [256, 64], [512, 0], [512, 64]], "decode_attention_backend")],
        ),
        (
            {"dtype": FP32, "kv_dtype": FP32},
            [
                ("dtype", "float32", ["bfloat16", "float16"], "dtype"),
                ("kv_dtype", "float32", ["bfloat16", "float16", *CODED], "kv_dtype"),
            ],
        ),
        ({"sm": 80, "kv_dtype": FP8}, [("kv_dtype", "float8_e4m3fn", ["bfloat16", "nvfp4"], "kv_dtype")]),
        ({"sm": 86, "kv_dtype": CODED[1]}, [("kv_dtype", CODED[1], ["bfloat16", "nvfp4"], "kv_dtype")]),
        ({"kv_dtype": FP16}, [("kv_dtype", "float16", ["bfloat16", *CODED], "kv_dtype")]),
        (
            {"model": read(DEEPSEEK_V3, num_attention_heads=256, num_key_value_heads=256)},
            [("heads", 256, 128, "tensor_parallel")],
        ),
        ({"speculative_tokens": 65}, [("speculation", 65, 64, "speculative_tokens")]),
    ],
    ids=[
        "cpu",
        "turing",
        "latent-128",
        "fp32",
        "fp8-on-ampere",
        "token-scales-on-ampere",
        "kv-fp16-with-bf16",
        "256-heads",
        "speculation",
    ],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


@pytest.mark.parametrize(("topk", "reasons"), [(2048, []), (9000, [(9000, 8192)])])
def test_an_index_that_cannot_be_scored_is_refused(topk: int, reasons: list[tuple[int, int]]) -> None:
    """D3"""
    model, index = read(DEEPSEEK_V3), IndexerDims(64, 128, topk)
    sparse = replace(model, layers=tuple(replace(layer, indexer=index) for layer in model.layers))
    assert [(reason.value, reason.allowed) for reason in refusals(model=sparse)] == reasons


def test_layers_that_differ_are_refused_with_how() -> None:
    """D3: one schedule serves all layers."""
    model = read(DEEPSEEK_V3)
    first, *others = model.layers
    (reason,) = refusals(model=replace(model, layers=(replace(first, num_heads=64), *others)))
    assert (reason.code, reason.value) == ("layers", {"num_heads": [64, 128]})


def test_it_is_asked_for_as_a_role(tmp_path: Path) -> None:
    """D1, D3, E3: the answer needs no GPU; it keeps every level of invariance."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    roles = ("--attention-backend", "triton_mla", "--batch-invariant")
    outcome = in_own_process(
        *("explain", "--model", str(tmp_path), "--sm", "90", *roles, "--json"), CUDA_VISIBLE_DEVICES=""
    )
    assert outcome.code == 0, outcome
    assert {outcome.json[role]["chosen"] for role in ("prefill", "decode")} == {"triton_mla"}
    assert 0 < SPEC.preference < 90, "behind the libraries', before torch_native"


def test_its_counters_are_a_kind_of_memory_of_its_own() -> None:
    """A2"""
    counters = load_registry(environment={}).workspace_kinds["triton-mla-counters"]
    assert counters.value.zeroed and counters.source.distribution == "attnplug-triton-mla"
