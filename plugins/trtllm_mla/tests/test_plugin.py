"""Specs of the plugin: supported problems, and every refusal, before anything is built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnplug import CacheLayout, DType, GraphLevel, Problem, Refusal, Role, UsageError
from attnplug.declare.options import parse_options
from attnplug.host import load_registry
from attnplug_testing.command import Explained
from attnplug_testing.configs import DEEPSEEK_V3, KIMI_LINEAR, read
from attnplug_testing.errors import raises_naming
from attnplug_trtllm_mla.plugin import attnplug_backends

(SPEC,) = attnplug_backends()
BF16, FP16, FP8 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT8_E4M3
ON_A_B200 = Problem(read(DEEPSEEK_V3), "cuda", 100, BF16, BF16, 64)


def refusals(role: Role | None = Role.DECODE, **changes: Any) -> list[Refusal]:
    """The reasons against DeepSeek-V3 on a B200, with these changes."""
    return SPEC.refusals(replace(ON_A_B200, **changes), role)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFT])
@pytest.mark.parametrize("sm", [100, 103])
def test_it_serves_deepseek_v3_on_blackwell(sm: int, role: Role, page_size: int, kv_dtype: DType) -> None:
    """D3, A4: decided by installed packages, without a GPU."""
    assert refusals(role, sm=sm, page_size=page_size, kv_dtype=kv_dtype) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model": read(KIMI_LINEAR)},
        {"cuda_graph": GraphLevel.UNIFORM, "speculative_tokens": 64},
        {"tensor_parallel": 8},
    ],
    ids=["kimi", "graphs", "ranks"],
)
def test_it_serves(changes: dict[str, Any]) -> None:
    """D3"""
    assert refusals(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"device": "cpu", "sm": None}, [("device", "cpu", ["cuda"], "device")]),
        ({"sm": 90}, [("sm", 90, "SM 100 to 103", None)]),
        ({"sm": 120}, [("sm", 120, "SM 100 to 103", None)]),
        ({"sm": 101}, [("sm", 101, [100, 103], None)]),
        (
            {"model": read(DEEPSEEK_V3, kv_lora_rank=256)},
            [("mla_dims", [256, 64], [[512, 64]], "decode_attention_backend")],
        ),
        (
            {"dtype": FP16, "kv_dtype": FP16},
            [
                ("dtype", "float16", ["bfloat16"], "dtype"),
                ("kv_dtype", "float16", ["bfloat16", "float8_e4m3fn"], "kv_dtype"),
            ],
        ),
        ({"page_size": 16}, [("page_size", 16, [32, 64], "page_size")]),
        ({"layout": CacheLayout.STRIDED}, [("layout", "strided", ["head_major", "token_major"], "layout")]),
        (
            {"model": read(DEEPSEEK_V3, num_attention_heads=256, num_key_value_heads=256)},
            [("heads", 256, 128, "tensor_parallel")],
        ),
        (
            {"cuda_graph": GraphLevel.ALWAYS},
            [("cuda_graph", "ALWAYS", ["NEVER", "DECODE", "UNIFORM"], "cuda_graph")],
        ),
        ({"speculative_tokens": 65}, [("speculation", 65, 64, "speculative_tokens")]),
    ],
    ids=[
        "cpu",
        "hopper",
        "consumer",
        "between",
        "latent-256",
        "fp16",
        "page-16",
        "rows-apart",
        "256-heads",
        "graphs-of-prefill",
        "65-speculative-tokens",
    ],
)
def test_it_refuses_with_value_and_what_is_allowed_and_the_setting(
    changes: dict[str, Any], reasons: list[tuple[str, object, object, str]]
) -> None:
    """D3, A4: every reason, and no other."""
    found = refusals(**changes)
    assert [(reason.code, reason.value, reason.allowed, reason.setting) for reason in found] == reasons


def test_workspace_of_no_bytes_is_refused() -> None:
    """D3"""
    with raises_naming(UsageError, "workspace_mib=0"):
        parse_options(SPEC.name, SPEC.options, {"workspace_mib": "0"})


@pytest.fixture
def deepseek(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    return str(tmp_path)


def test_asked_for_on_an_h200_it_says_which_gpus_it_needs(explained: Explained, deepseek: str) -> None:
    """D3: before anything is built, and no GPU is needed to ask."""
    code, roles = explained("--model", deepseek, "--attention-backend", "trtllm_mla", "--sm", "90")
    assert code == 1
    for role in ("prefill", "decode"):
        (reasons,) = (c["refusals"] for c in roles[role]["candidates"] if c["name"] == "trtllm_mla")
        assert [(reason["code"], reason["allowed"]) for reason in reasons] == [("sm", "SM 100 to 103")]


def test_auto_leaves_hopper_to_flashinfer_mla_and_takes_fp8_on_blackwell(explained: Explained, deepseek: str) -> None:
    """D1, D3: FlashInfer's own kernels read no fp8 cache there."""
    for sm, kv_dtype, wanted in (
        ("90", "fp8", "flashinfer_mla"),
        ("100", "bf16", "flashinfer_mla"),
        ("100", "fp8", "trtllm_mla"),
    ):
        code, roles = explained("--model", deepseek, "--sm", sm, "--kv-dtype", kv_dtype)
        assert code == 0
        assert {choice["chosen"] for choice in roles.values()} == {wanted}


def test_its_kinds_of_memory_are_its_own() -> None:
    """A2: semaphores are zeroed, and CuTe DSL kernels never share with TRT-LLM's. Core knows neither."""
    kinds = load_registry(environment={}).workspace_kinds.values()
    own = {kind.value.name: kind.value.zeroed for kind in kinds if kind.source.entry_point == "trtllm_mla"}
    assert own == {"trtllm-semaphores": True, "cute-dsl-scratch": False}
